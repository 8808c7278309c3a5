"""The run-off: rivals timed in turns until it is decided who is fastest, or that some are equally fast."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence

from scheduler.core.quantities import share_text
from scheduler.core.records import TIE, Failure, Measurement, Outcome, Verdict
from scheduler.measure import timer

# The clocks of a device at work move by less; more is noted, and the rounds that it met are repeated.
DRIFT = 0.03
# Of each interval. It is looked at after every round, so one look must rarely be wrong.
CONFIDENCE = 0.99
# The fewest that give an interval of that confidence at all.
FEWEST_ROUNDS = 8
MOST_ROUNDS = 20


@dataclasses.dataclass(frozen=True)
class Rival:
    """One that takes part.

    Attributes:
      label: its own; also the last word where nothing else decides, so the same in every search.
      library: wins ties, unless it yields.
      onchip_bytes: of a tie between others the smaller wins.
      yields: loses ties though it is the library (`Kernel.taken_apart`).
    """

    label: str
    library: bool
    onchip_bytes: int
    yields: bool = False


@dataclasses.dataclass(frozen=True)
class Result:
    """How it ended.

    Attributes:
      order: labels: the winner, then the others by their time against the fastest's. Without those that failed.
      times: label -> all its repetitions.
      failures: label -> why it had to leave.
    """

    order: tuple[str, ...]
    times: Mapping[str, Measurement]
    failures: Mapping[str, Failure]
    verdict: Verdict


Round = dict[str, Measurement]


def race(
    rivals: Sequence[Rival],
    time_again: Callable[[Rival], Outcome],
    *,
    seed: int = 0,
    fewest_rounds: int = FEWEST_ROUNDS,
    most_rounds: int = MOST_ROUNDS,
) -> Result:
    """Times all rivals in rounds, in another random order each, so that a drift meets all of them alike.

    Two rivals are compared by the ratio of their medians within each round: what a round has in common drops out. The
    interval of the median ratio is the sign test's, which asks nothing of the noise (W. J. Conover, Practical
    Nonparametric Statistics, 3rd ed. 1999, section 3.2). A rival that is slower than the leader by more than `TIE`,
    beyond doubt, leaves; the library stays, as the answer to beat. The race ends when each rival left is either
    slower than the leader beyond doubt, or within `TIE` of it beyond doubt, or after `most_rounds`.

    Those tie with the leader that are slower by less than `TIE` beyond doubt, and perhaps not at all. A tie goes to the
    library (unless it yields), then to the smaller footprint, then to the shorter label, as of a schedule at its
    defaults, then to the first one. Where all that are left in the race fail, those that had left it are compared.
    """
    order = random.Random(seed)
    failures: dict[str, Failure] = {}

    def one_round(taking_part: Sequence[Rival]) -> Round:
        times: Round = {}
        for rival in order.sample(taking_part, len(taking_part)):
            match time_again(rival):
                case Measurement() as measured:
                    times[rival.label] = measured
                case Failure() as failure:
                    failures[rival.label] = failure
        return times

    rounds: list[Round] = []
    running = list(rivals)
    while len(rounds) < most_rounds and running:
        rounds.append(one_round(running))
        running = [rival for rival in running if rival.label not in failures]
        if len(rounds) >= fewest_rounds and running:
            leader = _leader([rival.label for rival in running], rounds)
            margins = {rival: _margin(leader, rival.label, rounds) for rival in running}
            running = [rival for rival in running if rival.library or margins[rival].low <= TIE]
            if all(margins[rival].low > 0 or margins[rival].high <= TIE for rival in running if rival.label != leader):
                break
    ran = [rival for rival in rivals if rival.label not in failures]
    if not ran:
        return Result((), {}, failures, Verdict())

    running, rounds = _compared(running, ran, rounds)
    sentinel, notes = _sentinel(running, rounds), []
    if affected := _affected(sentinel, rounds):
        notes.append(
            f"drift of {share_text(_drift(sentinel, rounds))}: {len(affected)} of {len(rounds)} rounds repeated"
        )
        for index in affected:
            rounds[index] = one_round([rival for rival in ran if rival.label in rounds[index]])
        ran = [rival for rival in ran if rival.label not in failures]
        if not ran:
            return Result((), {}, failures, Verdict(rounds=len(rounds), notes=tuple(notes)))
        running, rounds = _compared(running, ran, rounds)
    return _decided(ran, running, rounds, failures, notes)


def _compared(
    running: Sequence[Rival], ran: Sequence[Rival], rounds: Sequence[Round]
) -> tuple[list[Rival], list[Round]]:
    """Who is left in the race, and its rounds; where they all failed, who had left, in the rounds of all of these."""
    if left := [rival for rival in running if rival in ran]:
        return left, list(rounds)
    return list(ran), [times for times in rounds if all(rival.label in times for rival in ran)]


def _decided(
    ran: Sequence[Rival],
    running: Sequence[Rival],
    rounds: Sequence[Round],
    failures: Mapping[str, Failure],
    notes: list[str],
) -> Result:
    leader = _leader([rival.label for rival in running], rounds)
    margins = {rival.label: _margin(leader, rival.label, rounds) for rival in ran}
    tied = [rival for rival in ran if margins[rival.label].low <= 0 and margins[rival.label].high <= TIE]
    winner = _first(tied).label
    order = [winner, *sorted((m for m in margins if m != winner), key=lambda label: (margins[label].middle, label))]
    ahead = _margin(winner, order[1], rounds) if len(order) > 1 else None
    drift = _drift(_sentinel(running, rounds), rounds)
    if drift > DRIFT and not notes:
        notes.append(f"drift of {share_text(drift)}")
    return Result(
        tuple(order),
        {label: timer.join([times[label] for times in rounds if label in times]) for label in order},
        failures,
        Verdict(
            rounds=len(rounds),
            tied=tuple(label for label in order if label in {rival.label for rival in tied}) if len(tied) > 1 else (),
            margin_low=ahead.low if ahead and math.isfinite(ahead.low) else None,
            margin_high=ahead.high if ahead and math.isfinite(ahead.high) else None,
            drift=drift,
            notes=tuple(notes),
        ),
    )


def decided_by_one(times: Mapping[Rival, Measurement]) -> Result:
    """How it ends where a time is the same whenever it is taken: one of each tells. Ties go as in `race`."""
    fastest_s = min(measured.median_s for measured in times.values())
    tied = [rival for rival, measured in times.items() if measured.median_s <= (1 + TIE) * fastest_s]
    winner = _first(tied)
    order = [winner, *sorted((r for r in times if r != winner), key=lambda r: (times[r].median_s, r.label))]
    return Result(
        tuple(rival.label for rival in order),
        {rival.label: times[rival] for rival in order},
        {},
        Verdict(tied=tuple(rival.label for rival in order if rival in tied) if len(tied) > 1 else ()),
    )


def _first(tied: Sequence[Rival]) -> Rival:
    """To whom a tie goes."""
    return min(tied, key=lambda r: (r.yields, not r.library, r.onchip_bytes, len(r.label), r.label))


@dataclasses.dataclass(frozen=True)
class Margin:
    """By which share of one time another is longer: the median over rounds, and its interval."""

    low: float
    middle: float
    high: float


def margin(one: Measurement, other: Measurement, rounds: int) -> Margin | None:
    """The margin of two that a run-off of so many rounds measured, from the samples that its record keeps of them.

    One that left early was there in the first rounds. None where these samples are not those of a run-off.
    """
    repetitions, rest = divmod(len(one.samples_s), rounds) if rounds else (0, 1)
    if rest or not repetitions or not other.samples_s or len(other.samples_s) % repetitions:
        return None
    medians = [
        [statistics.median(samples[start : start + repetitions]) for start in range(0, len(samples), repetitions)]
        for samples in (one.samples_s, other.samples_s)
    ]
    ratios = [theirs / mine - 1 for mine, theirs in zip(*medians, strict=False)]
    return Margin(*_interval(ratios))


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Between which two of `values` their distribution's median lies; infinite where they are too few to say.

    Each value is above the median with probability 1/2, so that the k-th smallest and the k-th largest enclose it
    unless fewer than k values fall on one side: a binomial probability.
    """
    ordered, n = sorted(values), len(values)
    outside, k = 0.0, 0
    while k < n / 2 and (outside := outside + 2 * math.comb(n, k) / 2**n) <= 1 - confidence:
        k += 1
    return (ordered[k - 1], ordered[n - k]) if k else (-math.inf, math.inf)


def _margin(one: str, other: str, rounds: Sequence[Round]) -> Margin:
    if one == other:
        return Margin(0.0, 0.0, 0.0)
    ratios = [r[other].median_s / r[one].median_s - 1 for r in rounds if one in r and other in r]
    if not ratios:
        return Margin(-math.inf, math.inf, math.inf)
    return Margin(*_interval(ratios))


def _interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    low, high = median_interval(ratios)
    return low, statistics.median(ratios), high


def _leader(labels: Sequence[str], rounds: Sequence[Round]) -> str:
    """The fastest of those that ran in all rounds, each round's times taken relative to what they have in common."""

    def relative(times: Round) -> dict[str, float]:
        common = statistics.fmean(math.log(times[label].median_s) for label in labels)
        return {label: math.log(times[label].median_s) - common for label in labels}

    relatives = [relative(times) for times in rounds]
    return min(labels, key=lambda label: (statistics.median(r[label] for r in relatives), label))


def _sentinel(running: Sequence[Rival], rounds: Sequence[Round]) -> str:
    """Whose times tell how the device drifts: those of the leader."""
    return _leader([r.label for r in running], rounds)


def _affected(sentinel: str, rounds: Sequence[Round]) -> list[int]:
    """The rounds in which the sentinel was off its usual time."""
    usual = statistics.median(times[sentinel].median_s for times in rounds if sentinel in times)
    return [
        index
        for index, times in enumerate(rounds)
        if sentinel in times and abs(times[sentinel].median_s / usual - 1) > DRIFT
    ]


def _drift(sentinel: str, rounds: Sequence[Round]) -> float:
    """The sentinel's slowest round against its fastest, as a share."""
    times = [times[sentinel].median_s for times in rounds if sentinel in times]
    return max(times) / min(times) - 1
