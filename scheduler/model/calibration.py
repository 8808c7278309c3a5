"""Fits the cost model to recorded trials of a kernel on a chip: a scale factor, and the residual errors.

Ranking needs no fit: constants refitted by least squares to other shapes rank no better than the defaults
(docs/search-and-model.md). The fit corrects the choice between a kernel and the library. It has four parts: a scale
factor, the fixed time of a library kernel, the cost of unaligned rows to it, and the errors by problem. They are
necessary because the library's formula does not model its programs. For example, XLA's softmax reads long rows several
times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler.core.errors import NoCandidate
from scheduler.core.hardware import Hardware
from scheduler.core.records import Calibration, Environment, Measurement, Observation, Trial, variant_of
from scheduler.model.constants import MIN_RESIDUALS, Covariance, ProblemPoint, fitted
from scheduler.model.cost import CostModel
from scheduler.model.library import LibraryWork
from scheduler.model.pruning import prune
from search_spaces.kernel import Kernel
from search_spaces.operation import Operation
from search_spaces.problem import Problem
from search_spaces.row_alignment import ROW_BYTES
from search_spaces.space import Columns

Array = npt.NDArray[np.float64]

# Trials slower than this multiple of their problem's fastest time are ignored, as they would never be selected.
_WORTH = 1.25
# Candidates for the fixed time of a library kernel, in seconds: 1.1 us for a fused row kernel, 4 us for cuBLAS.
_LIBRARY_S = (5e-7, 1e-6, 1.5e-6, 2e-6, 3e-6, 4e-6, 5e-6)
# Candidates for the constants of unaligned rows of products, of which the best combination is fitted; and of a fused
# kernel.
_UNALIGNED: Mapping[str, Array] = MappingProxyType(
    {
        "library_unaligned": np.linspace(0, 2.4, 13),
        "library_halving": np.linspace(0, 0.6, 7),
        "library_unaligned_memory": np.linspace(0, 1, 6),
        "library_store": np.linspace(0, 4, 9),
    }
)
_FUSED_UNALIGNED: Mapping[str, Array] = MappingProxyType({"library_fused_unaligned": np.linspace(0, 2, 11)})
# Significant digits of the times in a calibration.
_DIGITS = 5


@dataclasses.dataclass(frozen=True)
class Observed:
    """The measured times of one problem.

    Attributes:
      problem: the problem.
      schedules: the measured schedules; None for a library.
      seconds: their times, in the same order; for a library, the time of its fastest program only.
      predicted_s: the predicted time of the best-ranked schedule with default constants; None for a library.
      measured_s: the measured time of that schedule, or of the fastest schedule if that one was not measured; None for
        a library.
      errors: ``log(measured / predicted)`` of the fast trials with default constants; None for a library.
    """

    problem: Problem
    schedules: Columns | None
    seconds: Array
    predicted_s: float | None = None
    measured_s: float | None = None
    errors: Array | None = None


def observed(
    kernel: Kernel[Any, Any], problem: Problem, hardware: Hardware, trials: Iterable[Trial]
) -> Observed | None:
    """Returns the measured trials of the current version of `kernel`; None if there are none.

    Only trials timed by the device's clock count. Schedules outside the current space are ignored. The result is also
    None if the kernel declares no footprint, as it has no predicted times to correct.
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
    if (errors := fast_errors(kernel, hardware, problem, points, seconds)) is None:
        return None
    pruned = prune(kernel, problem, hardware, CostModel(hardware), keep=1, verified=True)
    if not len(pruned.points):
        return Observed(problem, points, seconds, errors=errors)
    first = pruned.points.row(0)
    taken = [s for index, s in enumerate(times) if points.row(index) == first]
    return Observed(problem, points, seconds, float(pruned.predicted_s[0]), min(taken or times), errors)


def calibrate(
    operation: Operation[Any],
    hardware: Hardware,
    trials: Mapping[Problem, Sequence[Trial]],
    environments: Sequence[Environment],
) -> list[Calibration]:
    """Fits all kernels of `operation` with trials on `hardware`, including the library.

    Args:
      trials: problem -> recorded trials; only trials timed by the device's clock count.
      environments: the environments of the trials; the newest is stored in the calibration.

    Raises:
      NoCandidate: no trial was timed by the device's clock.
    """
    made = []
    for kernel in operation.kernels:
        found = [observed(kernel, problem, hardware, tried) for problem, tried in trials.items()]
        if seen := [one for one in found if one is not None]:
            newest = max(environments, key=lambda environment: environment.date)
            made.append(fit(operation, kernel, hardware, seen, newest))
    if not made:
        raise NoCandidate(
            f"no trial of {operation.name} on {hardware.kind} was timed by the clock of an accelerator, which the "
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
    """Fits a kernel's scale, its errors by problem, and its fast variants to the observations.

    For a library with at least `MIN_RESIDUALS` problems, also fits the fixed time of one of its kernels. With so many
    problems with unaligned rows, also fits the costs of these.
    """
    constants, model = {}, CostModel(hardware)
    if kernel.library and len(seen) >= MIN_RESIDUALS:
        fused = LibraryWork.of(seen[0].problem, hardware, model.in_force).fused
        fixed = "library_fused_s" if fused else "library_s"
        aligned = [one for one in seen if one.problem.row_alignment >= ROW_BYTES] or seen
        constants[fixed] = min(_LIBRARY_S, key=lambda s: _spread(_with(model, **{fixed: s}), aligned))
        model = _with(model, **constants)
        constants |= _unaligned(model, seen)
        model = _with(model, **constants)
    errors = [_errors(model, one) for one in seen]
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


def scale(hardware: Hardware, seen: Sequence[Observed]) -> float:
    """Returns the scale factor of the model's times for a kernel.

    It is the median over problems of the median ratio of measured to predicted time of each problem's fast trials.
    """
    return _scale([_errors(CostModel(hardware), one) for one in seen])


def _scale(errors: Sequence[Array]) -> float:
    return float(np.exp(np.median([np.median(of_problem) for of_problem in errors])))


def _with(model: CostModel, **constants: float) -> CostModel:
    return CostModel(model.hardware, dataclasses.replace(model.in_force, **constants))


def _unaligned(model: CostModel, seen: Sequence[Observed]) -> dict[str, float]:
    """Returns the constants of unaligned rows with the least mean absolute log error, relative to aligned rows."""
    others = [one for one in seen if one.problem.row_alignment < ROW_BYTES]
    first = seen[0].problem
    candidates = _FUSED_UNALIGNED if first.arithmetic == "float32" else _UNALIGNED
    if len(others) < MIN_RESIDUALS or (candidates is _UNALIGNED and first.dimension_numbers is None):
        return {}
    level = float(np.median(_library_errors(model, [one for one in seen if one not in others] or others)))
    work = [vars(LibraryWork.of(one.problem, model.hardware, model.in_force)) for one in others]
    stacked = LibraryWork(**{name: np.array([each[name] for each in work]) for name in work[0]})
    grid = np.meshgrid(*candidates.values(), indexing="ij")
    values = {name: each.reshape(-1, 1) for name, each in zip(candidates, grid, strict=True)}
    predicted_s = stacked.seconds(SimpleNamespace(**(dataclasses.asdict(model.in_force) | values)))
    errors = np.log([one.seconds[0] for one in others] / predicted_s) - level
    best = np.abs(errors).mean(axis=1).argmin()
    return {name: _rounded(float(each[best, 0])) for name, each in values.items()}


def _spread(model: CostModel, seen: Sequence[Observed]) -> float:
    """Returns the mean absolute deviation of a library's log errors from their median, which excludes the scale."""
    errors = _library_errors(model, seen)
    return float(np.abs(errors - np.median(errors)).mean())


def _library_errors(model: CostModel, seen: Sequence[Observed]) -> Array:
    return np.array([np.log(one.seconds[0] / model.library_seconds(one.problem)) for one in seen])


def _fast(seconds: Array) -> npt.NDArray[np.bool_]:
    fast: npt.NDArray[np.bool_] = seconds <= _WORTH * seconds.min()
    return fast


def fast_errors(
    kernel: Kernel[Any, Any], hardware: Hardware, problem: Problem, schedules: Columns, seconds: Array
) -> Array | None:
    """Returns ``log(measured / predicted)`` of a problem's fast trials; None if `kernel` declares no footprint."""
    footprint = kernel.footprint(problem, schedules.take(_fast(seconds)), hardware.target)
    return None if footprint is None else np.log(seconds[_fast(seconds)] / CostModel(hardware).seconds(footprint))


def _errors(model: CostModel, one: Observed) -> Array:
    """Returns ``log(measured / predicted)`` of a problem's fast trials; `model` predicts a library."""
    return np.log(one.seconds / model.library_seconds(one.problem)) if one.errors is None else one.errors


def _variants(one: Observed) -> set[str]:
    if one.schedules is None:
        return set()
    fast = one.schedules.take(_fast(one.seconds))
    return {variant_of(fast.row(index)) for index in range(len(fast))}


def _observation(model: CostModel, one: Observed, scale: float) -> Observation:
    predicted_s = one.predicted_s or model.library_seconds(one.problem)
    measured_s = one.measured_s or float(one.seconds[0])
    return Observation(one.problem.canonical(), _rounded(scale * predicted_s), _rounded(measured_s))


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.{_DIGITS}g}")
