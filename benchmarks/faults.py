"""What faults cost a search: each is injected several times among right candidates; every trial is accounted for.

The candidates are scripted (`tests/operations.py`) and run through real worker processes: on the GPU where there is
one, else on the CPU. A trial is lost that did not end as a measurement or a failure; an innocent is blamed where a
right candidate failed, or a fault was taken for another one.
"""

from __future__ import annotations

import argparse
import collections
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import environment, write_result
from rich.console import Console
from rich.table import Table

from scheduler.record import Failure, Trial
from scheduler.store import Store
from scheduler.tuner import start_runner, tune
from scheduler.workers import Runner

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from operations import FAULTS, FAULTY, RIGHT, WALL_CLOCK_FAULTS, FaultyProblem


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=3, help="how often each fault is injected")
    parser.add_argument("--workers", type=int, default=2, help="worker processes")
    parser.add_argument("--run-timeout", type=float, default=10.0, help="seconds that a turn on the device may take")
    options = parser.parse_args(arguments)

    runner = start_runner(FAULTY, workers=options.workers, compile_timeout_s=15.0, run_timeout_s=options.run_timeout)
    faults = FAULTS if runner.hardware.platform == "cpu" else FAULTS.keys() - WALL_CLOCK_FAULTS
    rows = [_row(fault, options.times, runner) for fault in FAULTS if fault in faults]
    runner.close()
    table = Table(title=f"Faults injected into searches on {runner.hardware.kind}", title_justify="left")
    for column in ("fault", "injected", "caught as", "lost", "innocent blamed", "right one won", "seconds"):
        table.add_column(
            column, no_wrap=column == "fault", justify="left" if column in ("fault", "caught as") else "right"
        )
    for row in rows:
        caught = ", ".join(f"{stage} {count}" for stage, count in row["caught_as"].items())
        counts = (str(row[name]) for name in ("lost", "innocent_blamed", "right_one_won"))
        table.add_row(row["fault"], str(row["injected"]), caught, *counts, f"{row['elapsed_s']:.1f}")
    Console().print(table)
    write_result(
        "faults",
        runner.hardware,
        summary={name: sum(row[name] for row in rows) for name in ("injected", "lost", "innocent_blamed")},
        rows=rows,
        environment=environment(runner.environment, FAULTY),
    )


def _row(fault: str, times: int, runner: Runner) -> dict[str, Any]:
    """One search over as many faulty candidates as right ones, in turns; the right one that is fastest comes second."""
    script = [word for i in range(times) for word in (fault, RIGHT[i % len(RIGHT)])]
    problem, store = FaultyProblem(8, " ".join(script)), Store(":memory:")
    started = time.perf_counter()
    record = tune(FAULTY, problem, budget=len(script) + 1, store=store, runner=runner)
    elapsed_s = time.perf_counter() - started
    trials = store.trials(record.key)
    best = record.best(frozenset({"scripted"}))
    faulty = [trial.outcome for trial in trials if _behaviour(trial, script) == fault]
    return {
        "fault": fault,
        "injected": times,
        "caught_as": collections.Counter(o.stage if isinstance(o, Failure) else "right" for o in faulty),
        "lost": len(script) + 1 - len(trials),
        "innocent_blamed": sum(
            isinstance(t.outcome, Failure) and t.outcome.stage != FAULTS.get(_behaviour(t, script)) for t in trials
        ),
        "right_one_won": best is not None and best.schedule["number"] == problem.fastest,
        "elapsed_s": elapsed_s,
        "trials": [f"{t.backend} {_behaviour(t, script)}: {t.outcome}" for t in trials],
    }


def _behaviour(trial: Trial, script: Sequence[str]) -> str:
    return script[int(trial.schedule["number"])] if trial.backend == "scripted" else "library"


if __name__ == "__main__":
    main()
