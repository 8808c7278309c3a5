"""Softmax, RMS norm and SiLU-and-mul against XLA: best Pallas schedule and final answer, interleaved, beside a copy.

Each problem of a job is searched first (or found in the cache), for so many minutes at most: run it again to go on.
Then fresh processes, which chose nothing, verify the best Pallas schedule, the final answer and XLA's program, and time
them in turns, and XLA's copy of as many bytes with them. Rates count each operand read once and each result written
once. Ratios are XLA's time over ours: above one is faster.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from harness import environment, write_result
from rich.console import Console
from rich.table import Table

from scheduler import jobs, timer
from scheduler.hardware import Hardware
from scheduler.jobs import Malformed
from scheduler.record import Entry, Failure, Measurement, Record
from scheduler.store import Store, default_url
from scheduler.tuner import key_of, recheck, start_runner, tune
from scheduler.workers import LIBRARY_COMPILATIONS, Gpu, InProcess, Pool, Runner, Task
from search_spaces import LibraryKernel, Operation
from search_spaces.rms_norm import RMS_NORM, RmsNormProblem
from search_spaces.rowwise.problem import RowProblem
from search_spaces.silu_and_mul import SILU_AND_MUL, SiluAndMulProblem
from search_spaces.softmax import SOFTMAX, SoftmaxProblem

JOB = Path(__file__).with_suffix(".toml")
# Where the interpreter rehearses: a run of seconds whose times say nothing about the kernels.
CPU_SUITE: tuple[tuple[Operation[Any], RowProblem], ...] = (
    (SOFTMAX, SoftmaxProblem(64, 1024, "float32")),
    (RMS_NORM, RmsNormProblem(33, 100, "float32")),
    (SILU_AND_MUL, SiluAndMulProblem(16, 256, "float32")),
)
REPETITIONS = 10
MIB = 2**20


class CopyProblem(RowProblem):
    """As many bytes written as read, and nothing to compute: minus ``x``, which no compiler leaves out."""

    @staticmethod
    def compute(*args: jax.Array, **params: Any) -> jax.Array:
        return -args[0]

    @property
    def flops(self) -> float:
        return 1.0 * self.rows * self.columns


class XlaCopy(LibraryKernel[CopyProblem]):
    def run(self, problem: CopyProblem, schedule: Any, target: Any, /, *args: Any, **params: Any) -> jax.Array:
        return problem.compute(*args)


COPY = Operation("copy", CopyProblem, (XlaCopy(),))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=int, default=None, help="trials of each search, in place of the job's")
    parser.add_argument("--minutes", type=float, default=8.0, help="search no further problem after so many minutes")
    parser.add_argument("--rounds", type=int, default=5, help=f"turns of {REPETITIONS} repetitions in the comparison")
    parser.add_argument("--cache", default=None, help="path or URL of the cache to search in and to fill")
    parser.add_argument("--only", default="", help="only problems whose text holds this, such as 'softmax'")
    parser.add_argument("--search-only", action="store_true", help="fill the cache and judge nothing")
    options = parser.parse_args(arguments)

    store = Store(options.cache or default_url())
    runner = start_runner(SOFTMAX)
    hardware = runner.hardware
    suite = [task for task in _suite(hardware, options.budget) if options.only in str(task)]
    end = time.monotonic() + 60 * options.minutes
    records = {task: _record(task, runner, store, end) for task in suite}
    runner.close()
    left = sum(record is None for record in records.values())
    print(f"{len(suite) - left} of {len(suite)} problems searched" + (": run this again for the others" * bool(left)))
    if options.search_only or left:
        return

    judge = InProcess() if isinstance(runner, InProcess) else Pool(_gpu(), slots=LIBRARY_COMPILATIONS)
    rows = []
    for task, record in records.items():
        assert record is not None
        rows.append(_row(task, record, judge, options.rounds))
        print(f"{task}: {rows[-1]['final_tb_per_s']:.2f} TB/s by {rows[-1]['final_backend']}", flush=True)
    judge.close()
    figures = summary(rows)
    _print(rows, hardware)
    Console().print(figures)
    measured = environment(runner.environment, SOFTMAX, RMS_NORM, SILU_AND_MUL)
    write_result("rows", hardware, summary=figures, rows=rows, environment=measured)


def _suite(hardware: Hardware, budget: int | None) -> list[jobs.Task]:
    if hardware.platform == "cpu":
        return [jobs.Task(operation, problem, budget or 4) for operation, problem in CPU_SUITE]
    tasks = jobs.parse(JOB.read_text())
    wrong = [str(task) for task in tasks if isinstance(task, Malformed)]
    assert not wrong, wrong
    return [
        jobs.Task(task.operation, task.problem, budget or task.budget)
        for task in tasks
        if not isinstance(task, Malformed)
    ]


def _gpu() -> Gpu:
    gpu = Gpu.query()
    assert gpu is not None, "the GPU that was searched on is gone"
    return gpu


def _record(task: jobs.Task, runner: Runner, store: Store, end: float) -> Record | None:
    record = store.get(key_of(task.operation, task.problem, runner.hardware))
    if record is not None and isinstance(recheck(task.operation, task.problem, runner.hardware, record), Entry):
        return record
    if time.monotonic() > end:
        return None
    record = tune(task.operation, task.problem, budget=task.budget, runner=runner, store=store)
    best = record.winner
    print(f"{task}: {record.tried} trials, {best.backend} {best.measurement.median_s * 1e6:.1f} us", flush=True)
    return record


def _row(task: jobs.Task, record: Record, judge: Runner, rounds: int) -> dict[str, Any]:
    """The answers timed in turns; the library and a final answer that is the library share one measurement."""
    operation, problem = task.operation, task.problem
    assert isinstance(problem, RowProblem)
    pallas = frozenset(operation.backends) - {operation.library.backend}
    entries = {
        "xla": record.best(frozenset({operation.library.backend})),
        "pallas": record.best(pallas),
        "final": record.winner,
    }
    tasks = {
        name: Task(operation, problem, entry.backend, entry.schedule, REPETITIONS)
        for name, entry in entries.items()
        if entry is not None
    }
    # As many elements read and written as the operation moves.
    moved = round(problem.bytes_moved / 2 / problem.itemsize)
    copied = CopyProblem(rows=max(1, moved // problem.columns), columns=problem.columns, dtype=problem.dtype)
    tasks["copy"] = Task(COPY, copied, COPY.library.backend, {}, REPETITIONS)
    alias = {name: next(other for other, seen in tasks.items() if seen == one) for name, one in tasks.items()}
    names = list(dict.fromkeys(alias.values()))
    samples: dict[str, list[Measurement]] = {name: [] for name in names}
    order = random.Random(0)
    for name in names:
        judge.measure(tasks[name])
    for _ in range(rounds):
        order.shuffle(names)
        for name in names:
            outcome = judge.measure(tasks[name], again=True)
            if isinstance(outcome, Failure):
                raise SystemExit(f"{task} {name}: {outcome}")
            samples[name].append(outcome)
    times = {name: timer.join(taken) for name, taken in samples.items()}
    xla_s = times[alias["xla"]].median_s
    row: dict[str, Any] = {
        "operation": operation.name,
        "problem": str(problem),
        "columns": problem.columns,
        "dtype": problem.dtype,
        "operand_bytes": problem.operands()[0].size * problem.itemsize,
        "bytes": problem.bytes_moved,
        "final_backend": record.winner.backend,
        "trials": record.tried,
    }
    for name in ("copy", "xla", "pallas", "final"):
        measured = times.get(alias.get(name, ""))
        entry = entries.get(name)
        moved_bytes = copied.bytes_moved if name == "copy" else problem.bytes_moved
        row[f"{name}_us"] = measured and measured.median_s * 1e6
        row[f"{name}_tb_per_s"] = measured and moved_bytes / measured.median_s / 1e12
        row[f"{name}_vs_xla"] = measured and xla_s / measured.median_s
        row[f"{name}_schedule"] = entry and dict(entry.schedule)
        row[f"{name}_samples_us"] = measured and [round(sample * 1e6, 3) for sample in measured.samples_s]
        row[f"{name}_l2"] = measured and measured.l2
    return row


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | int | None]:
    """The figures to speak of, from rows as the result file keeps them; None where no row is meant.

    "Large" is 128 MiB of bfloat16 and more in rows of 1,024 to 131,072 columns, "long" those of 32,768 and more. A rate
    "of best" is its share of the best rate that any program of the run reached on as much, the copy included.
    """
    large = [
        row
        for row in rows
        if row["dtype"] == "bfloat16" and row["operand_bytes"] >= 128 * MIB and 1024 <= row["columns"] <= 131072
    ]
    best = max(
        (row[f"{name}_tb_per_s"] or 0.0 for row in large for name in ("copy", "xla", "pallas")),
        default=0.0,
    )

    def worst(figure: str, chosen: Sequence[Mapping[str, Any]]) -> float | None:
        # A problem that no Pallas kernel takes counts as 0: it was to be fast there, too.
        return min((row[figure] or 0.0 for row in chosen), default=None)

    def of(operation: str, chosen: Sequence[Mapping[str, Any]] = large) -> list[Mapping[str, Any]]:
        return [row for row in chosen if row["operation"] == operation]

    def is_long(row: Mapping[str, Any]) -> bool:
        return bool(row["columns"] >= 32768)

    rates = {name: worst("pallas_tb_per_s", of(name)) for name in ("softmax", "rms_norm")}
    gated = [row for row in of("silu_and_mul", rows) if row["operand_bytes"] >= 64 * MIB]
    return {
        "problems": len(rows),
        "best_tb_per_s": best or None,
        "copy_tb_per_s": max((row["copy_tb_per_s"] for row in large), default=None),
        "softmax_tb_per_s_worst": rates["softmax"],
        "rms_norm_tb_per_s_worst": rates["rms_norm"],
        "softmax_of_best_worst": rates["softmax"] and rates["softmax"] / best,
        "rms_norm_of_best_worst": rates["rms_norm"] and rates["rms_norm"] / best,
        "softmax_vs_xla_worst": worst("pallas_vs_xla", of("softmax")),
        "softmax_long_vs_xla_worst": worst("pallas_vs_xla", [row for row in of("softmax") if is_long(row)]),
        "rms_norm_long_vs_xla_worst": worst("pallas_vs_xla", [row for row in of("rms_norm") if is_long(row)]),
        "silu_and_mul_vs_xla_worst": worst("pallas_vs_xla", gated),
        "final_vs_xla_worst": worst("final_vs_xla", rows),
    }


def _print(rows: Sequence[dict[str, Any]], hardware: Hardware) -> None:
    table = Table(title=f"rows on {hardware.kind}: TB/s, reads and writes")
    names = ("problem", "copy", "XLA", "Pallas", "final", "of copy", "Pallas vs XLA", "final vs XLA", "by")
    for column in names:
        table.add_column(column, justify="left" if column == "problem" else "right")
    for row in rows:
        table.add_row(
            f"{row['operation']} {row['problem']}",
            *(_digits(row[f"{name}_tb_per_s"]) for name in ("copy", "xla", "pallas", "final")),
            f"{row['final_tb_per_s'] / row['copy_tb_per_s']:.0%}",
            _digits(row["pallas_vs_xla"]),
            _digits(row["final_vs_xla"]),
            row["final_backend"],
        )
    Console(width=160).print(table)


def _digits(figure: float | None) -> str:
    return "-" if figure is None else f"{figure:.2f}"


if __name__ == "__main__":
    main()
