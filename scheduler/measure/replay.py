"""Reads and writes recorded sweeps, and provides a runner that replays a recording instead of using a device.

A recording is gzipped JSON lines. The first line describes the sweep (`records.Sweep`). Each following line is one
trial, in the order in which the trials ended, with all its repetitions or its failure. If the sweep has a second pass,
its trials follow, marked as such.
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

from scheduler.core import arguments, codec, hardware
from scheduler.core.errors import NotRecorded, RecordingError
from scheduler.core.files import read_bytes, unzipped
from scheduler.core.records import (
    L2,
    Failure,
    Measurement,
    Outcome,
    Point,
    Schedule,
    Sweep,
    Trial,
    choice_text,
    point_of,
)
from search_spaces import format_problem

if TYPE_CHECKING:
    from scheduler.measure.runner import Task
    from search_spaces.operation import Operation
    from search_spaces.problem import Problem

T = TypeVar("T")


def read(path: Path) -> tuple[Sweep, list[Trial]]:
    """Reads the sweep and the first pass of a recording; the recording of a killed sweep may be incomplete.

    Raises:
      RecordingError: the file cannot be read, or a line is malformed.
    """
    sweep, first, _ = _read(path)
    return sweep, first


def read_again(path: Path) -> list[Trial]:
    """Reads the second pass of a recording, which times the fastest trials of the first pass again, interleaved.

    Returns an empty list if there is no second pass, or an incomplete one.

    Raises:
      RecordingError: as in `read`.
    """
    return _read(path)[2]


def _read(path: Path) -> tuple[Sweep, list[Trial], list[Trial]]:
    try:
        lines = unzipped(read_bytes(path)).split(b"\n")[:-1]  # the last line is empty or truncated
    except (OSError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise RecordingError(f"{path} cannot be read as a recorded sweep: {reason}") from error
    if not lines:
        raise RecordingError(f"{path} is not a recorded sweep: it is empty")
    sweep = _parsed(codec.sweep_from_text, path, 1, lines[0])
    passes: tuple[list[Trial], list[Trial]] = [], []
    for number, line in enumerate(lines[1:], start=2):
        second = sweep.again > 0 and _parsed(codec.is_again, path, number, line)
        passes[second].append(_parsed(codec.trial_from_text, path, number, line))
    first, again = passes
    return sweep, first, again if len(again) == len(second_pass(sweep, first)) else []


def second_pass(sweep: Sweep, trials: Sequence[Trial]) -> list[Trial]:
    """Selects the trials of a complete first pass that the second pass measures: the fastest, and the library's."""
    ran = [trial for trial in trials if isinstance(trial.outcome, Measurement)]
    programs = [trial for trial in ran if trial.backend == sweep.library]
    others = sorted((trial for trial in ran if trial.backend != sweep.library), key=_median_s)
    return [*programs, *others[: sweep.again]] if sweep.again else []


def _median_s(trial: Trial) -> float:
    assert isinstance(trial.outcome, Measurement)
    return trial.outcome.median_s


class Recorder:
    """Writes a recording, and continues an existing file. Each trial is in the file when `add` returns.

    Attributes:
      sweep: the head of the file: the requested sweep, with the settings of a second pass that is already recorded.
      trials: the trials recorded before.
      again: the trials of a complete second pass recorded before.

    Raises:
      RecordingError: the file cannot be written, or is a recording of another sweep.
    """

    def __init__(self, path: Path, sweep: Sweep) -> None:
        self.trials: list[Trial] = []
        self.again: list[Trial] = []
        if path.exists():
            found, self.trials, self.again = _read(path)
            if differences := _differences(found, sweep):
                raise RecordingError(
                    f"{path} has another sweep ({differences}); delete the file, or choose another one"
                )
            # A second pass may be added to a recording without one. An existing second pass is kept.
            second = found if self.again else sweep
            sweep = dataclasses.replace(found, again=second.again, rounds=second.rounds)
        self.sweep = sweep
        fresh = path.with_name(f"{path.name}.new")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # A truncated gzip stream cannot be appended to. Its content is written to a new file, which then replaces
            # it atomically.
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
        self._file.flush()  # to the operating system: the data survives if this process is killed

    def add_again(self, trials: Sequence[Trial]) -> None:
        """Records a complete second pass."""
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
    """A runner that returns the measurements of a recorded sweep on the recorded chip; it needs no device.

    Args:
      path: the recording.
      seed: None returns the recorded samples of a schedule for each request. A number draws as many samples as the
        request has repetitions, with replacement. The n-th result for a schedule is then reproducible.
      slots: how many requests a search may have open at once, like worker processes.

    Attributes:
      sweep: the recorded sweep.
      fields: the problem, as `scheduler.tune` takes it.

    Raises:
      RecordingError: the recording does not exist or cannot be read.
      TypeError, ValueError: `seed` or `slots` has an invalid type or value.
    """

    searches = 1

    def __init__(self, path: str | Path, *, seed: int | None = None, slots: int = 1) -> None:
        self.path, self.slots = Path(path), arguments.checked_integer("slots", slots)
        self._seed = None if seed is None else arguments.checked_seed(seed)
        self.sweep, trials = read(self.path)
        self.hardware = hardware.swept(self.sweep)
        self.environment = self.sweep.environment
        self._trials = {point_of(trial.backend, trial.schedule): trial for trial in trials}
        self._requests: dict[Point, int] = {}
        self._lock = threading.Lock()

    @property
    def fields(self) -> Mapping[str, Any]:
        fields = codec.problem_to_json(self.sweep.problem)
        if not isinstance(fields, dict):
            raise RecordingError(f"{self.path} is not a recorded sweep: line 1: problem: it has no fields")
        return fields

    def version(self, backend: str, schedule: Schedule) -> int | None:
        """Returns the kernel version that was measured with this schedule, or None if it was not measured."""
        trial = self._trials.get(point_of(backend, schedule))
        return None if trial is None else trial.version

    def fingerprint(self, task: Task) -> str:
        trial = self._trials.get(point_of(task.backend, task.schedule))
        return "" if trial is None else trial.fingerprint

    def capacity(self, operation: Operation[Any], problem: Problem, l2: L2 = "cold") -> int:
        return self.slots

    def reserve(
        self, operation: Operation[Any], problem: Problem, l2: L2 = "cold", *, exclusive: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def measure(self, task: Task, *, again: bool = False) -> Outcome:
        """Returns the recorded outcome.

        Raises:
          NotRecorded: the recording is of another problem, or does not contain this schedule.
        """
        recorded = self.sweep
        if (task.operation.name, task.problem.canonical()) != (recorded.operation, recorded.problem):
            raise NotRecorded(
                f"{self.path} records {recorded.operation} {format_problem(recorded.operation, recorded.problem)}, "
                f"not {task.operation.name} {task.problem}"
            )
        which = point_of(task.backend, task.schedule)
        if which not in self._trials:
            raise NotRecorded(f"{self.path} does not contain the schedule {choice_text(task.backend, task.schedule)}")
        outcome = self._trials[which].outcome
        if self._seed is None or isinstance(outcome, Failure):
            return outcome
        with self._lock:
            nth = self._requests[which] = self._requests.get(which, 0) + 1
        drawn = random.Random(f"{self._seed} {which} {nth}").choices(outcome.samples_s, k=task.repetitions)
        return dataclasses.replace(outcome, median_s=statistics.median(drawn), samples_s=tuple(drawn))

    def confirm(self, task: Task) -> Failure | None:
        """Returns None: a recording holds one draw of the inputs, so it cannot show an error with other inputs."""
        return None

    def others(self) -> int:
        return 0

    def close(self) -> None:
        """Does nothing: a replay holds no resources."""


def _differences(found: Sweep, wanted: Sweep) -> str:
    """Describes the differences between two sweeps, except their start dates and second passes."""
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
        raise RecordingError(f"{path} is not a recorded sweep: line {number}: {error}") from error
