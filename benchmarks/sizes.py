"""Problems of gigabytes and of kilobytes in one job, in turns: none may fail, nor leave the next without memory.

    python benchmarks/sizes.py --seconds 540     # as often as it says that problems are left

A row says what the bench of the problem was expected to need, and what became of each trial.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import RESULTS, ROOT, Kept, environment, paced, write_result
from rich.console import Console
from rich.table import Table

from scheduler.core.hardware import GIB, Hardware
from scheduler.core.records import Failure
from scheduler.measure.buffers import least_buffer_bytes, needed_buffer_bytes
from scheduler.measure.gpu import Gpu
from scheduler.measure.pool import Pool
from scheduler.measure.runner import Runner, RunnerOptions
from scheduler.search import jobs
from scheduler.search.job_queue import DeviceExecutor
from scheduler.store.store import Store
from search_spaces.matmul import MATMUL, MatmulProblem
from search_spaces.problem import nbytes

JOB = Path(__file__).with_suffix(".toml")
# Where the interpreter rehearses.
CPU_BYTES = 2 * GIB
CPU_SUITE = [
    jobs.Task(MATMUL, MatmulProblem(m, n, 16, dtype="float32"), jobs.SearchOptions(budget=2))
    for m, n in ((4096, 8192), (16, 32), (8192, 4096), (33, 17))
]


def main(arguments: Sequence[str] | None = None) -> None:
    started = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing that would end after these")
    parser.add_argument("--part", default="1/1", help="i/n: every n-th of them from the i-th, for GPUs that share them")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "sizes", help="rows kept for the next command")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the result is written")
    options = parser.parse_args(arguments)

    gpu = Gpu.wanted()
    pool = Pool(gpu) if gpu else Pool(Gpu("", "sizes", "", CPU_BYTES), RunnerOptions(workers=2))
    with contextlib.closing(pool) as runner:
        suite = jobs.parse(JOB.read_text()) if gpu else CPU_SUITE
        share = jobs.part(suite, options.part)
        kept = Kept(options.work / "rows.jsonl")
        conditions = [
            {"problem": str(task), "device": runner.hardware.id, "jax": runner.environment.jax} for task in suite
        ]
        left = [
            (task, condition)
            for task, condition in zip(suite, conditions, strict=True)
            if task in share and kept.get(condition) is None
        ]
        for task, condition in paced(left, "job", started + options.seconds):
            kept.add(_row(task, runner), condition)
        kept = Kept(options.work / "rows.jsonl")  # with what other processes added
        rows = [row for condition in conditions if (row := kept.get(condition)) is not None]
        _print(rows)
        made = environment(runner.environment, MATMUL)
        conclude(rows, [str(task) for task in suite], runner.hardware, made, options.results)


def conclude(
    rows: Sequence[dict[str, Any]], suite: Sequence[str], hardware: Hardware, made: dict[str, Any], results: Path
) -> None:
    """Writes the result; `missing` in its environment names the problems that no command has come to yet."""
    summary = {
        "problems": len(rows),
        "large": sum(row["result_gb"] >= 1 for row in rows),
        "largest_result_gb": max((row["result_gb"] for row in rows), default=0.0),
        "problems_failed": sum(row["state"] == "failed" for row in rows),
        "trials": sum(row["trials"] for row in rows),
        "trials_failed": sum(sum(row["failures"].values()) for row in rows),
    }
    Console().print(summary)
    missing = [problem for problem in suite if problem not in {row["problem"] for row in rows}]
    made = made | ({"missing": missing} if missing else {})
    write_result("sizes", hardware, summary=summary, rows=rows, environment=made, directory=results)


def _row(task: jobs.Task | jobs.Malformed, runner: Runner) -> dict[str, Any]:
    assert isinstance(task, jobs.Task), task
    store = Store(":memory:")
    started = time.perf_counter()
    (result,) = jobs.run([task], [DeviceExecutor.of(runner)], store=store)
    trials = [] if result.record is None else store.trials(result.record.key)
    return {
        "problem": str(task),
        "result_gb": nbytes(task.problem.result()) / 1e9,
        "least_gb": least_buffer_bytes(task.problem) / 1e9,
        "needed_gb": needed_buffer_bytes(task.problem, runner.hardware) / 1e9,
        "state": result.state,
        "reason": result.reason,
        "trials": len(trials),
        "failures": collections.Counter(str(t.outcome) for t in trials if isinstance(t.outcome, Failure)),
        "winner": result.entry and result.entry.backend,
        "winner_us": result.entry and result.entry.measurement.median_s * 1e6,
        "xla_us": result.library and result.library.measurement.median_s * 1e6,
        "elapsed_s": time.perf_counter() - started,
    }


def _print(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(title="Problems of all sizes in one job", title_justify="left")
    for column in ("problem", "result GB", "needs GB", "", "trials", "failed", "seconds"):
        table.add_column(column, justify="left" if column in ("problem", "") else "right")
    for row in rows:
        table.add_row(
            row["problem"],
            f"{row['result_gb']:.3f}",
            f"{row['needed_gb']:.2f}",
            row["state"],
            str(row["trials"]),
            str(sum(row["failures"].values())),
            f"{row['elapsed_s']:.1f}",
        )
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
