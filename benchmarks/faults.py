"""What faults cost a search: each is injected several times among right candidates; every trial is accounted for.

The candidates run through real worker processes: on the GPU where there is one, else on the CPU. Most are scripted
(`tests/operations.py`); on a GPU Pallas kernels that break it are among them (`tests/device/faulty_kernels.py`).
Besides candidates, what surrounds them fails: problems that take much of the memory, processes that are killed from
outside, and a device whose memory another process has taken. A trial is lost that did not end as a measurement or
a failure; an innocent is blamed where a right candidate failed, or a fault was taken for another one.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from harness import RESULTS, ROOT, Kept, commit, environment, write_result
from rich.console import Console
from rich.table import Table

from scheduler.core.hardware import GIB
from scheduler.core.progress import Progress
from scheduler.core.records import Failure, Trial
from scheduler.measure.buffers import needed_buffer_bytes
from scheduler.measure.conversation import ALLOCATOR_RETRY_S, RUN_LIMIT_S
from scheduler.measure.gpu import Gpu
from scheduler.measure.pool import Pool
from scheduler.measure.runner import RunnerOptions
from scheduler.search.tuner import tune
from scheduler.store.store import Store

# Before any process starts: a process looks for modules where this one does when it starts.
TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "device")]
from operations import CPU_FAULTS, FAULTS, FAULTY, RIGHT, FaultyProblem  # noqa: E402

# Left of a device whose memory another process has taken: enough for the context of a process that is replaced.
LEFT_BYTES = 4 * GIB
CPU_BYTES = 2 * GIB  # of a pool without a GPU
COMPILE_TIMEOUT_S = 15.0 + ALLOCATOR_RETRY_S  # operands are allocated within it
# In pieces, each as large as it is asked for.
PIECE_BYTES = GIB
TAKE = """
import sys, jax.numpy as jnp
x = [jnp.zeros(int(sys.argv[1]), jnp.uint8).block_until_ready() for _ in range(int(sys.argv[2]))]
print("taken", flush=True)
input()
"""

Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=7, help="how often each fault is injected")
    parser.add_argument("--workers", type=int, default=None, help="compile processes  [default: 4, on a CPU 2]")
    parser.add_argument(
        "--run-timeout",
        type=float,
        default=ALLOCATOR_RETRY_S + RUN_LIMIT_S,
        help="seconds that a turn on the device may take",
    )
    parser.add_argument("--only", default="", help="only these faults, with commas between them")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "faults", help="rows kept for the next command")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the result is written")
    options = parser.parse_args(arguments)

    gpu = Gpu.wanted()
    workers = options.workers or (4 if gpu else 2)
    patience = RunnerOptions(workers=workers, compile_timeout_s=COMPILE_TIMEOUT_S, run_timeout_s=options.run_timeout)
    runner = Pool(gpu or Gpu("", "faults", "", CPU_BYTES), patience)
    with contextlib.closing(runner):
        scripted = FAULTS.keys() - (CPU_FAULTS if gpu else ())
        searches: dict[str, Callable[[str, int, Pool], list[Row]]] = {
            **{fault: _scripted for fault in FAULTS if fault in scripted},
            "large": _large,
            "killed": _killed,
            **({"full": _full, "kernels": _kernels} if gpu else {}),  # no CPU's memory can be taken away
        }
        kept = Kept(options.work / "rows.jsonl")
        conditions = {
            fault: {"fault": fault, "times": options.times, "device": runner.hardware.id, **commit()}
            for fault in searches
        }
        for fault in options.only.split(",") if options.only else searches:
            if kept.get(conditions[fault]) is None:
                kept.add({"rows": searches[fault](fault, options.times, runner)}, conditions[fault])
        kept = Kept(options.work / "rows.jsonl")  # with what other processes added
        found = [kept.get(condition) for condition in conditions.values()]
    rows = [row for one in found if one is not None for row in one["rows"]]
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
    summary = {name: sum(row[name] for row in rows) for name in ("injected", "lost", "innocent_blamed")}
    summary["kinds"] = len(rows)
    Console().print(summary)
    if None in found:
        print("other faults are to be injected by further commands, with --only, or without it all that are left")
        return
    made = environment(runner.environment, FAULTY)
    write_result("faults", runner.hardware, summary=summary, rows=rows, environment=made, directory=options.results)


def _scripted(fault: str, times: int, runner: Pool) -> list[Row]:
    """One search over as many faulty candidates as right ones, in turns; the right one that is fastest comes second."""
    script = [word for i in range(times) for word in (fault, RIGHT[i % len(RIGHT)])]
    return [_searched(fault, times, FaultyProblem(8, " ".join(script)), runner)]


def _large(fault: str, times: int, runner: Pool) -> list[Row]:
    """A problem that takes half of the memory, and a small one after it: neither takes the other's memory."""
    n = next(
        n
        for n in itertools.count(2**22, 2**22)
        if needed_buffer_bytes(FaultyProblem(n, "ok"), runner.hardware) > runner._memory_bytes // 2
    )
    rows = [
        _searched(fault, 1, problem, runner)
        for _ in range(times)
        for problem in (FaultyProblem(n, "ok ok"), FaultyProblem(8, "ok noise"))
    ]
    return [_sum(rows) | {"injected": times, "elements": n}]


def _killed(fault: str, times: int, runner: Pool) -> list[Row]:
    """A process is killed from outside each time that a candidate ended, as by a system that is short of memory."""
    left = times

    def kill(step: Progress) -> None:
        nonlocal left
        if left:
            left -= 1
            process = random.choice([runner._measuring.pid, *runner._compilers.pids])
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    script = " ".join(RIGHT[i % len(RIGHT)] for i in range(2 * times))
    return [_searched(fault, times, FaultyProblem(8, script), runner, kill)]


def _full(fault: str, times: int, runner: Pool) -> list[Row]:
    """Another process takes the device's memory: a process that ends is replaced beside it."""
    script = " ".join(word for i in range(times) for word in ("exit", RIGHT[i % len(RIGHT)]))
    with _taken():
        return [_searched(fault, times, FaultyProblem(8, script), runner)]


def _kernels(fault: str, times: int, runner: Pool) -> list[Row]:
    """Pallas kernels that break the device for real, beside one that is right."""
    from faulty_kernels import DOUBLE, TILE, DoubleProblem

    stages = {"out_of_bounds": "verify", "endless": "timeout", "skips_a_tile": "verify"}
    started, store = time.perf_counter(), Store(":memory:")
    records = [
        tune(DOUBLE, DoubleProblem(n=TILE * (64 + i)), budget=5, store=store, runner=runner) for i in range(times)
    ]
    elapsed_s = time.perf_counter() - started
    trials = [trial for record in records for trial in store.trials(record.key)]
    best = [record.best(frozenset({"mosaic_gpu"})) for record in records]

    def behaviour(trial: Trial) -> str:
        return str(trial.schedule.get("behave", "library"))

    def row(behave: str, stage: str) -> Row:
        # Each answers for its own trials; what became of the right ones stands with the first.
        own = [
            t for t in trials if behaviour(t) == behave or (behave == next(iter(stages)) and behaviour(t) not in stages)
        ]
        return _row(
            f"kernel: {behave}",
            times,
            own,
            lost=times * (3 if behave == next(iter(stages)) else 1) - len(own),
            expected=lambda trial: stages.get(behaviour(trial)),
            is_fault=lambda trial: behaviour(trial) == behave,
            won=all(entry is not None and entry.schedule["behave"] == "right" for entry in best),
            elapsed_s=elapsed_s / len(stages),
            name=behaviour,
        )

    return [row(behave, stage) for behave, stage in stages.items()]


@contextlib.contextmanager
def _taken() -> Iterator[None]:
    """Within it a process holds all of the device's memory that is free now, but for `LEFT_BYTES`."""
    gpu = Gpu.query()
    assert gpu is not None
    command = [sys.executable, "-c", TAKE, str(PIECE_BYTES), str((gpu.free_bytes - LEFT_BYTES) // PIECE_BYTES)]
    settings = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    taker = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | settings, text=True
    )
    try:
        assert taker.stdout is not None
        assert taker.stdout.readline(), "it could not take the memory"
        yield
    finally:
        taker.kill()
        taker.wait()


def _searched(
    fault: str,
    injected: int,
    problem: FaultyProblem,
    runner: Pool,
    progress: Callable[[Progress], None] | None = None,
) -> Row:
    """One search over the candidates of a script."""
    script, store = problem.behaviours, Store(":memory:")
    started = time.perf_counter()
    record = tune(FAULTY, problem, budget=len(script) + 1, store=store, runner=runner, progress=progress)
    elapsed_s = time.perf_counter() - started
    trials = store.trials(record.key)
    best = record.best(frozenset({"scripted"}))
    surrounding = fault not in script  # every candidate meets it

    def behaviour(trial: Trial) -> str:
        return script[int(trial.schedule["number"])] if trial.backend == "scripted" else "library"

    return _row(
        fault,
        injected,
        trials,
        lost=len(script) + 1 - len(trials),
        expected=lambda trial: FAULTS.get(behaviour(trial)),
        is_fault=lambda trial: surrounding or behaviour(trial) == fault,
        won=best is not None and best.schedule["number"] == problem.fastest,
        elapsed_s=elapsed_s,
        name=behaviour,
    )


def _row(
    fault: str,
    injected: int,
    trials: Sequence[Trial],
    *,
    lost: int,
    expected: Callable[[Trial], str | None],
    is_fault: Callable[[Trial], bool],
    won: bool,
    elapsed_s: float,
    name: Callable[[Trial], str],
) -> Row:
    outcomes = [trial.outcome for trial in trials if is_fault(trial)]
    return {
        "fault": fault,
        "injected": injected,
        "caught_as": collections.Counter(o.stage if isinstance(o, Failure) else "right" for o in outcomes),
        "lost": lost,
        "innocent_blamed": sum(isinstance(t.outcome, Failure) and t.outcome.stage != expected(t) for t in trials),
        "right_one_won": won,
        "elapsed_s": elapsed_s,
        "trials": [f"{t.backend} {name(t)}: {t.outcome}" for t in trials],
    }


def _sum(rows: Sequence[Row]) -> Row:
    """Of several searches with the same fault."""
    return {
        "fault": rows[0]["fault"],
        **{name: sum(row[name] for row in rows) for name in ("injected", "lost", "innocent_blamed", "elapsed_s")},
        "caught_as": sum((row["caught_as"] for row in rows), collections.Counter()),
        "right_one_won": all(row["right_one_won"] for row in rows),
        "trials": [trial for row in rows for trial in row["trials"]],
    }


if __name__ == "__main__":
    main()
