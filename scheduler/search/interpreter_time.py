"""Estimates the duration of a search in Pallas interpret mode from the kernels' footprints, before it starts."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler.core.hardware import Hardware
from scheduler.model.cost import CostModel
from scheduler.model.pruning import prune
from search_spaces.kernel import Kernel
from search_spaces.operation import Operation
from search_spaces.problem import Problem
from search_spaces.space import Columns

# Cost of a step in Pallas interpret mode on one core, measured on matmuls of 256^3 to 2048^3: a minimum time, a pass
# over all arrays at this bandwidth, and arithmetic at this rate. Other kernels differ by less than matters here, which
# is to tell minutes from hours.
STEP_S = 20e-6
BYTES_PER_S = 20e9
FLOPS_PER_S = 15e9


def search_seconds(
    operation: Operation[Any],
    problem: Problem,
    hardware: Hardware,
    *,
    backends: frozenset[str],
    budget: int,
    calls: int,
    finalists: int,
    calls_of_finalist: int,
) -> float:
    """Returns a lower bound of the duration of a search: it assumes the candidates that are quickest to interpret.

    Args:
      backends: of the kernels that take part.
      budget: maximum number of candidates, each called `calls` times.
      finalists: number of candidates that are called `calls_of_finalist` more times.
    """
    launches: list[float] = []
    for kernel in operation.kernels:
        if not kernel.library and kernel.backend in backends and kernel.supports(problem, hardware.target) is None:
            points = prune(kernel, problem, hardware, CostModel(hardware)).points
            launches += _launch_seconds(kernel, problem, points, hardware).tolist()
    quickest = heapq.nsmallest(budget, launches)
    return calls * sum(quickest) + calls_of_finalist * sum(quickest[:finalists])


def _launch_seconds(
    kernel: Kernel[Any, Any], problem: Problem, points: Columns, hardware: Hardware
) -> npt.NDArray[np.float64]:
    """Returns the time of one launch of each of `points`; without a footprint, the time of a single step."""
    footprint = kernel.footprint(problem, points, hardware.target)
    least_s = STEP_S + problem.bytes_moved / BYTES_PER_S
    if footprint is None:
        return np.full(len(points), least_s + problem.flops / FLOPS_PER_S)
    demand = footprint.mean_step
    blocks = np.prod(np.broadcast_arrays(*footprint.grid), axis=0)
    step_s = least_s + np.asarray(demand.flops + demand.fp32_ops) / FLOPS_PER_S
    return np.broadcast_to(blocks * footprint.steps * step_s, (len(points),))
