"""The end of a search: selects the finalists, runs the run-off, and lists backends of which every candidate failed."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

from scheduler.core.records import AllFailed, Failure, Outcome, Trial
from scheduler.core.threads import Threads
from scheduler.measure.runner import Runner
from scheduler.search.final_comparison import FEWEST_ROUNDS, MOST_ROUNDS, Result, Rival, race
from scheduler.search.trials import Trials

FINALISTS = 4
# A record keeps the winner, the runner-up, and the best of each other backend.
KEPT = 2
T = TypeVar("T", bound=Hashable)


def finalists(trials: Trials, confirm: Callable[[int], Failure | None], runner: Runner) -> list[int]:
    """Returns the fastest few and the best of each backend, all confirmed on other inputs and a neighbouring problem.

    A candidate that is not confirmed becomes a failure, and the next best takes its place. The list is empty if none is
    left.
    """
    confirmed: set[int] = set()
    while True:
        ranked = trials.measured()
        chosen = fastest(ranked, FINALISTS, lambda index: trials.ended[index].backend)
        asked = [index for index in chosen if index not in confirmed]
        if not asked:
            return chosen
        with Threads[int, Failure | None](runner.slots, runner.close) as threads:
            for index, failure in threads.map(confirm, asked):
                confirmed.add(index)
                if failure is not None:
                    trials.refute(index, failure)


def fastest(ranked: Sequence[T], count: int, backend: Callable[[T], str]) -> list[T]:
    """Returns the first `count` of `ranked`, followed by the first of each other backend."""
    best: dict[str, T] = {}
    for one in ranked:
        best.setdefault(backend(one), one)
    return list(dict.fromkeys([*ranked[:count], *best.values()]))


def run_off(runner: Runner, rivals: Sequence[Rival], time_again: Callable[[Rival], Outcome], *, seed: int) -> Result:
    """Runs a race on the device of `runner`. The verdict also notes failures and other processes on the device."""
    others = runner.others()
    most_rounds = FEWEST_ROUNDS if runner.hardware.abilities.interpreted else MOST_ROUNDS
    with Threads[Rival, Outcome](1, runner.close) as threads:  # so that Ctrl-C need not wait for a trial
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
        alike: dict[tuple[str, str], list[Failure]] = {}
        for failure in each:
            alike.setdefault((failure.stage, _NUMBER.sub("", failure.detail)), []).append(failure)
        # Failures for lack of memory, or of a process, tell less about the kernel than failures of its own code.
        most = max(alike.values(), key=lambda some: (AllFailed(backend, 0, some[0], 0).own, len(some)))
        yield AllFailed(backend, len(each), most[0], len(most))
