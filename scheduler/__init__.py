"""Autotuner for Pallas kernels: predicts, searches, stores and serves schedules at call time."""

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
    )
    from scheduler.attention_calls import tuned_flash_attention
    from scheduler.core.errors import (
        CacheMiss,
        IllegalSchedule,
        NoCandidate,
        PlanError,
        SchedulerError,
        StoreError,
        WorkerError,
    )
    from scheduler.core.plan import Plan
    from scheduler.decorator import autotune
    from scheduler.grouped_calls import tuned_gated_ragged_dot, tuned_ragged_dot
    from scheduler.measure.replay import Replay
    from scheduler.product_calls import tuned_gated_matmul, tuned_scaled_matmul
    from scheduler.rewriting.optimize import optimize
    from scheduler.rewriting.plan import plan
    from scheduler.rewriting.problems import problems
    from scheduler.rewriting.rewrite import rewrite
    from scheduler.row_calls import (
        rows,
        tuned_cross_entropy,
        tuned_group_norm,
        tuned_layer_norm,
        tuned_log_softmax,
        tuned_quantize_rows,
        tuned_rms_norm,
        tuned_silu_and_mul,
        tuned_softmax,
    )
    from scheduler.store.store import Store
    from scheduler.tuned_calls import tuned_matmul
    from search_spaces.random_bits import threefry13

__all__ = [
    "CacheMiss",
    "IllegalSchedule",
    "NoCandidate",
    "Plan",
    "PlanError",
    "Replay",
    "SchedulerError",
    "Store",
    "StoreError",
    "WorkerError",
    "__version__",
    "autotune",
    "optimize",
    "plan",
    "predict",
    "problems",
    "reload",
    "rewrite",
    "rows",
    "target",
    "threefry13",
    "tune",
    "tuned",
    "tuned_cross_entropy",
    "tuned_flash_attention",
    "tuned_gated_matmul",
    "tuned_gated_ragged_dot",
    "tuned_group_norm",
    "tuned_layer_norm",
    "tuned_log_softmax",
    "tuned_matmul",
    "tuned_quantize_rows",
    "tuned_ragged_dot",
    "tuned_rms_norm",
    "tuned_scaled_matmul",
    "tuned_silu_and_mul",
    "tuned_softmax",
]

tile_scheduler.warn()

_ERRORS = ("CacheMiss", "IllegalSchedule", "NoCandidate", "PlanError", "SchedulerError", "StoreError", "WorkerError")
_HOMES = dict.fromkeys(_ERRORS, "scheduler.core.errors") | {
    "autotune": "scheduler.decorator",
    "optimize": "scheduler.rewriting.optimize",
    "problems": "scheduler.rewriting.problems",
    "rewrite": "scheduler.rewriting.rewrite",
    "Plan": "scheduler.core.plan",
    "plan": "scheduler.rewriting.plan",
    "Replay": "scheduler.measure.replay",
    "Store": "scheduler.store.store",
    "threefry13": "search_spaces.random_bits",
}
_HOMES |= {name: "scheduler.tuned_calls" for name in __all__ if name.startswith("tuned_")}
_HOMES |= dict.fromkeys(("tuned_gated_matmul", "tuned_scaled_matmul"), "scheduler.product_calls")
_HOMES["tuned_flash_attention"] = "scheduler.attention_calls"
_HOMES |= dict.fromkeys(("tuned_gated_ragged_dot", "tuned_ragged_dot"), "scheduler.grouped_calls")
_ROWS = (
    "cross_entropy", "group_norm", "layer_norm", "log_softmax", "quantize_rows", "rms_norm", "silu_and_mul", "softmax",
)  # fmt: skip
_HOMES |= dict.fromkeys(("rows", *(f"tuned_{name}" for name in _ROWS)), "scheduler.row_calls")


def __getattr__(name: str) -> Any:
    # Lazy imports: `import scheduler` is cheap, and a worker process loads only the modules that it runs.
    if name not in __all__:
        raise AttributeError(f"module 'scheduler' has no attribute {name!r} (it has: {', '.join(__all__)})")
    value = getattr(importlib.import_module(_HOMES.get(name, "scheduler.api")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
