"""Tunes a range: a ladder of full searches, brief searches where the winner may change, and held-out values."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from typing import Literal

from scheduler.core import text
from scheduler.core.errors import StoreError
from scheduler.core.hardware import Hardware
from scheduler.core.neighbours import HeldOut, Range
from scheduler.core.records import (
    AllFailed,
    Failure,
    Key,
    Measurement,
    Outcome,
    Point,
    Record,
    choice_text,
    family_of,
    point_of,
)
from scheduler.prediction.between import RangeAnswer, between
from scheduler.search.job_queue import expected_s
from scheduler.search.task import RangeTask, Result, SearchOptions, Task
from scheduler.store.store import Store
from search_spaces.problem import Problem

# Trials of a brief search: the libraries' programs, the winners of both neighbours, and a few that the model ranks
# first. The model accounts for waves that are full at this value and partly empty at the neighbours.
BRIEF = 8
# Maximum number of brief searches per step of the ladder: on average three halvings.
BRIEF_PER_STEP = 3
# Two points closer than this, as a share of the lower value, get no point between them.
NEAREST = 1 / 8
# A schedule is as good as the winner if it is slower by at most this share. The difference is not worth a search.
MAX_DIFFERENCE = 0.02
HELD_OUT = 5


def ladder(low: int, high: int) -> list[int]:
    """Returns both ends and the powers of two between them."""
    powers = (1 << exponent for exponent in range(low.bit_length(), high.bit_length()))
    return sorted({low, high, *powers})


def plan_text(task: RangeTask) -> str:
    """Describes the maximum cost of a range."""
    steps = len(ladder(task.low, task.high))
    between_them = f"at most {BRIEF_PER_STEP * (steps - 1)} of {min(BRIEF, task.budget)} between them"
    return (
        f"{steps} searches of {task.budget} trials, {between_them}, and {HELD_OUT} of {task.budget} at values held out"
    )


class RangeRun:
    """A running range. It proceeds in rounds, and each round depends only on the records of the rounds before it.

    An interrupted range therefore resumes where it stopped, and processes that share a store make the same searches.

    First, full searches cover the ladder. Then a brief search is made in the middle of every step. The halves are
    bisected again if the winners at the two ends differ and neither winner does as well at the other end. If one end of
    the ladder cannot be tuned, full searches bisect to the first value that can. Finally, random values are searched in
    full, to measure how good the range's schedules are. If the range's schedule fails or is wrong at one of them, the
    range is removed.

    The caller calls `begin` once, and `ended` for each task of a round, from one thread at a time.

    Args:
      how: options of all searches of the job.
      store: receives the range.
    """

    def __init__(self, task: RangeTask, options: SearchOptions, hardware: Hardware, store: Store) -> None:
        self.task, self._options, self._hardware, self._store = task, options, hardware, store
        self.result: Result | None = None  # set when the range has ended
        self._records: dict[int, Record] = {}
        self._failed: dict[int, str] = {}
        self._pending: set[int] = set()
        self._steps = ladder(task.low, task.high)
        self._brief = 0
        self._range: Range | None = None
        self._held_out: list[HeldOut] = []
        self._broken: list[str] = []
        self._searched = False

    def begin(self) -> list[Task]:
        """Returns the tasks of the first round. If no value is a valid problem, returns none and sets `result`."""
        return self._round(self._full_searches(self._steps)) or self._next()

    def ended(self, task: Task, result: Result | None) -> list[Task]:
        """Records the result of a task (None: not started). After the last one of a round, returns the next round."""
        value = getattr(task.problem, self.task.field)
        self._pending.discard(value)
        if result is not None and result.record is not None:
            self._searched |= result.state == "tuned"
            if self._range is None:
                self._records[value] = result.record
            else:
                self._evaluate(value, result.record)
        elif self._range is None:
            self._failed[value] = "not started" if result is None else result.reason
        return [] if self._pending else self._next()

    def estimate_rest(self) -> tuple[int, float]:
        """Estimates how many searches follow the current round, and their total time in seconds."""
        if self._range is not None or self.result is not None:
            return 0, 0.0
        middle = _problem(self.task, math.isqrt(self.task.low * self.task.high))
        if middle is None:
            return 0, 0.0
        whole = Task(self.task.operation, middle, self.task.budget, self.task.seconds, self.task.backends)
        brief = dataclasses.replace(whole, budget=min(BRIEF, self.task.budget))
        checks = 0 if self._brief else len(self._steps) - 1
        held_out = min(HELD_OUT, self.task.high - self.task.low)
        work = checks * expected_s(brief, self._hardware) + held_out * expected_s(whole, self._hardware)
        return checks + held_out, work

    def _next(self) -> list[Task]:
        if self._range is None:
            if tasks := self._round(self._next_searches()):
                return tasks
            points = sorted(self._records)
            if len(points) < 2:
                first = next(iter(self._failed.values()), "")
                self.result = Result(self.task, "failed", f"fewer than two of its points have a record: {first}")
                return []
            self._range = self._store_range(points)
            if tasks := self._round(self._held_out_tasks()):
                return tasks
        self._finish(self._range)
        return []

    def _round(self, tasks: Sequence[Task]) -> list[Task]:
        self._pending = {getattr(task.problem, self.task.field) for task in tasks}
        return list(tasks)

    def _full_searches(self, values: Sequence[int]) -> list[Task]:
        tasks = []
        for value in values:
            try:
                tasks.append(self.task.at(value))
            except ValueError as error:
                self._failed[value] = str(error)
        return tasks

    def _next_searches(self) -> list[Task]:
        """Returns the tasks of the next round, between neighbouring points; none if no search is worthwhile."""
        tried = sorted({*self._records, *self._failed})
        reached = range(min(self._records, default=0), max(self._records, default=0) + 1)
        unsure: list[tuple[float, Task | None]] = []
        edges: list[int] = []
        for low, high in itertools.pairwise(tried):
            middle = (low + high) // 2
            if middle == low or high - low <= NEAREST * low:
                continue
            if low in self._records and high in self._records:
                if (low in self._steps and high in self._steps) or not self._winners_agree(low, high):
                    unsure.append((high / low, self._brief_search(middle, low, high)))
            elif (low in self._records and high not in reached) or (high in self._records and low not in reached):
                edges.append(middle)
        left = BRIEF_PER_STEP * (len(self._steps) - 1) - self._brief
        checks = [task for _, task in sorted(unsure, key=lambda each: -each[0])[:left] if task is not None]
        self._brief += len(checks)
        return [*checks, *self._full_searches(edges)]

    def _winners_agree(self, low: int, high: int) -> bool:
        """Whether the winner at one of the two values does as well as the other winner when run at the other value."""
        here, there = self._records[low], self._records[high]
        return _as_good(here, there) or _as_good(there, here)

    def _brief_search(self, value: int, low: int, high: int) -> Task | None:
        """Returns the brief search at a value between two neighbours; None if the problem is not valid."""
        leading: dict[Point, None] = {}
        for record in (self._records[low], self._records[high]):
            leading.update((point, None) for point in _leading(record))
        try:
            task = self.task.at(value)
        except ValueError as error:
            self._failed[value] = str(error)
            return None
        return dataclasses.replace(task, budget=min(BRIEF, task.budget), first=tuple(leading), brief=True)

    def _store_range(self, points: Sequence[int]) -> Range:
        """Stores and returns the range, without held-out values. Calls can use it from now on."""
        newest = max((self._records[point].environment for point in points), key=lambda environment: environment.date)
        made = Range(
            self.task.operation.name,
            self._hardware.id,
            family_of(self.task.lowest, self.task.field),
            self.task.field,
            self.task.low,
            self.task.high,
            tuple(points),
            newest,
        )
        self._put(made)
        return made

    def _put(self, of: Range) -> bool:
        try:
            self._store.ranges.put(of)
        except StoreError as error:
            text.warn_safely(f"{error} (the range {of} is not stored)")
            return False
        return True

    def _held_out_tasks(self) -> list[Task]:
        """Returns full searches at log-uniform random values that are not points of the range."""
        assert self._range is not None
        tasks = []
        for value in _values_between(self._range, random.Random(f"{self._options.seed} {self._range}")):
            if (problem := _problem(self.task, value)) is None:
                continue
            answer = self._answer(problem)
            if isinstance(answer, RangeAnswer):
                point = point_of(answer.backend, answer.schedule)
                tasks.append(dataclasses.replace(self.task.at(value), first=(point,)))
            if len(tasks) == HELD_OUT:
                break
        return tasks

    def _answer(self, problem: Problem) -> RangeAnswer | str:
        assert self._range is not None
        by_key = {record.key: record for record in self._records.values()}

        def find(key: Key) -> list[Record]:
            return [by_key[key]] if key in by_key else []

        return between(self.task.operation, problem, self._hardware, [self._range], find, backends=self.task.backends)

    def _evaluate(self, value: int, record: Record) -> None:
        """Compares the range's schedule at `value` with the record of a search there, if that search timed it."""
        problem = _problem(self.task, value)
        answer = self._answer(problem) if problem is not None else ""
        if not isinstance(answer, RangeAnswer):
            return
        which = point_of(answer.backend, answer.schedule)
        times: dict[Point, Outcome] = {point_of(e.backend, e.schedule): e.measurement for e in record.entries}
        if which not in times:  # not a finalist: compare the times of trials with each other
            with contextlib.suppress(StoreError):
                trials = self._store.last_trials(record.key)
                times = {point_of(trial.backend, trial.schedule): trial.outcome for trial in trials}
        match times.get(which):
            case Failure() as failure:
                if AllFailed(answer.backend, 1, failure, 1).own:
                    choice = choice_text(answer.backend, answer.schedule)
                    self._broken.append(
                        f"at {self.task.field}={value} the range selects {choice}, which fails: {failure}"
                    )
            case Measurement(median_s=answered_s):
                measured = {point: time.median_s for point, time in times.items() if isinstance(time, Measurement)}
                library = [time_s for (backend, _), time_s in measured.items() if backend == record.library]
                best_s, library_s = min(measured.values()), min(library, default=None)
                self._held_out.append(HeldOut(value, answer.backend, answer.schedule, answered_s, best_s, library_s))

    def _finish(self, made: Range) -> None:
        if self._broken:
            with contextlib.suppress(StoreError):
                self._store.ranges.forget(made)
            self.result = Result(self.task, "failed", "; ".join(self._broken), self._hardware)
            return
        held_out = tuple(sorted(self._held_out, key=lambda held: held.value))
        made = dataclasses.replace(made, held_out=held_out)
        kept = self._put(made)
        state: Literal["tuned", "known"] = "tuned" if self._searched else "known"
        self.result = Result(self.task, state, self._uncovered(made), self._hardware, stored=kept, range=made)

    def _uncovered(self, made: Range) -> str:
        """Lists the requested values that the range does not cover, with the reasons; "" if it covers all."""
        field, (first, *_, last) = self.task.field, made.points
        words = []
        for beyond, ends in ((first > made.low, (made.low, first - 1)), (last < made.high, (last + 1, made.high))):
            if beyond:
                why = next(reason for value, reason in sorted(self._failed.items()) if ends[0] <= value <= ends[1])
                words.append(f"{field}={ends[0]}..{ends[1]} is left out: {why}")
        return "; ".join(words)


def _as_good(one: Record, other: Record) -> bool:
    """Whether the winner of one record is as good as the winner of the other, on the problem of the other."""
    won = point_of(one.winner.backend, one.winner.schedule)
    if won == point_of(other.winner.backend, other.winner.schedule):
        return True
    limit_s = (1 + MAX_DIFFERENCE) * other.winner.measurement.median_s
    times = {point_of(entry.backend, entry.schedule): entry.measurement.median_s for entry in other.entries}
    return times.get(won, math.inf) <= limit_s


def _leading(record: Record) -> Iterator[Point]:
    """Yields the two best entries other than the library's programs, which every search tries."""
    others = [entry for entry in record.entries if entry.backend != record.library]
    for entry in others[:2]:
        yield point_of(entry.backend, entry.schedule)


def _problem(task: RangeTask, value: int) -> Problem | None:
    try:
        return task.at(value).problem
    except ValueError:
        return None


def _values_between(of: Range, draw: random.Random) -> Iterator[int]:
    """Yields values between the points, each once, log-uniformly at random. Yields all of them if they are few."""
    first, last = of.points[0], of.points[-1]
    points = set(of.points)
    if last - first + 1 - len(points) <= 2 * HELD_OUT:
        few = [value for value in range(first, last) if value not in points]
        yield from draw.sample(few, len(few))
        return
    seen = set(points)
    for _ in range(100 * HELD_OUT):
        value = round(math.exp(draw.uniform(math.log(first), math.log(last))))
        if first < value < last and value not in seen:
            seen.add(value)
            yield value
