"""How long a search takes, and whether two searches agree on the winner's time.

One search is timed with and without the start of its workers. Then each problem is searched with two seeds, and a fresh
process, which chose nothing, times both winners in turns; their disagreement is by how much the slower one is slower.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from harness import environment, write_result
from rich.console import Console
from rich.table import Table

from scheduler.record import Failure, Measurement, Record
from scheduler.tuner import Progress, start_runner, tune
from scheduler.workers import LIBRARY_COMPILATIONS, Gpu, InProcess, Pool, Runner, Task
from search_spaces.matmul import MATMUL, MatmulProblem

GPU_SUITE = (
    MatmulProblem(4096, 4096, 4096),
    MatmulProblem(8192, 8192, 8192),
    MatmulProblem(2048, 14336, 4096),
    MatmulProblem(2048, 5120, 5120),
    MatmulProblem(1024, 1024, 2048),
    MatmulProblem(256, 14336, 4096),
    MatmulProblem(128, 8192, 8192),
    MatmulProblem(4000, 4160, 4160),
    MatmulProblem(4096, 4096, 4096, transpose_b=True),
    MatmulProblem(1024, 1024, 1024, batch=16),
)
# Where the interpreter rehearses: a run of seconds whose times say nothing about the kernels.
CPU_SUITE = tuple(MatmulProblem(m, n, k, dtype="float32") for m, n, k in ((128, 128, 128), (64, 128, 32)))
SEEDS = (1, 2)
REPETITIONS = 10


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=int, default=64, help="trials of each search")
    parser.add_argument("--rounds", type=int, default=20, help=f"turns of {REPETITIONS} repetitions in the comparison")
    parser.add_argument("--first", type=int, default=None, help="only so many problems of the suite")
    options = parser.parse_args(arguments)

    started = time.perf_counter()
    runner = start_runner(MATMUL)
    startup_s = time.perf_counter() - started
    on_cpu = runner.hardware.platform == "cpu"
    suite = (CPU_SUITE if on_cpu else GPU_SUITE)[: options.first]
    timed = _timed_search(suite[0], runner, options.budget)
    print(
        f"{suite[0]}: {timed['trials']} trials in {timed['seconds']:.1f} s after a start of {startup_s:.1f} s",
        flush=True,
    )

    pairs = [[_search(problem, runner, options.budget, seed) for seed in SEEDS] for problem in suite]
    runner.close()
    judge = InProcess() if isinstance(runner, InProcess) else Pool(_gpu(), slots=LIBRARY_COMPILATIONS)
    rows = [_row(problem, pair, judge, options.rounds) for problem, pair in zip(suite, pairs, strict=True)]
    judge.close()
    _print(rows)
    summary = {
        "seconds_64_trials": timed["seconds"],
        "seconds_with_startup": timed["seconds"] + startup_s,
        "winner_disagreement_worst": max(row["disagreement"] for row in rows),
        "trials": timed["trials"],
        "workers": runner.slots,
        "problems": len(rows),
    }
    Console().print(summary)
    write_result(
        "tuning_time",
        runner.hardware,
        summary=summary,
        rows=[timed, *rows],
        environment=environment(runner.environment, MATMUL),
    )


def _timed_search(problem: MatmulProblem, runner: Runner, budget: int) -> dict[str, Any]:
    ended: list[Progress] = []
    started = time.perf_counter()
    record = tune(MATMUL, problem, budget=budget, runner=runner, progress=ended.append)
    seconds = time.perf_counter() - started
    return {
        "problem": str(problem),
        "seconds": seconds,
        "trials": record.tried,
        # The rest of the time is the finalists': confirmed, and raced.
        "seconds_of_trials": ended[-1].elapsed_s,
        "trial_ended_s": [round(step.elapsed_s, 3) for step in ended],
        "failed": sum(isinstance(step.last.outcome, Failure) for step in ended),
        "run_off_rounds": record.confidence.rounds,
        "notes": list(record.confidence.notes),
    }


def _search(problem: MatmulProblem, runner: Runner, budget: int, seed: int) -> Record:
    record = tune(MATMUL, problem, budget=budget, runner=runner, seed=seed)
    best = record.winner
    print(f"{problem}, seed {seed}: {best.backend} {best.measurement.median_s * 1e6:.1f} us", flush=True)
    return record


def _row(problem: MatmulProblem, pair: Sequence[Record], judge: Runner, rounds: int) -> dict[str, Any]:
    """Both winners timed in turns; the same winner twice agrees with itself and is timed once."""
    tasks = [Task(MATMUL, problem, r.winner.backend, r.winner.schedule, REPETITIONS) for r in pair]
    distinct = tasks[:1] if tasks[0] == tasks[1] else tasks
    medians: list[list[float]] = [[] for _ in distinct]
    samples: list[list[float]] = [[] for _ in distinct]
    for task in distinct:
        judge.measure(task)
    order = random.Random(0)
    for _ in range(rounds):
        for i in order.sample(range(len(distinct)), len(distinct)):
            match judge.measure(distinct[i], again=True):
                case Measurement() as measured:
                    medians[i].append(measured.median_s)
                    samples[i] += measured.samples_s
                case failure:
                    raise SystemExit(f"{problem} {distinct[i].schedule}: {failure}")
    # Within a round both met the same clocks; the median ratio of the rounds is what is left.
    ratio = statistics.median(b / a for a, b in zip(medians[0], medians[-1], strict=True))
    return {
        "problem": str(problem),
        "disagreement": max(ratio, 1 / ratio) - 1,
        "same_winner": len(distinct) == 1,
        "winners": [{"backend": r.winner.backend, "schedule": dict(r.winner.schedule)} for r in pair],
        "winner_us": [statistics.median(taken) * 1e6 for taken in (samples[0], samples[-1])],
        "searched_us": [r.winner.measurement.median_s * 1e6 for r in pair],
        "run_off": [{"rounds": r.confidence.rounds, "tied": len(r.confidence.tied)} for r in pair],
        "samples_us": [[round(sample * 1e6, 3) for sample in taken] for taken in samples],
    }


def _gpu() -> Gpu:
    gpu = Gpu.query()
    assert gpu is not None, "the GPU that was searched on is gone"
    return gpu


def _print(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(title=f"winners of two searches, seeds {SEEDS[0]} and {SEEDS[1]}: kernel time in us")
    for column in ("problem", "first", "second", "disagreement", ""):
        table.add_column(column, justify="left" if column == "problem" else "right")
    for row in rows:
        first, second = row["winner_us"]
        same = "the same winner" if row["same_winner"] else ""
        table.add_row(row["problem"], f"{first:.1f}", f"{second:.1f}", f"{row['disagreement']:.2%}", same)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
