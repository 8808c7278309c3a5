"""What benchmarks do with a list of problems: search and judge each once, however often a command is cut off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from harness import Kept, paced

from scheduler import jobs
from scheduler.answer import key_of, recheck
from scheduler.errors import NoCandidate
from scheduler.hardware import Hardware
from scheduler.record import Entry, Record
from scheduler.store import Store
from scheduler.tuner import tune
from scheduler.workers import Runner
from search_spaces import Operation, Problem

C = TypeVar("C")


def search(tasks: Sequence[jobs.Task], runner: Runner, store: Store, deadline: float) -> None:
    """Searches those whose answer `store` does not have; it keeps each trial as it ends. One that fails is told."""
    left = [task for task in tasks if found(task.operation, task.problem, runner.hardware, store) is None]
    for task in paced(left, "search", deadline):
        try:
            record = tune(task.operation, task.problem, budget=task.budget, runner=runner, store=store)
        except NoCandidate as error:  # the other problems are worth their time
            print(f"{task}: {error}", flush=True)
            continue
        best = record.winner
        print(f"{task}: {record.tried} trials, {best.backend} {best.measurement.median_s * 1e6:.1f} us", flush=True)


def found(operation: Operation[Any], problem: Problem, hardware: Hardware, store: Store) -> Record | None:
    """What a search found for the problem, if that still holds."""
    record = store.get(key_of(operation, problem, hardware))
    held = record is not None and isinstance(recheck(operation, problem, hardware, record), Entry)
    return record if held else None


def answers(operation: Operation[Any], record: Record) -> dict[str, Entry]:
    """By name: the library's program, the best Pallas schedule and the final answer, of those that there are."""
    library = frozenset({operation.library.backend})
    entries = {
        "xla": record.best(library),
        "pallas": record.best(frozenset(operation.backends) - library),
        "final": record.winner,
    }
    return {name: entry for name, entry in entries.items() if entry is not None}


def judge_all(
    cases: Sequence[C],
    conditions: Callable[[C], dict[str, Any]],
    judged: Callable[[C], dict[str, Any]],
    kept: Path,
    deadline: float,
) -> list[dict[str, Any]]:
    """A row for each case, in their order, but for those that time did not suffice for.

    Args:
      conditions: all that the row of a case depends on; an earlier row stands where these are the same.
      judged: measures a case.
      kept: the file that keeps each row as soon as it is measured.
    """
    earlier = Kept(kept)
    rows = {n: row for n, case in enumerate(cases) if (row := earlier.get(conditions(case))) is not None}
    for n in paced([n for n in range(len(cases)) if n not in rows], "judge", deadline):
        rows[n] = earlier.add(judged(cases[n]), conditions(cases[n]))
    return [rows[n] for n in sorted(rows)]
