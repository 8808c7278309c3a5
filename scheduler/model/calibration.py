"""Fit the cost model's times of a kernel on a chip to recorded trials: a factor, and what is left of its errors.

Ranking needs no fit: constants refitted by least squares to other shapes rank no better than the defaults
(docs/search-and-model.md). A factor, what a library's kernel takes beyond its work, and errors by problem correct the
choice between a kernel and the library, whose formula knows nothing of its programs: XLA's softmax of long rows reads
them several times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler.core.errors import NoCandidate
from scheduler.core.hardware import Hardware
from scheduler.core.records import Calibration, Environment, Measurement, Observation, Trial, variant_of
from scheduler.model.cost import CostModel
from scheduler.model.pruning import prune
from scheduler.model.residuals import LEAST, Covariance, ProblemPoint, fitted
from search_spaces.kernel import Kernel
from search_spaces.operation import Operation
from search_spaces.problem import Problem
from search_spaces.space import Columns

Array = npt.NDArray[np.float64]

# Only trials at most so many times slower than the fastest of their problem count: others are nobody's answer.
_WORTH = 1.25
# What a library's kernel takes beyond its work, seconds: 1.1 us of a fused row, 4 of cuBLAS.
_LIBRARY_S = (5e-7, 1e-6, 1.5e-6, 2e-6, 3e-6, 4e-6, 5e-6)
# Significant digits of what a calibration keeps.
_DIGITS = 5


@dataclasses.dataclass(frozen=True)
class Observed:
    """What was measured of one problem.

    Attributes:
      problem: what was computed.
      schedules: those that ran; None for a library's answer.
      seconds: their times, in the same order; of a library the time of its fastest program.
      predicted_s, measured_s: the top prediction with default constants, and what it took, or the fastest schedule
        where it was not measured; None of a library.
    """

    problem: Problem
    schedules: Columns | None
    seconds: Array
    predicted_s: float | None = None
    measured_s: float | None = None


def observed(
    kernel: Kernel[Any, Any], problem: Problem, hardware: Hardware, trials: Iterable[Trial]
) -> Observed | None:
    """The trials of `kernel` that ran on the device, in today's version of it; None where there is none.

    Schedules that are no points of today's space any more are left out. A kernel that declares no footprint has no
    times to correct.
    """
    if kernel.supports(problem, hardware.target):
        return None
    space = kernel.space(problem, hardware.target)
    schedules, times = [], []
    for trial in trials:
        ours = (trial.backend, trial.version) == (kernel.backend, kernel.version)
        if ours and isinstance(trial.outcome, Measurement) and trial.outcome.clock == "cupti":
            try:
                schedules.append(space.decode(trial.schedule))
            except ValueError:
                continue
            times.append(trial.outcome.median_s)
    if not times:
        return None
    seconds = np.array(times)
    if kernel.library:
        return Observed(problem, None, seconds.min(keepdims=True))
    points = Columns.of(schedules)
    if kernel.footprint(problem, points, hardware.target) is None:
        return None
    pruned = prune(kernel, problem, hardware, CostModel(hardware), keep=1, verified=True)
    if not len(pruned.points):
        return Observed(problem, points, seconds)
    first = pruned.points.row(0)
    taken = [s for index, s in enumerate(times) if points.row(index) == first]
    return Observed(problem, points, seconds, float(pruned.predicted_s[0]), min(taken or times))


def calibrate(
    operation: Operation[Any],
    hardware: Hardware,
    trials: Mapping[Problem, Sequence[Trial]],
    environments: Sequence[Environment],
) -> list[Calibration]:
    """Fits every kernel of `operation` that has trials on `hardware`, the library's among them.

    Args:
      trials: what was recorded there, by problem; only times of the device's own clock count.
      environments: under which they were made; the newest is kept.

    Raises:
      NoCandidate: none of these is a time on a device.
    """
    made = []
    for kernel in operation.kernels:
        found = [observed(kernel, problem, hardware, tried) for problem, tried in trials.items()]
        if seen := [one for one in found if one is not None]:
            newest = max(environments, key=lambda environment: environment.date)
            made.append(fit(operation, kernel, hardware, seen, newest))
    if not made:
        raise NoCandidate(
            f"no trial of {operation.name} on {hardware.kind} was timed by the clock of an accelerator, to which the "
            "model is fitted (a CPU has none): tune or sweep on one first"
        )
    return made


def fit(
    operation: Operation[Any],
    kernel: Kernel[Any, Any],
    hardware: Hardware,
    seen: Sequence[Observed],
    environment: Environment,
) -> Calibration:
    """What these observations tell of a kernel: its scale, what the model gets wrong by problem, and its fast variants.

    Of a library, also what one of its kernels takes beyond its work, where there are enough problems to tell.
    """
    constants, model = {}, CostModel(hardware)
    if kernel.library and len(seen) >= LEAST:
        constants["library_s"] = min(_LIBRARY_S, key=lambda library_s: _spread(_with(model, library_s), seen))
        model = _with(model, constants["library_s"])
    errors = [_errors(kernel, model, one) for one in seen]
    scale = _scale(errors)
    constants["library_scale" if kernel.library else "scale"] = scale
    observations = [_observation(model, one, scale) for one in seen if kernel.library or one.predicted_s is not None]
    places = [ProblemPoint(operation.problem.from_canonical(o.problem), o.predicted_s) for o in observations]
    covariance = fitted(places, [float(np.log(o.measured_s / o.predicted_s)) for o in observations])
    return Calibration(
        hardware=hardware.id,
        operation=operation.name,
        backend=kernel.backend,
        version=kernel.version,
        constants=constants | (covariance.named() if covariance != Covariance() else {}),
        problems=len(seen),
        trials=sum(map(len, errors)),
        error=float(np.median(np.abs(np.concatenate(errors) - np.log(scale)))),
        environment=environment,
        observations=tuple(sorted(observations, key=lambda o: o.problem)),
        variants=tuple(sorted({variant for one in seen for variant in _variants(one)})),
    )


def scale(kernel: Kernel[Any, Any], hardware: Hardware, seen: Sequence[Observed]) -> float:
    """What to multiply the model's times of `kernel` by: the median over problems of their fast trials' median."""
    return _scale([_errors(kernel, CostModel(hardware), one) for one in seen])


def _scale(errors: Sequence[Array]) -> float:
    return float(np.exp(np.median([np.median(of_problem) for of_problem in errors])))


def _with(model: CostModel, library_s: float) -> CostModel:
    return CostModel(model.hardware, dataclasses.replace(model.in_force, library_s=library_s))


def _spread(model: CostModel, seen: Sequence[Observed]) -> float:
    """How far a library's times are off, beyond a factor."""
    errors = np.array([np.log(one.seconds[0] / model.library_seconds(one.problem)) for one in seen])
    return float(np.abs(errors - np.median(errors)).mean())


def _fast(one: Observed) -> npt.NDArray[np.bool_]:
    worth: npt.NDArray[np.bool_] = one.seconds <= _WORTH * one.seconds.min()
    return worth


def _errors(kernel: Kernel[Any, Any], model: CostModel, one: Observed) -> Array:
    """``log(measured / predicted)`` of a problem's trials that are worth it."""
    if one.schedules is None:
        return np.log(one.seconds / model.library_seconds(one.problem))
    footprint = kernel.footprint(one.problem, one.schedules.take(_fast(one)), model.hardware.target)
    assert footprint is not None, "what declares none is not observed"
    return np.log(one.seconds[_fast(one)] / model.seconds(footprint))


def _variants(one: Observed) -> set[str]:
    if one.schedules is None:
        return set()
    fast = one.schedules.take(_fast(one))
    return {variant_of(fast.row(index)) for index in range(len(fast))}


def _observation(model: CostModel, one: Observed, scale: float) -> Observation:
    predicted_s = one.predicted_s or model.library_seconds(one.problem)
    measured_s = one.measured_s or float(one.seconds[0])
    return Observation(one.problem.canonical(), _rounded(scale * predicted_s), _rounded(measured_s))


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.{_DIGITS}g}")
