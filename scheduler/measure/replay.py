"""Recorded sweeps: their files, and a runner that answers from one in place of a device.

A recording is gzipped JSON lines: first what was swept (`record.Sweep`), then one trial a line in the order they ended,
with every repetition or the failure; then, where the sweep has a second pass, its trials, marked as such.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import statistics
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from gzip import GzipFile
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from scheduler.core import checked, codec, hardware
from scheduler.core.errors import NotRecorded, RecordingError
from scheduler.core.files import read_bytes, unzipped
from scheduler.core.identity import Point, point_of
from scheduler.core.records import L2, Failure, Measurement, Outcome, Schedule, Sweep, Trial, choice_text
from search_spaces import spelled

if TYPE_CHECKING:
    from scheduler.measure.runner import Task
    from search_spaces.operation import Operation
    from search_spaces.problem import Problem

T = TypeVar("T")


def read(path: Path) -> tuple[Sweep, list[Trial]]:
    """A recording without its second pass, as far as it goes: a sweep that was killed ends somewhere.

    Raises:
      RecordingError: it cannot be read, or some line is malformed.
    """
    sweep, first, _ = _read(path)
    return sweep, first


def read_again(path: Path) -> list[Trial]:
    """The second pass of a recording: the fastest of the first, in turns; empty where there is none, or not all of it.

    Raises:
      RecordingError: as `read`.
    """
    return _read(path)[2]


def _read(path: Path) -> tuple[Sweep, list[Trial], list[Trial]]:
    try:
        lines = unzipped(read_bytes(path)).split(b"\n")[:-1]  # the last line is empty, or was cut off
    except (OSError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise RecordingError(f"{path} cannot be read as a recorded sweep: {reason}") from error
    if not lines:
        raise RecordingError(f"{path} is no recorded sweep: it is empty")
    sweep = _parsed(codec.sweep_from_text, path, 1, lines[0])
    passes: tuple[list[Trial], list[Trial]] = [], []
    for number, line in enumerate(lines[1:], start=2):
        second = sweep.again > 0 and _parsed(codec.is_again, path, number, line)
        passes[second].append(_parsed(codec.trial_from_text, path, number, line))
    first, again = passes
    return sweep, first, again if len(again) == len(second_pass(sweep, first)) else []


def second_pass(sweep: Sweep, trials: Sequence[Trial]) -> list[Trial]:
    """Those trials of a whole first pass that its second one measures once more: the fastest, and the library's."""
    ran = [trial for trial in trials if isinstance(trial.outcome, Measurement)]
    programs = [trial for trial in ran if trial.backend == sweep.library]
    others = sorted((trial for trial in ran if trial.backend != sweep.library), key=_median_s)
    return [*programs, *others[: sweep.again]] if sweep.again else []


def _median_s(trial: Trial) -> float:
    assert isinstance(trial.outcome, Measurement)
    return trial.outcome.median_s


class Recorder:
    """Writes a recording: each trial is in the file once `add` returns. A file that is there is gone on with.

    Attributes:
      sweep: the head of the file: what was asked for, but the second pass that is recorded already.
      trials: those recorded before.
      again: those of a whole second pass that were.

    Raises:
      RecordingError: the file cannot be written, or is a recording of something else.
    """

    def __init__(self, path: Path, sweep: Sweep) -> None:
        self.trials: list[Trial] = []
        self.again: list[Trial] = []
        if path.exists():
            found, self.trials, self.again = _read(path)
            if differing := _differing(found, sweep):
                raise RecordingError(f"{path} holds another sweep ({differing}); delete it, or name another file")
            # A recording without a second pass may get one, and keeps the one that it has.
            asked = found if self.again else sweep
            sweep = dataclasses.replace(found, again=asked.again, rounds=asked.rounds)
        self.sweep = sweep
        fresh = path.with_name(f"{path.name}.new")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # A stream that was cut off cannot be appended to: what it held is written anew, and takes its place whole.
            self._file = GzipFile(fresh, "wb")
            kept = *map(codec.trial_to_text, self.trials), *map(codec.again_to_text, self.again)
            for line in (codec.sweep_to_text(sweep), *kept):
                self._file.write(line.encode() + b"\n")
            self._file.flush()
            fresh.replace(path)
        except OSError as error:
            raise RecordingError(f"{path} cannot be written: {error}") from error

    def add(self, trial: Trial) -> None:
        self._file.write(codec.trial_to_text(trial).encode() + b"\n")
        self._file.flush()  # to the operating system, which keeps it if this process is killed

    def add_again(self, trials: Sequence[Trial]) -> None:
        """Records a whole second pass."""
        for trial in trials:
            self._file.write(codec.again_to_text(trial).encode() + b"\n")
        self._file.flush()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


class Replay:
    """A runner whose measurements are those of a recorded sweep, on the chip that was swept: no device is needed.

    Args:
      path: of the recording.
      seed: None answers each question about a schedule with its recorded samples. A number draws as many samples as the
        question has repetitions from them, with replacement; the n-th answer about a schedule is then always the same.
      slots: how many questions a search may have open at once, as worker processes would.

    Attributes:
      sweep: what was measured.
      fields: the problem, as `scheduler.tune` takes it.

    Raises:
      RecordingError: there is no such recording.
      TypeError, ValueError: `seed` or `slots` is no such number.
    """

    searches = 1

    def __init__(self, path: str | Path, *, seed: int | None = None, slots: int = 1) -> None:
        self.path, self.slots = Path(path), checked.whole("slots", slots)
        self._seed = None if seed is None else checked.seed(seed)
        self.sweep, trials = read(self.path)
        self.hardware = hardware.swept(self.sweep)
        self.environment = self.sweep.environment
        self._trials = {point_of(trial.backend, trial.schedule): trial for trial in trials}
        self._asked: dict[Point, int] = {}
        self._lock = threading.Lock()

    @property
    def fields(self) -> Mapping[str, Any]:
        fields = codec.problem_to_json(self.sweep.problem)
        if not isinstance(fields, dict):
            raise RecordingError(f"{self.path} is no recorded sweep: line 1: problem: it has no fields")
        return fields

    def version(self, backend: str, schedule: Schedule) -> int | None:
        """The kernel version that was measured with this schedule, or None where it was not."""
        trial = self._trials.get(point_of(backend, schedule))
        return None if trial is None else trial.version

    def fingerprint(self, backend: str, schedule: Schedule) -> str:
        """That of the trial of this schedule; "" where it has none."""
        trial = self._trials.get(point_of(backend, schedule))
        return "" if trial is None else trial.fingerprint

    def capacity(self, operation: Operation[Any], problem: Problem, l2: L2 = "cold") -> int:
        return self.slots

    def holding(
        self, operation: Operation[Any], problem: Problem, l2: L2 = "cold", *, to_itself: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def measure(self, task: Task, *, again: bool = False) -> Outcome:
        """The recorded outcome.

        Raises:
          NotRecorded: the recording is of another problem, or does not hold this schedule.
        """
        held = self.sweep
        if (task.operation.name, task.problem.canonical()) != (held.operation, held.problem):
            raise NotRecorded(
                f"{self.path} holds {held.operation} {spelled(held.operation, held.problem)}, "
                f"not {task.operation.name} {task.problem}"
            )
        which = point_of(task.backend, task.schedule)
        if which not in self._trials:
            raise NotRecorded(f"{self.path} does not hold the schedule {choice_text(task.backend, task.schedule)}")
        outcome = self._trials[which].outcome
        if self._seed is None or isinstance(outcome, Failure):
            return outcome
        with self._lock:
            nth = self._asked[which] = self._asked.get(which, 0) + 1
        drawn = random.Random(f"{self._seed} {which} {nth}").choices(outcome.samples_s, k=task.repetitions)
        return dataclasses.replace(outcome, median_s=statistics.median(drawn), samples_s=tuple(drawn))

    def confirm(self, task: Task) -> Failure | None:
        """None: a recording holds one draw of the inputs, and nothing says that another would be wrong."""
        return None

    def others(self) -> int:
        return 0

    def close(self) -> None:
        """Nothing is held."""


def _differing(found: Sweep, wanted: Sweep) -> str:
    """How two sweeps differ, in words; not in when they began, nor in a second pass."""
    then = dataclasses.replace(found.environment, date=wanted.environment.date)
    found = dataclasses.replace(found, environment=then, again=wanted.again, rounds=wanted.rounds)
    return "; ".join(
        f"{name} {value} instead of {getattr(wanted, name)}"
        for name, value in vars(found).items()
        if value != getattr(wanted, name)
    )


def _parsed(parse: Callable[[str], T], path: Path, number: int, line: bytes) -> T:
    try:
        return parse(line.decode())
    except ValueError as error:
        raise RecordingError(f"{path} is no recorded sweep: line {number}: {error}") from error
