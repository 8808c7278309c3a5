"""Lookup of the cost model's constants for a kernel on a chip: the user's own, the shipped, or the defaults."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

from scheduler.core.errors import StoreError
from scheduler.core.hardware import Hardware
from scheduler.core.records import Calibration
from scheduler.model.cost import CostModel
from scheduler.model.overheads import BY_ARCHITECTURE, Constants
from scheduler.model.residuals import Covariance, ProblemPoint, Residuals
from scheduler.store import patience
from search_spaces.kernel import Kernel
from search_spaces.operation import Operation

_log = logging.getLogger("scheduler")


def model_of(
    operation: Operation[Any],
    kernel: Kernel[Any, Any],
    hardware: Hardware,
    *,
    found: Mapping[str, Calibration] | None = None,
) -> CostModel:
    """Returns the cost model with the constants fitted to `kernel` and to the operation's library on this chip.

    Args:
      operation: the operation.
      kernel: the kernel.
      hardware: the chip.
      found: backend -> calibration; None reads the stores.
    """
    if found is None:
        found = calibrations(operation.name, hardware)
    values: dict[str, float] = {}
    for backend in (operation.library.backend, kernel.backend):
        if backend in found:
            values |= known(found[backend])
    start = BY_ARCHITECTURE.get(hardware.architecture, Constants())
    try:
        return CostModel(hardware, dataclasses.replace(start, **values))
    except ValueError as error:  # stored numbers may be out of range
        _say_once(f"the constants of {operation.name} on {hardware.kind} are not taken: {error}")
        return CostModel(hardware, start)


def residuals_of(operation: Operation[Any], kernel: Kernel[Any, Any], found: Mapping[str, Calibration]) -> Residuals:
    """Returns the measured errors of the cost model for the current version of `kernel`; empty if there are none."""
    calibration = found.get(kernel.backend)
    if calibration is None or calibration.version != kernel.version:
        return Residuals()
    # Keyed by identity, because a calibration is read only once, and contains mappings, which are unhashable.
    key = (operation.problem, id(calibration))
    if key not in _residuals:
        places, errors = [], []
        for one in calibration.observations:
            with contextlib.suppress(ValueError):  # from another version of the operation, or invalid times
                error = math.log(one.measured_s / one.predicted_s)
                places.append(ProblemPoint(operation.problem.from_canonical(one.problem), one.predicted_s))
                errors.append(error)
        covariance = Covariance.of(calibration.constants)
        _residuals[key] = calibration, Residuals(tuple(places), tuple(errors), covariance)
    return _residuals[key][1]


_residuals: dict[tuple[object, int], tuple[Calibration, Residuals]] = {}
_said: set[str] = set()


def _say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        _log.warning("%s", message)


def calibrations(operation: str, hardware: Hardware, *, shared_only: bool = False) -> Mapping[str, Calibration]:
    """Returns the stored calibrations for an operation on a chip, by backend. The user's own override the shipped."""
    from scheduler.store import store  # SQLAlchemy takes 0.4 s to import

    own = ""
    if not shared_only:
        with contextlib.suppress(StoreError):  # reported once by the code that reads records
            own = store.default_url()
    return _read(operation, hardware.id, own)


def known(calibration: Calibration) -> dict[str, float]:
    """Returns the constants of `calibration` that the cost model has."""
    names = {field.name for field in dataclasses.fields(Constants)}
    return {name: value for name, value in calibration.constants.items() if name in names}


def forget() -> None:
    """Clears the cached calibrations, so that the next call reads the stores again."""
    _read.cache_clear()
    _residuals.clear()


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
        except StoreError as error:  # reported once by the code that reads records
            _log.debug("%s (the model goes on without what it holds)", error)
    return found
