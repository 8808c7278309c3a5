"""Fit the cost model's times of a kernel on a chip to recorded trials: one factor, by a median.

Ranking needs no fit: constants refitted by least squares to other shapes rank no better than the defaults
(docs/search-and-model.md). What a factor corrects is the choice between a kernel and the library, whose formula knows
nothing of its programs: XLA's softmax of long rows reads them several times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler.core.errors import NoCandidate
from scheduler.core.hardware import Hardware
from scheduler.core.records import Calibration, Environment, Measurement, Trial
from scheduler.model.cost import CostModel
from search_spaces.kernel import Kernel
from search_spaces.operation import Operation
from search_spaces.problem import Problem
from search_spaces.space import Columns

Array = npt.NDArray[np.float64]

# Only trials at most so many times slower than the fastest of their problem count: others are nobody's answer.
_WORTH = 1.25


@dataclasses.dataclass(frozen=True)
class Observed:
    """What was measured of one problem.

    Attributes:
      problem: what was computed.
      schedules: those that ran; None for a library's answer, which is one program.
      seconds: their times, in the same order.
    """

    problem: Problem
    schedules: Columns | None
    seconds: Array


def observed(
    kernel: Kernel[Any, Any], problem: Problem, hardware: Hardware, trials: Iterable[Trial]
) -> Observed | None:
    """The trials of `kernel` that ran on the device, in today's version of it; None where there is none.

    Schedules that are no points of today's space any more are left out, and of a library's programs all but the first.
    A kernel that declares no footprint has no times to correct.
    """
    if kernel.supports(problem, hardware.target):
        return None
    space = kernel.space(problem, hardware.target)
    schedules, seconds = [], []
    for trial in trials:
        ours = (trial.backend, trial.version) == (kernel.backend, kernel.version)
        if kernel.library and trial.schedule:  # The model tells of the program that answers where nothing was measured.
            continue
        if ours and isinstance(trial.outcome, Measurement) and trial.outcome.clock == "cupti":
            try:
                schedules.append(space.decode(trial.schedule))
            except ValueError:
                continue
            seconds.append(trial.outcome.median_s)
    if not seconds:
        return None
    points = None if kernel.library else Columns.of(schedules)
    if points is not None and kernel.footprint(problem, points, hardware.target) is None:
        return None
    return Observed(problem, points, np.array(seconds))


def calibrate(
    operation: Operation[Any],
    hardware: Hardware,
    trials: Mapping[Problem, Sequence[Trial]],
    environments: Sequence[Environment],
) -> list[Calibration]:
    """Fits the scale of every kernel of `operation` that has trials on `hardware`, the library's among them.

    Args:
      trials: what was recorded there, by problem; only times of the device's own clock count.
      environments: under which they were made; the newest is kept.

    Raises:
      NoCandidate: none of these is a time on a device.
    """
    made = []
    for kernel in operation.kernels:
        found = [observed(kernel, problem, hardware, tried) for problem, tried in trials.items()]
        seen = [one for one in found if one is not None]
        if not seen:
            continue
        errors = [_errors(kernel, hardware, one) for one in seen]
        scale = _scale(errors)
        made.append(
            Calibration(
                hardware=hardware.id,
                operation=operation.name,
                backend=kernel.backend,
                version=kernel.version,
                constants={"library_scale" if kernel.library else "scale": scale},
                problems=len(seen),
                trials=sum(map(len, errors)),
                error=float(np.median(np.abs(np.concatenate(errors) - np.log(scale)))),
                environment=max(environments, key=lambda environment: environment.date),
            )
        )
    if not made:
        raise NoCandidate(
            f"no trial of {operation.name} on {hardware.kind} was timed by the clock of an accelerator, to which the "
            "model is fitted (a CPU has none): tune or sweep on one first"
        )
    return made


def scale(kernel: Kernel[Any, Any], hardware: Hardware, seen: Sequence[Observed]) -> float:
    """What to multiply the model's times of `kernel` by: the median over problems of their fast trials' median."""
    return _scale([_errors(kernel, hardware, one) for one in seen])


def _scale(errors: Sequence[Array]) -> float:
    return float(np.exp(np.median([np.median(of_problem) for of_problem in errors])))


def _errors(kernel: Kernel[Any, Any], hardware: Hardware, one: Observed) -> Array:
    """``log(measured / predicted)`` of a problem's trials that are worth it."""
    model = CostModel(hardware)
    if one.schedules is None:
        return np.log(one.seconds / model.library_seconds(one.problem))
    fast = one.seconds <= _WORTH * one.seconds.min()
    footprint = kernel.footprint(one.problem, one.schedules.take(fast), hardware.target)
    assert footprint is not None, "what declares none is not observed"
    return np.log(one.seconds[fast] / model.seconds(footprint))
