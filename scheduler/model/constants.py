"""Which constants the cost model takes for a kernel on a chip: the user's own, the shipped ones, or its defaults."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from scheduler.core.aliases import CONSTANTS
from scheduler.core.errors import StoreError
from scheduler.core.hardware import Hardware
from scheduler.core.records import Calibration
from scheduler.model.cost import CostModel
from scheduler.model.overheads import BY_ARCHITECTURE, Constants
from scheduler.store import patience
from search_spaces.kernel import Kernel
from search_spaces.operation import Operation

_log = logging.getLogger("scheduler")


def model_of(
    operation: Operation[Any], kernel: Kernel[Any, Any], hardware: Hardware, *, shared_only: bool = False
) -> CostModel:
    """The cost model with what was fitted to `kernel` and to the operation's library on this chip.

    Args:
      shared_only: leave the user's own constants out: processes of one job may not share them.
    """
    found = calibrations(operation.name, hardware, shared_only=shared_only)
    values: dict[str, float] = {}
    for backend in (operation.library.backend, kernel.backend):
        if backend in found:
            values |= known(found[backend])
    start = BY_ARCHITECTURE.get(hardware.architecture, Constants())
    try:
        return CostModel(hardware, dataclasses.replace(start, **values))
    except ValueError as error:  # a store may hold any number
        _say_once(f"the constants of {operation.name} on {hardware.kind} are not taken: {error}")
        return CostModel(hardware, start)


_said: set[str] = set()


def _say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        _log.warning("%s", message)


def calibrations(operation: str, hardware: Hardware, *, shared_only: bool = False) -> Mapping[str, Calibration]:
    """What is stored for an operation on a chip, by backend: the user's own before the shipped."""
    from scheduler.store import store  # SQLAlchemy takes 0.4 s to import

    own = ""
    if not shared_only:
        with contextlib.suppress(StoreError):  # whoever reads records there says so, once
            own = store.default_url()
    return _read(operation, hardware.id, own)


def known(calibration: Calibration) -> dict[str, float]:
    """Those of its constants that today's model has, by today's names."""
    names = {field.name for field in dataclasses.fields(Constants)}
    today = {CONSTANTS.get(name, name): value for name, value in calibration.constants.items()}
    return {name: value for name, value in today.items() if name in names}


def forget() -> None:
    """Reads the stores again when asked next."""
    _read.cache_clear()


@functools.lru_cache(maxsize=64)
def _read(operation: str, hardware: str, user_url: str) -> Mapping[str, Calibration]:
    from scheduler.store import store

    def shipped() -> Iterable[Calibration]:
        with contextlib.ExitStack() as stack:
            if (kept := store.shipped()) is None:
                return ()
            stack.callback(kept.close)
            return kept.calibrations(hardware=hardware, operation=operation)

    def own() -> Iterable[Calibration]:
        with contextlib.closing(store.Store(user_url)) as kept:
            if patience.given_up(kept.location):
                return ()
            return patience.patiently(kept.location, lambda: kept.calibrations(hardware=hardware, operation=operation))

    found: dict[str, Calibration] = {}
    for read in (shipped, *((own,) if user_url else ())):
        try:
            found |= {c.backend: c for c in read()}
        except StoreError as error:  # whoever reads records there says so, once
            _log.debug("%s (the model goes on without what it holds)", error)
    return found
