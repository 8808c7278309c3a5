"""The run-off: times finalists in interleaved rounds until the fastest is determined, or a tie."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
import re
import statistics
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from scheduler.core.interrupts import Threads
from scheduler.core.records import (
    TIE,
    AllFailed,
    Entry,
    Failure,
    Measurement,
    Outcome,
    Trial,
    Verdict,
    point_of,
    schedule_text,
)
from scheduler.core.text import share_text, warn_safely
from scheduler.measure import timer
from scheduler.measure.protocol import Caution, Finding
from scheduler.measure.runner import Runner
from scheduler.search.trials import Trials
from search_spaces.operation import Operation

# Under load, a device's clocks drift by less than this share. A larger drift is noted, and the affected rounds are
# repeated. A larger spread of one candidate's rounds is noted, too.
DRIFT = 0.03
# Confidence of each interval. It is evaluated after every round, so a single evaluation must rarely be wrong.
CONFIDENCE = 0.99
# The smallest number of rounds that gives an interval of this confidence.
FEWEST_ROUNDS = 8
MOST_ROUNDS = 20


@dataclasses.dataclass(frozen=True)
class Contender:
    """A finalist of the run-off.

    Attributes:
      label: unique label. It is the last tie-breaker, so it must be the same in every search.
      library: wins ties, unless `loses_ties`.
      onchip_bytes: the smaller wins a tie between others.
      loses_ties: loses ties although it is the library (`Kernel.loses_ties`).
    """

    label: str
    library: bool
    onchip_bytes: int
    loses_ties: bool = False


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a run-off.

    Attributes:
      order: labels: the winner, then the others by their time relative to the winner's. Failed finalists are omitted.
      times: label -> measurement with all repetitions.
      failures: label -> the failure that removed it.
    """

    order: tuple[str, ...]
    times: Mapping[str, Measurement]
    failures: Mapping[str, Failure]
    verdict: Verdict


Round = dict[str, Measurement]


def race(
    rivals: Sequence[Contender],
    time_again: Callable[[Contender], Outcome],
    *,
    seed: int = 0,
    fewest_rounds: int = FEWEST_ROUNDS,
    most_rounds: int = MOST_ROUNDS,
) -> Result:
    """Times all rivals in rounds, each in a new random order, so that drift affects all of them equally.

    Two rivals are compared by the ratio of their medians within each round, which cancels effects common to a round.
    The interval of the median ratio is that of the sign test, which makes no assumption about the noise (W. J. Conover,
    Practical Nonparametric Statistics, 3rd ed. 1999, section 3.2). A rival is removed when it is slower than the leader
    by more than `TIE` at this confidence. The library is never removed, because it is the baseline. The race ends when
    each remaining rival is either slower than the leader or within `TIE` of it, at this confidence, or after
    `most_rounds`.

    Buffers are at other addresses in each round (`Bench.again`), so the rounds show how a time depends on them. If all
    rivals take longer in a round, that is a drift of the device; if one does, that is a property of this rival. The
    library is used if the winner is not faster in the mean over the rounds: a kernel of 66 us that takes 80 us at every
    third address loses to 69 us. It is also used if at this confidence the winner may be slower, or slower by more than
    `TIE` if the library yields.

    A rival ties with the leader if, at this confidence, it is slower by at most `TIE` and possibly not slower at all. A
    tie goes to the library (unless it yields), then to the smaller on-chip footprint, then to the shorter label (a
    schedule at its defaults), then to the first label in alphabetical order. If all remaining rivals fail, the removed
    ones are compared.
    """
    order = random.Random(seed)
    failures: dict[str, Failure] = {}

    def one_round(taking_part: Sequence[Contender]) -> Round:
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
    finished = [rival for rival in rivals if rival.label not in failures]
    if not finished:
        return Result((), {}, failures, Verdict())

    running, rounds = _compared(running, finished, rounds)
    notes = []
    if affected := _affected(running, rounds):
        notes.append(
            f"drift of {share_text(_drift(running, rounds))}: {len(affected)} of {len(rounds)} rounds repeated"
        )
        for index in affected:
            rounds[index] = one_round([rival for rival in finished if rival.label in rounds[index]])
        finished = [rival for rival in finished if rival.label not in failures]
        if not finished:
            return Result((), {}, failures, Verdict(rounds=len(rounds), notes=tuple(notes)))
        running, rounds = _compared(running, finished, rounds)
    return _decided(finished, running, rounds, failures, notes)


def _compared(
    running: Sequence[Contender], finished: Sequence[Contender], rounds: Sequence[Round]
) -> tuple[list[Contender], list[Round]]:
    """Returns the remaining rivals and the rounds. If all failed, returns the removed ones and their common rounds."""
    if left := [rival for rival in running if rival in finished]:
        return left, list(rounds)
    return list(finished), [times for times in rounds if all(rival.label in times for rival in finished)]


def _decided(
    finished: Sequence[Contender],
    running: Sequence[Contender],
    rounds: Sequence[Round],
    failures: Mapping[str, Failure],
    notes: list[str],
) -> Result:
    leader = _leader([rival.label for rival in running], rounds)
    margins = {rival.label: _margin(leader, rival.label, rounds) for rival in finished}
    tied = [rival for rival in finished if margins[rival.label].low <= 0 and margins[rival.label].high <= TIE]
    best = _first(tied)
    for library in sorted((r for r in finished if r.library), key=lambda r: margins[r.label].middle):
        if library.loses_ties and _margin(library.label, best.label, rounds).high <= TIE:
            continue
        if _mean_margin(best.label, library.label, rounds) < 0:
            notes.append(f"{best.label} leads, but {library.label} is faster in the mean over the rounds")
            best = library
        elif not best.library and _margin(best.label, library.label, rounds).low <= 0:  # undecided
            best = library
    winner = best.label
    order = [winner, *sorted((m for m in margins if m != winner), key=lambda label: (margins[label].middle, label))]
    ahead = _margin(winner, order[1], rounds) if len(order) > 1 else None
    drift, spread = _drift(running, rounds), _spread(winner, rounds)
    if drift > DRIFT and not notes:
        notes.append(f"drift of {share_text(drift)}")
    elif spread > DRIFT >= drift:
        notes.append(f"the times of {winner} differ by {share_text(spread)} between rounds, at different addresses")
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


def rank_once(times: Mapping[Contender, Measurement]) -> Result:
    """Returns the result from one time per rival, for deterministic times. Ties are resolved as in `race`."""
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


def _first(tied: Sequence[Contender]) -> Contender:
    """Returns the winner of a tie."""
    return min(tied, key=lambda r: (r.loses_ties, not r.library, r.onchip_bytes, len(r.label), r.label))


@dataclasses.dataclass(frozen=True)
class Margin:
    """The relative excess of one time over another: the median over rounds, and its interval."""

    low: float
    middle: float
    high: float


def margin(one: Measurement, other: Measurement, rounds: int) -> Margin | None:
    """Returns the margin of two measurements from a run-off of `rounds` rounds, computed from their recorded samples.

    A rival that was removed early took part in the first rounds. Returns None if the samples do not come from a
    run-off.
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
    """Returns two of `values` that enclose the median of their distribution; infinite if there are too few values.

    Each value is above the median with probability 1/2. The k-th smallest and the k-th largest value therefore enclose
    the median unless fewer than k values fall on one side, which has a binomial probability.
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
    """Returns the fastest rival, by times relative to each round's geometric mean. All `labels` ran in all rounds."""

    def relative(times: Round) -> dict[str, float]:
        common = statistics.fmean(math.log(times[label].median_s) for label in labels)
        return {label: math.log(times[label].median_s) - common for label in labels}

    relatives = [relative(times) for times in rounds]
    return min(labels, key=lambda label: (statistics.median(r[label] for r in relatives), label))


def _mean_margin(one: str, other: str, rounds: Sequence[Round]) -> float:
    """Returns the mean over rounds of the logarithm of a time over another."""
    common = [r for r in rounds if one in r and other in r]
    return statistics.fmean(math.log(r[other].median_s / r[one].median_s) for r in common) if common else 0.0


def _affected(running: Sequence[Contender], rounds: Sequence[Round]) -> list[int]:
    """Returns the rounds in which the time of every rival deviates from its median by more than `DRIFT`."""
    medians = {r.label: statistics.median(times[r.label].median_s for times in rounds) for r in running}
    return [
        index
        for index, times in enumerate(rounds)
        if min(abs(times[label].median_s / median_s - 1) for label, median_s in medians.items()) > DRIFT
    ]


def _drift(running: Sequence[Contender], rounds: Sequence[Round]) -> float:
    """Returns the spread of the rival that spreads least: what is common to all of them is the device's."""
    return min(_spread(rival.label, rounds) for rival in running)


def _spread(label: str, rounds: Sequence[Round]) -> float:
    """Returns the relative excess of a rival's slowest round over its fastest."""
    times = [times[label].median_s for times in rounds if label in times]
    return max(times) / min(times) - 1


# ------------------------------------------------------------------------------
# The end of a search: selects the finalists, runs the run-off, and lists backends of which every candidate failed.

FINALISTS = 4
# A record keeps the winner, the runner-up, and the best of each other backend.
KEPT_FINALISTS = 2
T = TypeVar("T", bound=Hashable)


def finalists(trials: Trials, confirm: Callable[[int], Finding], runner: Runner) -> list[int]:
    """Returns the fastest few and the best of each backend, all confirmed on other inputs and a neighbouring problem.

    A candidate that is not confirmed becomes a failure, and the next best takes its place. The list is empty if none is
    left.
    """
    confirmed: set[int] = set()
    while True:
        ranked = trials.measured()
        chosen = fastest_finalists(ranked, FINALISTS, lambda index: trials.ended[index].backend)
        to_confirm = [index for index in chosen if index not in confirmed]
        if not to_confirm:
            return chosen
        with Threads[int, Finding](runner.slots, runner.close) as threads:
            for index, found in threads.map(confirm, to_confirm):
                confirmed.add(index)
                match found:
                    case Failure():
                        trials.refute(index, found)
                    case Caution(detail=detail):
                        trials.cautions[index] = detail


def fastest_finalists(ranked: Sequence[T], count: int, backend: Callable[[T], str]) -> list[T]:
    """Returns the first `count` of `ranked`, followed by the first of each other backend."""
    best: dict[str, T] = {}
    for one in ranked:
        best.setdefault(backend(one), one)
    return list(dict.fromkeys([*ranked[:count], *best.values()]))


def run_off_finalists(
    runner: Runner, rivals: Sequence[Contender], time_again: Callable[[Contender], Outcome], *, seed: int
) -> Result:
    """Runs a race on the device of `runner`. The verdict also notes failures and other processes on the device."""
    others = runner.others()
    most_rounds = FEWEST_ROUNDS if runner.hardware.abilities.interpreted else MOST_ROUNDS
    with Threads[Contender, Outcome](1, runner.close) as threads:  # so that Ctrl-C need not wait for a trial
        one_by_one = functools.partial(threads.call, time_again)
        ended = race(rivals, one_by_one, seed=seed, most_rounds=most_rounds)
    others = max(others, runner.others())
    notes = [
        *ended.verdict.notes,
        *(f"{label} failed when it ran again: {failure}" for label, failure in ended.failures.items()),
    ]
    if others:
        notes.append(f"{others} other process{'es were' if others > 1 else ' was'} on the device")
    return dataclasses.replace(ended, verdict=dataclasses.replace(ended.verdict, notes=tuple(notes)))


# A note names at most this many schedules.
NAMED = 3


def notes_on_results(operation: Operation[Any], trials: Trials, entries: Sequence[Entry]) -> tuple[str, ...]:
    """Returns notes on wrong results beside correct ones, and on entries that are used with caution; warns of each."""
    notes = []
    for backend in dict.fromkeys(entry.backend for entry in entries if entry.backend != operation.library.backend):
        tried = [trial for trial in trials.ended.values() if trial.backend == backend]
        wrong = {
            schedule_text(trial.schedule): trial.outcome.detail
            for trial in tried
            if isinstance(trial.outcome, Failure) and trial.outcome.stage == "verify"
        }
        if wrong:
            more = f"; and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
            named = "; ".join(list(wrong)[:NAMED]) + more
            share = f"{len(wrong)} of {len(tried)} schedules gave wrong results"
            notes.append(f"{backend}: {share} ({named}): {next(iter(wrong.values()))}")
        used = {point_of(entry.backend, entry.schedule) for entry in entries if entry.backend == backend}
        cautions = {
            trials.cautions[index]: schedule_text(trial.schedule)
            for index, trial in trials.ended.items()
            if index in trials.cautions and point_of(trial.backend, trial.schedule) in used
        }
        notes += [f"{backend} {schedule}: {detail}" for detail, schedule in cautions.items()]
    for note in notes:
        warn_safely(f"{operation.name}, {note}")
    return tuple(notes)


# Numbers that differ between failures with the same cause (size, position, amount), but not line numbers.
_NUMBER = re.compile(r"(?<![:.\d])[-+]?(\d[\d.]*(e[-+]?\d+)?|nan|inf)", re.IGNORECASE)


def all_failed(trials: Iterable[Trial]) -> Iterator[AllFailed]:
    """Yields the backends that were tried without success, each with its most common failure."""
    outcomes: dict[str, list[Outcome]] = {}
    for trial in trials:
        outcomes.setdefault(trial.backend, []).append(trial.outcome)
    for backend, ended in outcomes.items():
        each = [outcome for outcome in ended if isinstance(outcome, Failure)]
        if len(each) < len(ended):
            continue
        by_cause: dict[tuple[str, str], list[Failure]] = {}
        for failure in each:
            by_cause.setdefault((failure.stage, _NUMBER.sub("", failure.detail)), []).append(failure)
        # Failures for lack of memory, or of a process, tell less about the kernel than failures of its own code.
        most = max(by_cause.values(), key=lambda some: (AllFailed(backend, 0, some[0], 0).own, len(some)))
        yield AllFailed(backend, len(each), most[0], len(most))
