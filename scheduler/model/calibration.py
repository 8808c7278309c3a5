"""Fit the cost model's constants to recorded trials: robust least squares on the logarithm of time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from scheduler.core.errors import NoCandidate
from scheduler.core.hardware import Hardware
from scheduler.core.records import Calibration, Environment, Measurement, Trial
from scheduler.model.cost import FITTED, ORDERS, SHARES, Constants, CostModel
from search_spaces.kernel import Kernel, Operation, Problem
from search_spaces.space import Columns

Array = npt.NDArray[np.float64]

# How far a constant may drift from where it starts: standard deviations of its logarithm. What one kernel's trials
# cannot tell from something else stays near its prior: e_hbm near what products of few rows reached.
_KERNEL = {
    **dict.fromkeys(("e_mma", "e_power", "e_sram", "e_l2", "row_s", "quiet", "outside_s", "gap_bytes"), 0.1),
    **dict.fromkeys(
        ("loaded", "launched", "cluster_s", "askew", "alpha", "exposed", "p", "step_s", "gap_s", "slot_s", "tile_s"),
        0.1,
    ),
    **dict.fromkeys(("exchange_s", "exchange_bytes_per_s"), 0.1),
    "e_hbm": 0.03,
}
_LIBRARY = dict.fromkeys(("library_e_mma", "library_e_hbm", "library_p", "library_grain", "library_s"), 0.3)
# The error of a prediction below which least squares counts it in full, and above which it counts ever less.
_ERROR = 0.1
# The median error of a problem at which it counts half in a second fit.
_MISSED = 0.06
# Each problem counts as so many trials, whatever the size of its space, and the model should rank the fast ones.
_EFFECTIVE, _FAVOUR = 200.0, 2.0
# Trials of one problem that are looked at, drawn evenly and denser among the fast ones.
_MOST = 300
_FARTHEST = np.log(20.0)
_HIGHEST_ORDER = 20.0


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
    return Observed(problem, None if kernel.library else Columns.of(schedules), np.array(seconds))


def calibrate(
    operation: Operation[Any],
    hardware: Hardware,
    trials: Mapping[Problem, Sequence[Trial]],
    environments: Sequence[Environment],
) -> list[Calibration]:
    """Fits the constants of every kernel of `operation` that has trials on `hardware`, the library's among them.

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
        constants = fit(kernel, hardware, seen)
        names = _LIBRARY if kernel.library else _KERNEL
        errors = np.concatenate([np.abs(predict(constants)) for predict in _errors(kernel, hardware, seen)])
        made.append(
            Calibration(
                hardware=hardware.id,
                operation=operation.name,
                backend=kernel.backend,
                version=kernel.version,
                constants={name: getattr(constants, name) for name in names},
                problems=len(seen),
                trials=sum(len(one.seconds) for one in seen),
                error=float(np.median(errors)),
                environment=max(environments, key=lambda environment: environment.date),
            )
        )
    if not made:
        raise NoCandidate(
            f"no trial of {operation.name} on {hardware.kind} was timed by the clock of an accelerator, to which the "
            "model is fitted (a CPU has none): tune or sweep on one first"
        )
    return made


def fit(
    kernel: Kernel[Any, Any], hardware: Hardware, seen: Sequence[Observed], start: Constants | None = None
) -> Constants:
    """The constants under which the model comes nearest to what was observed of `kernel` on `hardware`.

    The squares of ``log(predicted / measured)`` are damped beyond 10 % (soft l1), each problem has the same weight, and
    a schedule the weight ``(fastest / its time)**2``. Each constant is drawn to where it starts. What a first fit
    misses by far lacks a term, which constants must not stand in for: in a second one it counts little.

    Args:
      start: where to begin, and what to stay near; None is what the model has without any trials.
    """
    start = start or FITTED.get(hardware.architecture, Constants())
    spreads = _LIBRARY if kernel.library else _KERNEL
    free = [name for name in spreads if getattr(start, name) > 0]
    center = np.log([getattr(start, name) for name in free])
    highest = [np.log(_highest(name)) if np.isfinite(_highest(name)) else np.inf for name in free]
    upper = np.minimum(center + _FARTHEST, highest)
    lower = np.maximum(center - _FARTHEST, [0.0 if name in ORDERS else -np.inf for name in free])
    chosen = [_spread_out(one) for one in seen]
    weights = [_weights(one.seconds) for one in chosen]
    errors = _errors(kernel, hardware, chosen)
    spread = np.array([spreads[name] for name in free])

    def constants(theta: Array) -> Constants:
        # Where a bound binds, its logarithm's exponential may miss it by a bit.
        values = {name: min(float(v), _highest(name)) for name, v in zip(free, np.exp(theta), strict=True)}
        return dataclasses.replace(start, **{n: max(v, 1.0) if n in ORDERS else v for n, v in values.items()})

    def fitted(start: Array, trust: Sequence[float]) -> Array:
        def residuals(theta: Array) -> Array:
            values = constants(theta)
            weighted = [t * w * error(values) / _ERROR for t, w, error in zip(trust, weights, errors, strict=True)]
            return np.concatenate([*weighted, (theta - center) / spread])

        bounds = (lower - 1e-9, upper + 1e-9)
        theta: Array = least_squares(residuals, start, bounds=bounds, loss="soft_l1", max_nfev=60).x
        return theta

    first = fitted(center, [1.0] * len(chosen))
    missed = [float(np.median(np.abs(error(constants(first))))) for error in errors]
    return constants(fitted(first, [(1 + (error / _MISSED) ** 8) ** -0.5 for error in missed]))


def _errors(
    kernel: Kernel[Any, Any], hardware: Hardware, seen: Sequence[Observed]
) -> list[Callable[[Constants], Array]]:
    """``log(predicted / measured)`` of each observation as a function of the constants."""

    def error_of(one: Observed) -> Callable[[Constants], Array]:
        if one.schedules is None:
            return lambda c: np.log(CostModel(hardware, c).library_seconds(one.problem) / one.seconds)
        footprint = kernel.footprint(one.problem, one.schedules, hardware.target)
        return lambda c: np.log(CostModel(hardware, c).seconds(footprint) / one.seconds)

    return [error_of(one) for one in seen]


def _highest(name: str) -> float:
    return 1.0 if name in SHARES else _HIGHEST_ORDER if name in ORDERS else float("inf")


def _weights(seconds: Array) -> Array:
    weights: Array = (np.min(seconds) / seconds) ** _FAVOUR
    return np.sqrt(weights * (min(_EFFECTIVE, len(seconds)) / np.sum(weights)))


def _spread_out(one: Observed) -> Observed:
    """At most `_MOST` of them from the fastest to the slowest, half of them among the fastest quarter."""
    if one.schedules is None or len(one.seconds) <= _MOST:
        return one
    ranks = np.unique((np.linspace(0, 1, _MOST) ** 2 * (len(one.seconds) - 1)).astype(np.intp))
    taken = np.sort(np.argsort(one.seconds, kind="stable")[ranks])
    return Observed(one.problem, one.schedules.take(taken), one.seconds[taken])
