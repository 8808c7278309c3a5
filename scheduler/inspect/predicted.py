"""For which backends the model has a prediction: those whose kernels declare a footprint, and libraries."""

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
    """The backends among `choices` whose kernels declare no footprint: their `predicted_s` is the library's time.

    None of an operation, a problem or a chip that is not known here.
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
        except ValueError:  # no point of today's space
            continue
        found[backend] = kernel.footprint(problem, Columns.of([point]), hardware.target) is None
    return frozenset(backend for backend, missing in found.items() if missing)
