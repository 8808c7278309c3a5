"""One problem on one chip with all that is known of it: what pictures and reports are made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scheduler.core import hardware as chips
from scheduler.core.errors import NothingToDraw
from scheduler.core.hardware import Hardware
from scheduler.core.identity import point_of
from scheduler.core.records import Key, Measurement, Record, Schedule, Trial, choice_text
from scheduler.measure import replay
from scheduler.model.constants import model_of
from scheduler.model.cost import CostModel
from scheduler.model.feasibility import illegal
from scheduler.model.pruning import prune
from search_spaces import load_known
from search_spaces.footprint import Footprint
from search_spaces.kernel import Kernel
from search_spaces.operation import Operation
from search_spaces.problem import Problem
from search_spaces.space import Columns


@dataclasses.dataclass(frozen=True)
class Best:
    """A schedule with all of its fields.

    Attributes:
      seconds: as it was measured; None where it is the model's choice.
    """

    kernel: Kernel[Any, Any]
    schedule: Schedule
    seconds: float | None

    def text(self, problem: Problem, hardware: Hardware) -> str:
        """Its backend, and what is not at its default."""
        return choice_text(self.kernel.backend, self.kernel.space(problem, hardware.target).encode(self.schedule))


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem on one chip.

    Attributes:
      record: the outcome of its search; None where none is stored.
      trials: what was tried, in the order it ended: of its last search, or of a recording; empty where none is kept.
      swept: `trials` are those of a recorded sweep, whose order says nothing.
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
        """The time of the library's fastest program, seconds, where it was measured."""
        entry = self.record.library_entry if self.record is not None else None
        if entry is not None:
            return entry.measurement.median_s
        return min((s for t, s in self.measured() if t.backend == self.operation.library.backend), default=None)

    @property
    def took(self) -> str:
        """What its times are, in a word: those of one chip that was not there are estimated by its compiler."""
        times = [entry.measurement for entry in self.record.entries] if self.record is not None else []
        times += [trial.outcome for trial in self.trials if isinstance(trial.outcome, Measurement)]
        return "estimated" if any(one.estimated for one in times) else "measured"

    def measured(self) -> list[tuple[Trial, float]]:
        """The trials that ran, with their times in seconds."""
        return [(trial, trial.outcome.median_s) for trial in self.trials if isinstance(trial.outcome, Measurement)]

    def text(self, best: Best) -> str:
        """The problem, the chip and a schedule, in a line or two."""
        return f"{self.problem} on {self.hardware.kind}, {best.text(self.problem, self.hardware)}"

    def best(self, backend: str | None = None) -> Best | None:
        """The best schedule of a backend, by default of those that are searched: neither the library's nor a vendor's.

        Measured in the final comparison, or else among the trials, if it is legal today; or else the top prediction.

        Raises:
          ValueError: the operation has no such backend.
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
                return Best(kernel, self._whole(kernel, one.schedule), seconds)
        tops = [prune(k, self.problem, self.hardware, self.model(k), keep=1) for k in able.values()]
        found = [pruned for pruned in tops if len(pruned.points)]
        if not found:
            return None
        top = min(found, key=lambda pruned: float(pruned.predicted_s[0]))
        return Best(top.kernel, top.points.row(0), None)

    def best_searched(self, backend: str | None = None) -> Best:
        """The same of kernels that have a footprint.

        Raises:
          NothingToDraw: there is none, and why.
          ValueError: the operation has no such backend.
        """
        best = self.best(backend)
        if best is not None and not best.kernel.library:
            return best
        if best is not None:
            raise NothingToDraw(f"what {best.kernel.backend} does inside nobody knows; name another backend")
        kernels = [kernel for kernel in self.operation.kernels if not (kernel.library or kernel.vendor)]
        reasons = {k.backend: k.supports(self.problem, self.hardware.target) or "no schedule fits" for k in kernels}
        said = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise NothingToDraw(f"no kernel but the library's can do {self} ({said or 'there is no other'})")

    def model(self, kernel: Kernel[Any, Any]) -> CostModel:
        return model_of(self.operation, kernel, self.hardware)

    def footprint(self, best: Best) -> Footprint:
        """Of one schedule; raises as `footprints` does."""
        return self.footprints(best.kernel, Columns({name: [value] for name, value in best.schedule.items()}, 1))

    def footprints(self, kernel: Kernel[Any, Any], points: Columns) -> Footprint:
        """Of several schedules.

        Raises:
          NothingToDraw: the kernel declares none.
        """
        found = kernel.footprint(self.problem, points, self.hardware.target)
        if found is None:
            raise NothingToDraw(f"{kernel.backend} declares no footprint, and this is drawn from it")
        return found

    def _whole(self, kernel: Kernel[Any, Any], schedule: Schedule) -> Schedule:
        point = kernel.space(self.problem, self.hardware.target).decode(schedule)
        return {field.name: getattr(point, field.name) for field in dataclasses.fields(point)}


def of_record(record: Record, trials: Sequence[Trial] = (), operation: Operation[Any] | None = None) -> Case | None:
    """That of a record; None where the table has no such chip, or the operation is not here or not the same any more.

    Args:
      operation: the record's, where it is one of a user's own; else it is loaded by its name.
    """
    case = of_key(record.key, operation)
    return None if case is None else dataclasses.replace(case, record=record, trials=tuple(trials))


def of_key(key: Key, operation: Operation[Any] | None = None) -> Case | None:
    """That of which nothing was measured; None, and `operation`, as of `of_record`."""
    chip = chips.identified(key.hardware)
    try:
        operation = operation or load_known(key.operation)
        problem = operation.problem.from_canonical(key.problem)
    except ValueError:
        return None
    return None if chip is None else Case(operation, problem, chip)


def of_recording(path: Path, operation: Operation[Any] | None = None, record: Record | None = None) -> Case:
    """That of a recorded sweep; where it has a second pass, its times stand for those of the first.

    Raises:
      RecordingError: it cannot be read.
      ValueError: its operation is not here, or its problem is none of it.
    """
    sweep, trials = replay.read(path)
    latest = {point_of(trial.backend, trial.schedule): trial for trial in (*trials, *replay.read_again(path))}
    operation = operation or load_known(sweep.operation)
    problem = operation.problem.from_canonical(sweep.problem)
    return Case(operation, problem, chips.swept(sweep), record, tuple(latest.values()), swept=True)


def of_replay(path: Path, operation: Operation[Any] | None = None, *, budget: int = 64, seed: int = 0) -> Case:
    """That of a search over a recorded sweep, which answers in place of a device.

    Raises:
      RecordingError: it cannot be read.
      NoCandidate: it holds no schedule of today's kernels.
    """
    from scheduler.search.tuner import tune
    from scheduler.store.store import Store

    runner, store = replay.Replay(path), Store(":memory:")
    operation = operation or load_known(runner.sweep.operation)
    problem = operation.problem.from_canonical(runner.sweep.problem)
    record = tune(operation, problem, budget=budget, seed=seed, store=store, runner=runner)
    return Case(operation, problem, runner.hardware, record, tuple(store.last_trials(record.key)))
