"""Which schedule to run: predicted, searched on the device, stored, and served at call time."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import tile_scheduler
from tile_scheduler import __version__

if TYPE_CHECKING:
    from scheduler.api import (
        predict,
        reload,
        target,
        tune,
        tuned,
        tuned_matmul,
        tuned_rms_norm,
        tuned_silu_and_mul,
        tuned_softmax,
    )
    from scheduler.attention import tuned_flash_attention
    from scheduler.core.errors import CacheMiss, IllegalSchedule, NoCandidate, SchedulerError, StoreError, WorkerError
    from scheduler.decorator import autotune
    from scheduler.measure.replay import Replay
    from scheduler.store.store import Store

__all__ = [
    "CacheMiss",
    "IllegalSchedule",
    "NoCandidate",
    "Replay",
    "SchedulerError",
    "Store",
    "StoreError",
    "WorkerError",
    "__version__",
    "autotune",
    "predict",
    "reload",
    "target",
    "tune",
    "tuned",
    "tuned_flash_attention",
    "tuned_matmul",
    "tuned_rms_norm",
    "tuned_silu_and_mul",
    "tuned_softmax",
]

tile_scheduler.warn()

_ERRORS = ("CacheMiss", "IllegalSchedule", "NoCandidate", "SchedulerError", "StoreError", "WorkerError")
_HOMES = dict.fromkeys(_ERRORS, "scheduler.core.errors") | {
    "autotune": "scheduler.decorator",
    "Replay": "scheduler.measure.replay",
    "Store": "scheduler.store.store",
    "tuned_flash_attention": "scheduler.attention",
}


def __getattr__(name: str) -> Any:
    # Loaded when first used: `import scheduler` costs nothing, and worker processes load only what they run.
    if name not in __all__:
        raise AttributeError(f"module 'scheduler' has no attribute {name!r} (it has: {', '.join(__all__)})")
    value = getattr(importlib.import_module(_HOMES.get(name, "scheduler.api")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
