"""Finds the backends for which the model has no prediction: kernels that declare no footprint."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from search_spaces import load_known
from search_spaces.space import Columns

if TYPE_CHECKING:
    from scheduler.core.hardware import Hardware
    from scheduler.core.records import Schedule
    from search_spaces.problem import Problem


def without_prediction(
    operation: str, problem: Problem | None, hardware: Hardware | None, choices: Iterable[tuple[str, Schedule]]
) -> frozenset[str]:
    """Returns the backends among `choices` with kernels that declare no footprint, and so have no prediction.

    The `predicted_s` of such a backend is the library's time. Returns an empty set if the operation, the problem or the
    chip is unknown.
    """
    if problem is None or hardware is None:
        return frozenset()
    try:
        kernels = {kernel.backend: kernel for kernel in load_known(operation).kernels}
    except ValueError:
        return frozenset()
    found: dict[str, bool] = {}
    for backend, schedule in choices:
        kernel = kernels.get(backend)
        if backend in found or kernel is None or kernel.library or kernel.supports(problem, hardware.target):
            continue
        try:
            point = kernel.space(problem, hardware.target).decode(schedule)
        except ValueError:  # not in the current space
            continue
        found[backend] = kernel.footprint(problem, Columns.of([point]), hardware.target) is None
    return frozenset(backend for backend, missing in found.items() if missing)
