"""Selects a schedule from a range without measuring, using the records at the two points around a problem."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from scheduler.core.arguments import allowed_backends
from scheduler.core.errors import MalformedRecord
from scheduler.core.hardware import Hardware, siblings
from scheduler.core.neighbours import Range
from scheduler.core.records import TIE, Entry, Key, Point, Record, Schedule, families_of, family_of, key_of, point_of
from scheduler.model.constants import calibrations, model_of
from scheduler.prediction.predict import Answer, modelled_s, predict
from scheduler.prediction.transfer import TELLING, near, recheck
from search_spaces.operation import Operation
from search_spaces.problem import Problem

if TYPE_CHECKING:
    from scheduler.store.store import Store


# The minimum additional gain for a schedule that the model selects from both records and that was never timed.
MODEL_GAIN = 0.10
Find = Callable[[Key], Iterable[Record]]


@dataclasses.dataclass(frozen=True)
class RangeAnswer:
    """A schedule that was selected from a range.

    Attributes:
      range: the range.
      low, high: the points around the problem's value.
      backend, version, schedule: the kernel and the schedule to run.
      predicted_s, library_s: the times of the schedule and of the library in seconds, interpolated between both points.
      untimed: why a schedule was selected that was timed at neither point; "" for all other schedules.
      precedence, origin: the larger `Record.precedence` at both points, and the `Record.origin` of that record.
    """

    range: Range
    low: int
    high: int
    backend: str
    version: int
    schedule: Schedule
    predicted_s: float
    library_s: float
    untimed: str = ""
    precedence: int = 0
    origin: str = "measured"

    @property
    def estimated(self) -> bool:
        """Whether the times are estimates of the compiler."""
        return self.precedence >= 2

    @property
    def reason(self) -> str:
        field, gain = self.range.field, self.library_s / self.predicted_s
        at = f"{self.origin} at {field}={self.low} and {field}={self.high}"
        faster = f", {gain:.2f}x the library's speed between them" if gain > 1 else ""
        said = f"{at}; {self.untimed}" if self.untimed else f"{at}{faster}"
        return f"the range {field}={self.range.low}..{self.range.high}: {said}"


def between(
    operation: Operation[Any],
    problem: Problem,
    hardware: Hardware,
    ranges: Iterable[Range],
    find: Find,
    *,
    backends: frozenset[str] | None = None,
    shared_only: bool = False,
) -> RangeAnswer | str:
    """Selects a schedule from the ranges that contain `problem`.

    Returns "" if no range contains it, or a text that gives the reasons if no range can be used. Among several ranges,
    the one with the nearest points is used first.

    Candidates are the schedules with times in the records at the points. The schedule with the largest gain over the
    library is selected (`_Gains`). The library gains nothing; it is selected if it is allowed and no schedule gains
    more than `TIE`, as in a run-off. A schedule that is not legal for `problem` is skipped. A schedule that the model
    selects from these two records, and that was never timed, must promise a gain larger by `MODEL_GAIN`.

    Args:
      find: returns the records of a key, by descending precedence.
      backends: the kernels that may be selected; None allows all.
      shared_only: as in `predict`.
    """
    between_points = [
        (math.log(ends[1] / ends[0]), place, one, ends)
        for place, one in enumerate(ranges)
        if (ends := _around(one, operation, problem, hardware)) is not None
    ]
    reasons = []
    for _, _, one, ends in sorted(between_points, key=lambda each: each[:2]):
        question = _Question(operation, problem, hardware, allowed_backends(operation, backends), shared_only)
        found = _answer(question, one, ends, find)
        if isinstance(found, RangeAnswer):
            return found
        reasons.append(f"the range {one.field}={one.low}..{one.high} cannot be used: {found}")
    return "; ".join(dict.fromkeys(reasons))


def answer(
    operation: Operation[Any],
    problem: Problem,
    hardware: Hardware,
    *,
    backends: frozenset[str] | None = None,
    records: Iterable[Record] = (),
    ranges: Iterable[Range] = (),
) -> Answer:
    """Selects the schedule of a call without a search: by its own record in `records`, by a range, or by the model.

    An own record is used before a range, unless its precedence is larger (`Record.precedence`).

    Raises:
      NoCandidate: as in `predict`.
    """
    kept = sorted(records, key=lambda record: record.precedence)
    found = predict(operation, problem, hardware, backends=backends, records=kept)
    if found.source == "record" and not found.precedence:
        return found

    def find(key: Key) -> list[Record]:
        return [record for record in kept if record.key == key]

    in_range = between(operation, problem, hardware, ranges, find, backends=backends)
    if isinstance(in_range, str) or (found.source == "record" and found.precedence <= in_range.precedence):
        return found
    return Answer(
        in_range.backend,
        in_range.schedule,
        in_range.predicted_s,
        in_range.library_s,
        in_range.reason,
        source="range",
        precedence=in_range.precedence,
    )


def point_keys(
    operation: Operation[Any], problem: Problem, hardware: Hardware, ranges: Iterable[Range]
) -> Iterator[Key]:
    """Yields the keys of the records that `between` needs."""
    for one in ranges:
        for value in _around(one, operation, problem, hardware) or ():
            with contextlib.suppress(ValueError):  # not a valid problem
                yield key_of(operation, dataclasses.replace(problem, **{one.field: value}), hardware)


@dataclasses.dataclass(frozen=True)
class _Question:
    """The arguments of one query."""

    operation: Operation[Any]
    problem: Problem
    hardware: Hardware
    allowed: frozenset[str]
    shared_only: bool

    def modelled_gain(self, problem: Problem, backend: str, schedule: Schedule) -> float | None:
        """Returns the log of the predicted gain of a schedule over the library; None if it is not legal."""
        library, kernel = self.operation.library, self.operation.kernel(backend)
        fitted = calibrations(self.operation.name, self.hardware, shared_only=self.shared_only)
        models = [model_of(self.operation, each, self.hardware, found=fitted) for each in (library, kernel)]
        time_s = modelled_s(kernel, problem, self.hardware, models[1], schedule)
        return None if time_s is None else math.log(models[0].library_seconds(problem) / time_s)


def _around(of: Range, operation: Operation[Any], problem: Problem, hardware: Hardware) -> tuple[int, int] | None:
    """Returns the two points around a problem, or None if it is not in the range."""
    if (of.operation, of.hardware) != (operation.name, hardware.id):
        return None
    value = vars(problem).get(of.field)  # a stored field name may be unknown here
    if type(value) is not int:
        return None
    return of.around(value) if family_of(problem, of.field) == of.problem else None


def _answer(question: _Question, of: Range, ends: tuple[int, int], find: Find) -> RangeAnswer | str:
    operation, problem, hardware = question.operation, question.problem, question.hardware
    low, high = (_range_point(question, of.field, value, find) for value in ends)
    for value, end in zip(ends, (low, high), strict=True):
        if isinstance(end, str):
            return type(end)(f"{of.field}={value}: {end}")
    assert isinstance(low, _RangePoint)
    assert isinstance(high, _RangePoint)
    share = math.log(getattr(problem, of.field) / ends[0]) / math.log(ends[1] / ends[0])
    # With equal gains, the winner at the upper point is preferred: a partly empty tile takes as long as a full one.
    entries = {
        point_of(entry.backend, entry.schedule): entry
        for end in (high, low)
        for entry in end.record.entries
        if entry.backend in question.allowed
    }
    gains = _Gains(question, low, high, share)
    library = None if operation.library.loses_ties else operation.library.backend  # selected in a tie
    gain, best = -math.inf, None
    # The measured gain is an upper bound here, so most schedules are skipped without querying the model.
    for point, entry in sorted(entries.items(), key=lambda item: gains.measured(item[0]), reverse=True):
        less = 0 if entry.backend == library else TIE
        if gains.measured(point) - less > gain and (here := gains.of(point, entry)) is not None and here - less > gain:
            gain, best = here - less, entry
    if best is None:
        return f"no schedule of {', '.join(sorted(question.allowed))} that ran at either point is legal here"
    gain += 0 if best.backend == library else TIE
    weaker = max(low.record, high.record, key=lambda record: record.precedence)
    made = functools.partial(RangeAnswer, of, *ends, precedence=weaker.precedence, origin=weaker.origin)
    base_s = math.exp((1 - share) * math.log(low.base_s) + share * math.log(high.base_s))
    model = predict(
        operation,
        problem,
        hardware,
        backends=question.allowed,
        records=[low.record, high.record],
        shared_only=question.shared_only,
    )
    promised = math.log(model.library_s / model.predicted_s)
    if model.ranked and promised > gain - math.log(1 - MODEL_GAIN):
        version = operation.kernel(model.backend).version
        predicted_s = base_s / math.exp(promised)
        return made(model.backend, version, model.schedule, predicted_s, base_s, untimed=model.reason)
    return made(best.backend, best.version, best.schedule, base_s / math.exp(gain), base_s)


@dataclasses.dataclass(frozen=True)
class _RangePoint:
    """A point of the range with its valid record."""

    problem: Problem
    record: Record

    @property
    def base_s(self) -> float:
        """The library's time in seconds; the slowest time if the library did not run."""
        library = self.record.library_entry
        times = [entry.measurement.median_s for entry in self.record.entries]
        return max(times) if library is None else library.measurement.median_s

    @functools.cached_property
    def _gains(self) -> Mapping[Point, float]:
        entries = self.record.entries
        return {point_of(e.backend, e.schedule): math.log(self.base_s / e.measurement.median_s) for e in entries}

    def timed(self, point: Point) -> bool:
        return point in self._gains

    def gain(self, point: Point) -> float:
        """Returns the logarithm of the ratio of the library's time to that of a schedule.

        An untimed schedule has a gain of zero, or the best gain of its backend if that is negative.
        """
        if point in self._gains:
            return self._gains[point]
        return min(0.0, max((gain for (backend, _), gain in self._gains.items() if backend == point[0]), default=0.0))


def _range_point(question: _Question, field: str, value: int, find: Find) -> _RangePoint | str:
    """Returns a point with its record, whichever kernel won there; or why it has no valid record."""
    operation, hardware = question.operation, question.hardware
    try:
        there = dataclasses.replace(question.problem, **{field: value})
    except ValueError as error:
        return str(error)
    invalid_reason = ""
    for record in find(key_of(operation, there, hardware)):
        found = recheck(operation, there, hardware, record, backends=question.allowed | {operation.library.backend})
        if not isinstance(found, str) and all(entry.measurement.median_s > 0 for entry in record.entries):
            return _RangePoint(there, record)
        invalid_reason = invalid_reason or (
            found if isinstance(found, str) else "its record has a time that is not positive"
        )
    return invalid_reason or "its record is gone"


@dataclasses.dataclass(frozen=True)
class _Gains:
    """The gains of schedules over the library for a problem between two points.

    A gain is the logarithm of the library's time over that of the schedule. The gains measured at the points are
    interpolated over the logarithm of the extent. At a point where a schedule was not timed, its gain is zero, or the
    best gain of its backend if that is negative. A loss that the model predicts between a point and the problem is
    subtracted, for example from a partly empty wave, or from rows that no vector width divides. A predicted improvement
    is ignored, because the library may improve likewise.

    Attributes:
      share: the position of the problem between the lower point (0) and the upper point (1).
    """

    question: _Question
    low: _RangePoint
    high: _RangePoint
    share: float

    def measured(self, point: Point) -> float:
        """Returns the gain without the loss that the model predicts."""
        return self._at_share(*(end.gain(point) for end in (self.low, self.high)))

    def of(self, point: Point, entry: Entry) -> float | None:
        """Returns the gain of a schedule, or None if it is not legal."""
        if (here := self.question.modelled_gain(self.question.problem, entry.backend, entry.schedule)) is None:
            return None
        if entry.backend == self.question.operation.library.backend:
            return 0.0
        return self._at_share(*(self._from(end, point, entry, here) for end in (self.low, self.high)))

    def _at_share(self, low: float, high: float) -> float:
        return (1 - self.share) * low + self.share * high

    def _from(self, end: _RangePoint, point: Point, entry: Entry, here: float) -> float:
        gain = end.gain(point)
        there = self.question.modelled_gain(end.problem, entry.backend, entry.schedule) if end.timed(point) else None
        return gain if there is None else gain + min(0.0, here - there)


# ------------------------------------------------------------------------------
# Reads the data for a prediction about one problem from a store.


@dataclasses.dataclass(frozen=True)
class Evidence:
    """The stored data that `between.answer` and `predict` need.

    Attributes:
      records: records of the problem itself, of the most similar problems, and at the points of the ranges. Without a
        record of a similar problem on this chip, those of the problem and of similar ones on a sibling.
      ranges: the ranges that may contain the problem.
    """

    records: Sequence[Record] = ()
    ranges: Sequence[Range] = ()


def read(store: Store, operation: Operation[Any], problem: Problem, hardware: Hardware) -> Evidence:
    """Reads one store's data for a problem; malformed records are skipped.

    Raises:
      StoreError: the store cannot be read.
    """
    similar = _similar(store, operation, problem, hardware)
    for chip in siblings(hardware):
        if similar:
            break
        similar = _records_of(store, [key_of(operation, problem, chip)]) + _similar(store, operation, problem, chip)
    ranges = store.ranges.all(operation=operation.name, hardware=hardware.id, problems=families_of(problem))
    keys = [key_of(operation, problem, hardware), *point_keys(operation, problem, hardware, ranges)]
    return Evidence([*_records_of(store, keys), *similar], ranges)


def _similar(store: Store, operation: Operation[Any], problem: Problem, hardware: Hardware) -> list[Record]:
    question = near(operation, problem, hardware, within=TELLING)
    return store.nearest(question, estimated=False) or store.nearest(question, estimated=True)


def _records_of(store: Store, keys: Iterable[Key]) -> list[Record]:
    found = []
    for key in dict.fromkeys(keys):
        with contextlib.suppress(MalformedRecord):  # a direct request for this record reports the error
            if (record := store.get(key)) is not None:
                found.append(record)
    return found


def merged(parts: Iterable[Evidence]) -> Evidence:
    """Merges the evidence of several stores; the first store takes precedence."""
    several = list(parts)
    return Evidence([r for each in several for r in each.records], [r for each in several for r in each.ranges])
