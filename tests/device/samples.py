"""Candidates of the Hopper kernels that tests run on a GPU: of each part of a space some."""

import random

import pytest

from scheduler.measure.runner import Task
from scheduler.model.cost import CostModel
from scheduler.model.pruning import prune


def of_each_part(operation, problem, hardware, parts, *, first, others, backend="mosaic_gpu"):
    """Tasks of the model's `first` candidates of each part, and of some others; skips where there is no kernel."""
    if reason := operation.kernel(backend).supports(problem, hardware.target):
        pytest.skip(reason)
    candidates, sample = _candidates(operation, problem, hardware, backend), []
    for belongs in parts.values():
        part = [candidate for candidate in candidates if belongs(candidate.schedule)]
        sample += part[:first] + random.Random(0).sample(part, min(others, len(part)))
    chosen = {str(candidate.schedule): candidate for candidate in sample}.values()
    return [Task(operation, problem, c.backend, c.schedule, 3) for c in chosen]


def parts_without_any(operation, problems, hardware, parts):
    """Names of those parts that no candidate of these problems belongs to."""
    missing = set(parts)
    for problem in problems:
        if operation.kernel("mosaic_gpu").supports(problem, hardware.target) is None:
            candidates = _candidates(operation, problem, hardware)
            missing -= {name for name in missing if any(parts[name](c.schedule) for c in candidates)}
    return missing


def _candidates(operation, problem, hardware, backend="mosaic_gpu"):
    return prune(operation.kernel(backend), problem, hardware, CostModel(hardware)).candidates()
