"""Describes a record's winner against the other entries, in sentences and in one word."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

from scheduler.core.records import TIE, Entry, Failure, Record, Schedule, Trial, choice_text, label_of, schedule_text
from scheduler.core.text import digits, ratio_text, seconds_text, share_text


@dataclasses.dataclass(frozen=True)
class Standing:
    """A winner compared with another entry of its record.

    Attributes:
      state: "ahead" with 99 % confidence; "tie", within 1 %; or "undecided".
      ratio: The other entry's time over the winner's: in the median round of the final comparison if known, otherwise
        from the medians.
      low, high: Confidence interval of the ratio, minus one; None if the record has none.
    """

    state: Literal["ahead", "tie", "undecided"]
    ratio: float
    low: float | None = None
    high: float | None = None

    @property
    def interval(self) -> str:
        """The interval as text."""
        return "" if self.low is None or self.high is None else interval_text(self.low, self.high)


def standing(record: Record, other: Entry) -> Standing:
    """Compares the winner of `record` with `other`, by the final comparison."""
    from scheduler.search.runoff import margin

    confidence, winner = record.confidence, record.winner
    tied = label_of(other.backend, other.schedule) in confidence.tied
    found = margin(winner.measurement, other.measurement, confidence.rounds)
    if found is None or not math.isfinite(found.low):
        ratio = other.measurement.median_s / winner.measurement.median_s
        within_tie = tied or abs(ratio - 1) <= TIE
        return Standing("tie" if within_tie else "ahead" if ratio > 1 and found is None else "undecided", ratio)
    within_tie = tied or (found.low <= 0 and found.low >= -TIE and found.high <= TIE)
    state: Literal["ahead", "tie", "undecided"] = "tie" if within_tie else "ahead" if found.low > 0 else "undecided"
    return Standing(state, 1 + found.middle, found.low, found.high)


def interval_text(low: float, high: float) -> str:
    """Describes an interval of relative slowdowns from `low` to `high` as text, without negative percentages."""
    if max(high, -low) < _EQUAL:
        return "as fast"
    if low > 0 or high < 0:
        near, far = sorted((low, high), key=abs)
        return _joined(_amount(near), _amount(far), "{} to {}")
    if -low < _EQUAL:
        return f"up to {' '.join(_amount(high))}"
    if high < _EQUAL:
        return f"up to {' '.join(_amount(low))}"
    return _joined(_amount(low), _amount(high), "between {} and {}")


# Shares below the first count as equal. From the other two on, ratios are shown instead of percentages.
_EQUAL = 5e-5
_MUCH_SLOWER, _MUCH_FASTER = 1.0, -0.5


def _amount(share: float) -> tuple[str, str]:
    """Describes a time longer by `share` as an amount and its kind: "12%", "slower"; "24.9", "times as slow"."""
    if share >= _MUCH_SLOWER:
        return digits(1 + share), "times as slow"
    if share <= _MUCH_FASTER:
        return digits(1 / max(1 + share, 1e-12)), "times as fast"
    return share_text(abs(share)), "slower" if share > 0 else "faster"


def _joined(one: tuple[str, str], other: tuple[str, str], words: str) -> str:
    if one == other:
        return " ".join(one)
    return words.format(one[0] if one[1] == other[1] else " ".join(one), " ".join(other))


def against_library(record: Record) -> Standing | None:
    """Compares the winner with the library (or the best other entry if the library won); None if one did not run."""
    library = record.library_entry
    rival = _rival(record) if record.winner == library else library
    return None if library is None or rival is None else standing(record, rival)


def gain_text(record: Record) -> str:
    """Returns XLA's time over the winner's as short text: a ratio only if it is significant at 99 % confidence."""
    xla = record.library_entry
    if xla is None:
        return "no XLA"
    stands = against_library(record)
    if stands is None:
        return "1.00x"
    if stands.state != "ahead":
        return stands.state
    return "1.00x" if record.winner == xla else ratio_text(stands.ratio)


def order_note(record: Record) -> str:
    """Explains why a record's entries are not in the order of their medians; "" if they are."""
    medians = [float(f"{entry.measurement.median_s:.3g}") for entry in record.entries]  # rounded as displayed
    if medians == sorted(medians):
        return ""
    ties = "a tie goes to XLA, then to the schedule with less on-chip memory"
    if not record.confidence.rounds:
        return f"Rows are not in the order of their times: {ties}."
    return (
        "Rows are in the order of the run-off, not of the medians: the ratio is that of the median round, in which all "
        f"ran interleaved, and {ties}."
    )


def _rival(record: Record) -> Entry | None:
    """Returns the best entry that is not the library's."""
    return next((entry for entry in record.entries if entry is not record.library_entry), None)


def verdict(record: Record) -> list[str]:
    """Returns sentences: the winner against XLA, backends that never ran, why the search ended, and the confidence."""
    failed = [f"{lost}." for lost in (*record.failed, *record.notes)]
    return [
        line for line in (_estimated(record), _against_xla(record), *failed, _ended(record), confidence(record)) if line
    ]


def _estimated(record: Record) -> str:
    if not record.estimated:
        return ""
    return "These are the compiler's estimates for an absent chip: nothing ran. A search on that chip replaces them."


def _ended(record: Record) -> str:
    if not record.stopped:
        return ""
    left = f"; {record.excluded} untried ones cannot win, by their lower bound" if record.excluded else ""
    return f"The search ended: {record.stopped}{left}."


def _against_xla(record: Record) -> str:
    other = record.library_entry
    if other is None:
        if any(lost.backend == record.library for lost in record.failed):
            return "XLA did not run."
        return "XLA was left out: it cannot win, by the bytes that it moves."
    if record.winner == other:
        if (rival := _rival(record)) is None:
            return "XLA is the only backend that ran."
        stands = standing(record, rival)
        if stands.state == "undecided":
            medians = f"takes {digits(stands.ratio)} times as long by the medians, which is not significant"
            where = f"is {stands.interval}" if stands.interval else medians
            return f"Undecided, so XLA is used: the best other schedule {where}."
        result = "A tie within 1 % goes to XLA" if stands.state == "tie" else "XLA wins"
        return f"{result}; the best other schedule takes {digits(stands.ratio)} times as long."
    stands, xla = standing(record, other), f"XLA ({seconds_text(other.measurement.median_s)})"
    if stands.state == "ahead":
        return f"{digits(stands.ratio)} times as fast as {xla}."
    if stands.state == "tie":
        return f"As fast as {xla}, within 1 %."
    return f"Undecided against {xla}" + (f", which is {stands.interval}." if stands.interval else ".")


def confidence(record: Record) -> str:
    run_off = record.confidence
    if not run_off.rounds:
        return ""
    samples = len(record.winner.measurement.samples_s)
    parts = [f"Run-off: {run_off.rounds} rounds, {samples} samples of the winner, L2 {record.winner.measurement.l2}"]
    margin = ""
    if run_off.margin_low is not None and run_off.margin_high is not None:
        margin = f"the runner-up is {interval_text(run_off.margin_low, run_off.margin_high)}"
    if record.undecided:
        parts.append(f"undecided{f': {margin}' if margin else ''}")
    elif margin:
        parts.append(margin)
    if run_off.tied:
        others = len(run_off.tied) - 1
        parts.append(f"tied with {others} other{'s' if others > 1 else ''}, within 1 %")
    return "; ".join([*parts, *run_off.notes]) + "."


# ------------------------------------------------------------------------------
# Formats schedules by their differences, and messages by their first line.


def first_line(text: str, most: int = 160) -> str:
    line = text.splitlines()[0] if text else text
    return line if len(line) <= most else f"{line[: most - 3]}..."


def difference(schedule: Schedule, base: Schedule) -> str:
    """Describes how `schedule` differs from `base`; a field only in `base` has its default in `schedule`."""
    changed = {name: value for name, value in schedule.items() if name not in base or base[name] != value}
    return schedule_text(changed | dict.fromkeys(base.keys() - schedule.keys(), "default")) or "the same"


@dataclasses.dataclass(frozen=True)
class Compared:
    """Candidates as text.

    Attributes:
      texts: One text per candidate.
      note: A line that names the schedules that the abbreviated texts refer to; empty if there are none.
    """

    texts: Sequence[str]
    note: Sequence[str]


def compared(
    choices: Sequence[tuple[str, Schedule]],
    bases: Mapping[str, tuple[str, Schedule]] | None = None,
    *,
    operations: Sequence[str] | None = None,
) -> Compared:
    """Formats each backend and schedule: the first of a backend in full, the others by their differences from it.

    Args:
      bases: Backend -> a schedule shown elsewhere and its name. All schedules of that backend are shown by their
        differences from it.
      operations: The operation of each choice, if there are several. The same backend then has different fields.
    """
    of = operations if operations is not None else [""] * len(choices)
    known = {(operation, backend): base for operation in set(of) for backend, base in (bases or {}).items()}
    texts, named = [], []
    for operation, (backend, schedule) in zip(of, choices, strict=True):
        if (operation, backend) in known and schedule:
            name, base = known[operation, backend]
            texts.append(f"{backend} {difference(schedule, base)}")
            named.append(name)
        else:
            texts.append(choice_text(backend, schedule))
            if schedule:
                first = f"the first of {backend}" if len(set(of)) == 1 else "the first of its operation and backend"
                known.setdefault((operation, backend), (first, schedule))
    names = " and ".join(dict.fromkeys(named))
    return Compared(texts, [f"schedules are shown by their differences from {names}"] if names else [])


def without_prediction(candidates: Sequence[Entry | Trial], library: str) -> frozenset[str]:
    """Returns the backends with kernels that declare no footprint: their `predicted_s` is the library's."""
    known = {each.predicted_s for each in candidates if each.backend == library}
    return frozenset(each.backend for each in candidates if each.backend != library and each.predicted_s in known)


def bases_of(record: Record | None) -> dict[str, tuple[str, Schedule]]:
    """Returns the record's schedule of each backend with its name, for showing other schedules by their differences."""
    bases: dict[str, tuple[str, Schedule]] = {}
    for entry in record.entries if record is not None else ():
        name = "the winner" if record is not None and entry == record.winner else f"the best {entry.backend}"
        if entry.schedule:
            bases.setdefault(entry.backend, (name, entry.schedule))
    return bases


def failures(trials: Sequence[Trial]) -> Mapping[str, int]:
    """Returns the number of failed trials by reason, the most frequent first."""
    reasons = (first_line(str(trial.outcome)) for trial in trials if isinstance(trial.outcome, Failure))
    return dict(collections.Counter(reasons).most_common())
