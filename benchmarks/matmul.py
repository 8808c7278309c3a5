"""Our matrix product against XLA's: best Pallas schedule and final answer, interleaved on the same buffers.

Each problem is searched first (or found in the cache). Then fresh processes, which chose nothing, verify the best
Pallas schedule, the final answer and XLA's product, and time them in turns. Ratios are XLA's time over ours: above one
is faster.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from typing import Any

from harness import environment, write_result
from rich.console import Console
from rich.table import Table

from scheduler import timer
from scheduler.cost import CostModel
from scheduler.hardware import Hardware
from scheduler.record import Entry, Failure, Measurement, Record
from scheduler.store import Store, default_url
from scheduler.tuner import key_of, recheck, start_runner, tune
from scheduler.workers import LIBRARY_COMPILATIONS, Gpu, InProcess, Pool, Runner, Task
from search_spaces.matmul import MATMUL, MatmulProblem

GPU_SUITE = (
    MatmulProblem(4096, 4096, 4096),
    MatmulProblem(8192, 8192, 8192),
    MatmulProblem(4096, 8192, 4096),
    MatmulProblem(2048, 14336, 4096),
    MatmulProblem(4096, 4096, 14336),
    MatmulProblem(2048, 5120, 5120),
    MatmulProblem(1024, 4096, 4096),
    MatmulProblem(1024, 1024, 2048),
    MatmulProblem(512, 512, 512),
    MatmulProblem(256, 14336, 4096),
    MatmulProblem(128, 8192, 8192),
    MatmulProblem(16, 8192, 8192),
    MatmulProblem(16, 4096, 14336),
    MatmulProblem(1000, 1000, 1000),
    MatmulProblem(4000, 4160, 4160),
    MatmulProblem(4001, 4040, 4104),
    MatmulProblem(4096, 4096, 4096, transpose_b=True),
    MatmulProblem(4096, 4096, 4096, transpose_a=True),
    MatmulProblem(4096, 4096, 4096, dtype="float16"),
    MatmulProblem(4096, 4096, 4096, out_dtype="float32"),
    MatmulProblem(1024, 1024, 1024, batch=16),
)
# Where the interpreter rehearses: a run of seconds whose times say nothing about the kernels.
CPU_SUITE = tuple(
    MatmulProblem(m, n, k, dtype="float32")
    for m, n, k in ((128, 128, 128), (256, 128, 64), (100, 70, 90), (1, 256, 256))
)
PALLAS = frozenset(MATMUL.backends) - {MATMUL.library.backend}
REPETITIONS = 10


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=int, default=64, help="trials of each search")
    parser.add_argument("--rounds", type=int, default=10, help=f"turns of {REPETITIONS} repetitions in the comparison")
    parser.add_argument("--cache", default=None, help="path or URL of the cache to search in and to fill")
    parser.add_argument("--first", type=int, default=None, help="only so many problems of the suite")
    options = parser.parse_args(arguments)

    store = Store(options.cache or default_url())
    runner = start_runner(MATMUL)
    hardware = runner.hardware
    suite = (CPU_SUITE if hardware.platform == "cpu" else GPU_SUITE)[: options.first]
    records = [_record(problem, runner, store, options.budget) for problem in suite]
    runner.close()

    judge = InProcess() if isinstance(runner, InProcess) else Pool(_gpu(), slots=LIBRARY_COMPILATIONS)
    rows = [_row(problem, record, judge, options.rounds) for problem, record in zip(suite, records, strict=True)]
    judge.close()
    _print(rows, hardware)
    pallas = [row["pallas_vs_xla"] for row in rows if row["pallas_vs_xla"] is not None]
    final = [row["final_vs_xla"] for row in rows]
    summary = {
        "problems": len(rows),
        "problems_with_pallas": len(pallas),
        "pallas_vs_xla_geomean": statistics.geometric_mean(pallas),
        "pallas_vs_xla_worst": min(pallas),
        "final_vs_xla_geomean": statistics.geometric_mean(final),
        "final_vs_xla_worst": min(final),
    }
    Console().print(summary)
    write_result("matmul", hardware, summary=summary, rows=rows, environment=environment(runner.environment, MATMUL))


def _gpu() -> Gpu:
    gpu = Gpu.query()
    assert gpu is not None, "the GPU that was searched on is gone"
    return gpu


def _record(problem: MatmulProblem, runner: Runner, store: Store, budget: int) -> Record:
    record = store.get(key_of(MATMUL, problem, runner.hardware))
    if record is not None and isinstance(recheck(MATMUL, problem, runner.hardware, record), Entry):
        return record
    record = tune(MATMUL, problem, budget=budget, runner=runner, store=store)
    best = record.winner
    print(f"{problem}: {record.tried} trials, {best.backend} {best.measurement.median_s * 1e6:.1f} us", flush=True)
    return record


def _row(problem: MatmulProblem, record: Record, judge: Runner, rounds: int) -> dict[str, Any]:
    """The three answers timed in turns; the library and a final answer that is the library share one measurement."""
    entries = {
        "xla": record.best(frozenset({MATMUL.library.backend})),
        "pallas": record.best(PALLAS),
        "final": record.winner,
    }
    tasks = {
        name: Task(MATMUL, problem, entry.backend, entry.schedule, REPETITIONS)
        for name, entry in entries.items()
        if entry is not None
    }
    distinct: dict[str, Task] = {}
    alias = {}
    for name, task in tasks.items():
        alias[name] = next((other for other, seen in distinct.items() if seen == task), name)
        distinct.setdefault(alias[name], task)
    samples: dict[str, list[Measurement]] = {name: [] for name in distinct}
    order = random.Random(0)
    names = list(distinct)
    for name in names:
        judge.measure(distinct[name])
    for _ in range(rounds):
        order.shuffle(names)
        for name in names:
            outcome = judge.measure(distinct[name], again=True)
            if isinstance(outcome, Failure):
                raise SystemExit(f"{problem} {name}: {outcome}")
            samples[name].append(outcome)
    times = {name: timer.join(taken) for name, taken in samples.items()}
    xla_s = times[alias["xla"]].median_s
    bound_s = CostModel(judge.hardware).lower_bound(problem)
    row: dict[str, Any] = {
        "problem": str(problem),
        "flops": problem.flops,
        "bound_us": bound_s * 1e6,
        "final_backend": record.winner.backend,
        "trials": record.tried,
    }
    for name in ("xla", "pallas", "final"):
        measured = times.get(alias.get(name, ""))
        entry = entries[name]
        row[f"{name}_us"] = measured and measured.median_s * 1e6
        row[f"{name}_vs_xla"] = measured and xla_s / measured.median_s
        row[f"{name}_tflops"] = measured and problem.flops / measured.median_s / 1e12
        row[f"{name}_schedule"] = entry and dict(entry.schedule)
        row[f"{name}_predicted_us"] = entry and entry.predicted_s * 1e6
        row[f"{name}_samples_us"] = measured and [round(sample * 1e6, 3) for sample in measured.samples_s]
        row[f"{name}_l2"] = measured and measured.l2
    return row


def _print(rows: Sequence[dict[str, Any]], hardware: Hardware) -> None:
    table = Table(title=f"matmul on {hardware.kind}: kernel time in us")
    for column in (
        "problem",
        "bound",
        "XLA",
        "Pallas",
        "final",
        "TFLOP/s",
        "of bound",
        "Pallas vs XLA",
        "final vs XLA",
        "by",
    ):
        table.add_column(column, justify="left" if column == "problem" else "right")
    for row in rows:
        table.add_row(
            row["problem"],
            f"{row['bound_us']:.1f}",
            f"{row['xla_us']:.1f}",
            "-" if row["pallas_us"] is None else f"{row['pallas_us']:.1f}",
            f"{row['final_us']:.1f}",
            f"{row['final_tflops']:.0f}",
            f"{row['bound_us'] / row['final_us']:.0%}",
            "-" if row["pallas_vs_xla"] is None else f"{row['pallas_vs_xla']:.3f}",
            f"{row['final_vs_xla']:.3f}",
            row["final_backend"],
        )
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
