"""One problem on one chip with its records and trials: the input of plots and reports."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scheduler.core import hardware as chips
from scheduler.core.errors import NothingToDraw
from scheduler.core.hardware import Hardware
from scheduler.core.records import Key, Measurement, Record, Schedule, Trial, choice_text, point_of
from scheduler.measure import replay
from scheduler.model.constants import model_of
from scheduler.model.cost import CostModel
from scheduler.model.pruning import illegal, prune
from search_spaces import load_known
from search_spaces.footprint import Footprint
from search_spaces.kernel import Kernel
from search_spaces.operation import Operation
from search_spaces.problem import Problem
from search_spaces.space import Columns
from search_spaces.target import Target


@dataclasses.dataclass(frozen=True)
class Best:
    """A schedule with all of its fields.

    Attributes:
      seconds: Measured time; None if the model selected the schedule.
    """

    kernel: Kernel[Any, Any]
    schedule: Schedule
    seconds: float | None

    def text(self, problem: Problem, hardware: Hardware) -> str:
        """Returns the backend, and the fields that are not at their defaults."""
        return choice_text(self.kernel.backend, self.kernel.space(problem, hardware.target).encode(self.schedule))


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem on one chip.

    Attributes:
      record: The result of its search; None if none is stored.
      trials: The trials of its last search or of a recording, in the order in which they ended; empty if none are
        stored.
      swept: Whether `trials` come from a recorded sweep, where the order has no meaning.
    """

    operation: Operation[Any]
    problem: Problem
    hardware: Hardware
    record: Record | None = None
    trials: tuple[Trial, ...] = ()
    swept: bool = False

    def __str__(self) -> str:
        return f"{self.operation.name} {self.problem} on {self.hardware.kind}"

    @property
    def library_s(self) -> float | None:
        """Seconds of the library's fastest program; None if not measured."""
        entry = self.record.library_entry if self.record is not None else None
        if entry is not None:
            return entry.measurement.median_s
        return min((s for t, s in self.measured() if t.backend == self.operation.library.backend), default=None)

    @property
    def took(self) -> str:
        """ "measured", or "estimated" for a compiler's estimates without the chip."""
        times = [entry.measurement for entry in self.record.entries] if self.record is not None else []
        times += [trial.outcome for trial in self.trials if isinstance(trial.outcome, Measurement)]
        return "estimated" if any(one.estimated for one in times) else "measured"

    def measured(self) -> list[tuple[Trial, float]]:
        """Returns the trials that ran, with their times in seconds."""
        return [(trial, trial.outcome.median_s) for trial in self.trials if isinstance(trial.outcome, Measurement)]

    def text(self, best: Best) -> str:
        """Returns the problem, the chip and a schedule as one line of text."""
        return f"{self.problem} on {self.hardware.kind}, {best.text(self.problem, self.hardware)}"

    def best(self, backend: str | None = None) -> Best | None:
        """Returns the best schedule of a backend, by default of all searched backends (no libraries and no vendors).

        The final comparison takes precedence over the trials. Only currently legal schedules are considered. If there
        are none, the top prediction is returned.

        Raises:
          ValueError: The operation has no such backend.
        """
        kernels = self.operation.kernels if backend is None else (self.operation.kernel(backend),)
        able = {
            kernel.backend: kernel
            for kernel in kernels
            if (backend is not None or not (kernel.library or kernel.vendor))
            and kernel.supports(self.problem, self.hardware.target) is None
        }
        entries = self.record.entries if self.record is not None else ()
        known = [(entry, entry.measurement.median_s) for entry in entries]
        known += sorted(self.measured(), key=lambda one: one[1])  # type: ignore[arg-type]
        for one, seconds in known:
            kernel = able.get(one.backend)
            if kernel is not None and illegal(kernel, self.problem, self.hardware, one.schedule) is None:
                return Best(
                    kernel, vars(kernel.space(self.problem, self.hardware.target).decode(one.schedule)), seconds
                )
        tops = [prune(k, self.problem, self.hardware, self.model(k), keep=1) for k in able.values()]
        found = [pruned for pruned in tops if len(pruned.points)]
        if not found:
            return None
        top = min(found, key=lambda pruned: float(pruned.predicted_s[0]))
        return Best(top.kernel, top.points.row(0), None)

    def best_searched(self, backend: str | None = None) -> Best:
        """Returns the best schedule, as `best` does, but never the library's.

        Raises:
          NothingToDraw: There is none. The message gives the reason.
          ValueError: The operation has no such backend.
        """
        best = self.best(backend)
        if best is not None and not best.kernel.library:
            return best
        if best is not None:
            raise NothingToDraw(f"the schedule of {best.kernel.backend} is unknown; choose another backend")
        kernels = [kernel for kernel in self.operation.kernels if not (kernel.library or kernel.vendor)]
        reasons = {k.backend: k.supports(self.problem, self.hardware.target) or "no schedule fits" for k in kernels}
        text = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise NothingToDraw(f"only the library supports {self} ({text or 'there is no other kernel'})")

    def model(self, kernel: Kernel[Any, Any]) -> CostModel:
        return model_of(self.operation, kernel, self.hardware)

    def footprint(self, best: Best) -> Footprint:
        """Returns the footprint of one schedule. Raises the same errors as `footprints`."""
        return self.footprints(best.kernel, Columns({name: [value] for name, value in best.schedule.items()}, 1))

    def footprints(self, kernel: Kernel[Any, Any], points: Columns) -> Footprint:
        """Returns the footprint of several schedules.

        Raises:
          NothingToDraw: The kernel declares no footprint.
        """
        found = kernel.footprint(self.problem, points, self.hardware.target)
        if found is None:
            raise NothingToDraw(f"{kernel.backend} declares no footprint, which this plot needs")
        return found


def of_record(record: Record, trials: Sequence[Trial] = (), operation: Operation[Any] | None = None) -> Case | None:
    """Returns the case of a record; None if the chip or the operation is unknown, or if the operation has changed.

    Args:
      operation: The record's operation, if it is the user's own. Otherwise it is loaded by name.
    """
    case = of_key(record.key, operation)
    return None if case is None else dataclasses.replace(case, record=record, trials=tuple(trials))


def of_key(key: Key, operation: Operation[Any] | None = None) -> Case | None:
    """Returns the case of a problem without measurements. `operation` and a result of None are as in `of_record`."""
    chip = chips.identified(key.hardware)
    try:
        operation = operation or load_known(key.operation)
        problem = operation.problem.from_canonical(key.problem)
    except ValueError:
        return None
    return None if chip is None else Case(operation, problem, chip)


def of_recording(path: Path, operation: Operation[Any] | None = None, record: Record | None = None) -> Case:
    """Returns the case of a recorded sweep. Times of a second pass replace those of the first.

    Raises:
      RecordingError: The recording cannot be read.
      ValueError: The operation is not available, or the problem is not one of it.
    """
    sweep, trials = replay.read(path)
    latest = {point_of(trial.backend, trial.schedule): trial for trial in (*trials, *replay.read_again(path))}
    operation = operation or load_known(sweep.operation)
    problem = operation.problem.from_canonical(sweep.problem)
    return Case(operation, problem, chips.swept(sweep), record, tuple(latest.values()), swept=True)


def of_replay(path: Path, operation: Operation[Any] | None = None, *, budget: int = 64, seed: int = 0) -> Case:
    """Returns the case of a search that replays a recorded sweep instead of measuring on a device.

    Raises:
      RecordingError: The recording cannot be read.
      NoCandidate: The recording has no schedule of the current kernels.
    """
    from scheduler.search.tuner import tune
    from scheduler.store.store import Store

    runner, store = replay.Replay(path), Store(":memory:")
    operation = operation or load_known(runner.sweep.operation)
    problem = operation.problem.from_canonical(runner.sweep.problem)
    record = tune(operation, problem, budget=budget, seed=seed, store=store, runner=runner)
    return Case(operation, problem, runner.hardware, record, tuple(store.last_trials(record.key)))


# ------------------------------------------------------------------------------
# Makes a typical problem of an operation, for checking backends and for showing how to name a problem.

# The values of every extent without a default, in the problems used to check backends: the product of four of the first
# stays within 32-bit indices; the second is a whole tile of two CTAs.
EXTENTS = 128, 256


def examples(operation: Operation[Any]) -> list[Problem]:
    """Returns typical problems of the operation; none if a field without a default is not an extent."""
    return [problem for extent in EXTENTS if (problem := example(operation, extent)) is not None]


def example(operation: Operation[Any], extent: int) -> Problem | None:
    """Returns a problem of the operation; None if a field without a default is not an extent."""
    needed = [f.name for f in dataclasses.fields(operation.problem) if f.default is dataclasses.MISSING]
    try:
        return operation.problem.parse({name: str(extent) for name in needed})
    except ValueError:
        return None


def refusal(kernel: Kernel[Any, Any], problems: Sequence[Problem], target: Target) -> str | None:
    """Returns why a kernel runs none of `problems` on `target`, the reason for the first; None if it runs one."""
    reasons = [kernel.supports(problem, target) for problem in problems]
    return None if None in reasons else reasons[0]
