"""What benchmarks do with a list of problems: search and time each once, however often a command is cut off."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from harness import RESULTS, ROOT, Kept, environment, paced, write_result
from independent import REPETITIONS

from scheduler.core.arguments import named_backends
from scheduler.core.errors import NoCandidate
from scheduler.core.hardware import Hardware
from scheduler.core.records import Entry, Record, key_of
from scheduler.measure.runner import Runner
from scheduler.prediction.transfer import recheck
from scheduler.search import jobs
from scheduler.search.tuner import tune
from scheduler.store.store import Store
from search_spaces import Operation, Problem

C = TypeVar("C")


def options(description: str | None, name: str, *, budget: int | None, rounds: int) -> argparse.ArgumentParser:
    """What the commands of all suites take; `budget` None is what the suite says of each problem."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="1/1", help="i/n: every n-th of them from the i-th, for GPUs that share them")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin nothing that would end after so many"
    )
    parser.add_argument("--budget", "--trials", type=int, default=budget, help="trials of each search")
    parser.add_argument(
        "--rounds", type=int, default=rounds, help=f"turns of {REPETITIONS} repetitions in the comparison"
    )
    parser.add_argument("--cache", default=None, help="path or URL of the cache to search in and to fill")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / name, help="what is kept for the next command")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the result is written")
    return parser


def search(tasks: Sequence[jobs.Task], runner: Runner, store: Store, deadline: float) -> None:
    """Searches those whose answer `store` does not have; it keeps each trial as it ends. One that fails is told."""
    left = [task for task in tasks if found(task.operation, task.problem, runner.hardware, store) is None]
    for task in paced(left, "search", deadline):
        try:
            record = tune(task.operation, task.problem, budget=task.options.budget, runner=runner, store=store)
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
    entries = {
        "xla": record.best(frozenset({operation.library.backend})),
        "pallas": record.best(named_backends(operation, "pallas")),
        "final": record.winner,
    }
    return {name: entry for name, entry in entries.items() if entry is not None}


def cell(figure: float | None, form: str) -> str:
    """A figure in a table, a dash where there is none."""
    return "-" if figure is None else format(figure, form)


def time_all(
    cases: Sequence[C],
    conditions: Callable[[C], dict[str, Any]],
    timed: Callable[[C], dict[str, Any]],
    kept: Path,
    deadline: float,
) -> list[dict[str, Any]]:
    """A row for each case, in their order, but for those that time did not suffice for.

    Args:
      conditions: all that the row of a case depends on; an earlier row stands where these are the same.
      timed: measures a case.
      kept: the file that keeps each row as soon as it is measured.
    """
    earlier = Kept(kept)
    rows = {n: row for n, case in enumerate(cases) if (row := earlier.get(conditions(case))) is not None}
    for n in paced([n for n in range(len(cases)) if n not in rows], "time", deadline):
        rows[n] = earlier.add(timed(cases[n]), conditions(cases[n]))
    return [rows[n] for n in sorted(rows)]


def conclude(
    name: str,
    fresh: Runner,
    rows: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
    *operations: Operation[Any],
    missing: Sequence[str],
    chosen: argparse.Namespace,
    partly: bool,
    incomplete: bool = False,
) -> None:
    """Writes the result of a whole suite.

    Args:
      missing: problems that have no row.
      chosen: by `options`.
      partly: it was asked for some of the suite's problems only.
      incomplete: write what there is, too; `missing` in the result's environment names the rest.

    Raises:
      SystemExit: there are such problems, and no row or not `incomplete`; the message names them.
    """
    if missing:
        untimed = (
            f"{len(missing)} of {len(missing) + len(rows)} problems are not timed, because they are not tuned or time "
            "was up; the same command goes on from here:\n  " + "\n  ".join(missing)
        )
        if not (incomplete and rows):
            raise SystemExit(untimed)
        print(untimed, flush=True)
    if partly or chosen.part != "1/1":
        print(f"no result is written of a part of the suite; the rows are in {chosen.work}")
        return
    told = environment(fresh.environment, *operations) | ({"missing": list(missing)} if missing else {})
    write_result(name, fresh.hardware, summary=summary, rows=rows, environment=told, directory=chosen.results)
