"""How long a search takes, and whether two searches agree on the winner's time.

One search is timed with and without the start of its workers, then all problems as those of a job, as many at once as
the runner takes, and their records verified. Then each problem is searched with two seeds, and a fresh process, which
chose nothing, times both winners in turns; their disagreement is by how much the slower one is slower.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

from harness import environment, write_result
from independent import REPETITIONS, start_fresh, time_in_rounds
from problems import REHEARSED, REPEATED
from rich.console import Console
from rich.table import Table

from scheduler.core.interrupts import Threads
from scheduler.core.progress import Progress
from scheduler.core.records import Failure, Record
from scheduler.measure import timer
from scheduler.measure.pool import start_runner
from scheduler.measure.runner import Runner, Task
from scheduler.search.reverify import reverify
from scheduler.search.tuner import tune
from search_spaces.matmul import MATMUL, MatmulProblem

SEEDS = (1, 2)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=int, default=64, help="trials of each search")
    parser.add_argument("--rounds", type=int, default=20, help=f"turns of {REPETITIONS} repetitions in the comparison")
    parser.add_argument("--first", type=int, default=None, help="only so many problems of the suite")
    options = parser.parse_args(arguments)

    started = time.perf_counter()
    runner = start_runner(MATMUL)
    startup_s = time.perf_counter() - started
    rehearsed = tuple(product.problem for product in REHEARSED[:2])
    suite = (rehearsed if runner.hardware.platform == "cpu" else REPEATED)[: options.first]
    timed = _timed_search(suite[0], runner, options.budget)
    print(
        f"{suite[0]}: {timed['trials']} trials in {timed['seconds']:.1f} s after a start of {startup_s:.1f} s",
        flush=True,
    )

    job = _timed_job(suite, runner, options.budget)
    print(f"{job['seconds_a_problem']:.1f} s a problem, {job['verify_seconds_a_record']:.1f} s a record", flush=True)
    pairs = [[_search(problem, runner, options.budget, seed) for seed in SEEDS] for problem in suite]
    runner.close()
    fresh = start_fresh()
    rows = [_row(problem, pair, fresh, options.rounds) for problem, pair in zip(suite, pairs, strict=True)]
    fresh.close()
    _print(rows)
    summary = {
        "seconds_64_trials": timed["seconds"],
        "seconds_with_startup": timed["seconds"] + startup_s,
        "seconds_a_problem_of_a_job": job["seconds_a_problem"],
        "verify_seconds_a_record": job["verify_seconds_a_record"],
        "winner_disagreement_worst": max(row["disagreement"] for row in rows),
        "trials": timed["trials"],
        "slots": runner.slots,
        "problems": len(rows),
    }
    Console().print(summary)
    write_result(
        "tuning_time",
        runner.hardware,
        summary=summary,
        rows=[timed, job, *rows],
        environment=environment(runner.environment, MATMUL),
    )


def _timed_search(problem: MatmulProblem, runner: Runner, budget: int) -> dict[str, Any]:
    steps: list[Progress] = []
    started = time.perf_counter()
    record = tune(MATMUL, problem, budget=budget, runner=runner, progress=steps.append)
    ended = [step for step in steps if step.last is not None]
    seconds = time.perf_counter() - started
    return {
        "problem": str(problem),
        "seconds": seconds,
        "trials": record.tried,
        # The rest of the time is the finalists': confirmed, and raced.
        "seconds_of_trials": ended[-1].elapsed_s,
        "trial_ended_s": [round(step.elapsed_s, 3) for step in ended],
        "failed": sum(step.last is not None and isinstance(step.last.outcome, Failure) for step in ended),
        "run_off_rounds": record.confidence.rounds,
        "notes": list(record.confidence.notes),
    }


def _timed_job(problems: Sequence[MatmulProblem], runner: Runner, budget: int) -> dict[str, Any]:
    """All problems searched as a job searches them, and what was found verified."""
    ended_s: dict[str, float] = {}
    records: list[Record] = []
    started = time.perf_counter()
    with Threads[MatmulProblem, Record](runner.searches, runner.close) as threads:
        for problem, record in threads.map(
            lambda problem: tune(MATMUL, problem, budget=budget, runner=runner), problems
        ):
            ended_s[str(problem)] = round(time.perf_counter() - started, 3)
            records.append(record)
    seconds = time.perf_counter() - started
    started = time.perf_counter()
    verdicts = list(reverify(records, operation=MATMUL, runner=runner))
    verify_seconds = time.perf_counter() - started
    return {
        "problem": f"a job of {len(problems)} problems",
        "searches_at_once": runner.searches,
        "seconds": seconds,
        "seconds_a_problem": seconds / len(problems),
        "ended_s": ended_s,
        "trials": sum(record.tried for record in records),
        "verify_seconds_a_record": verify_seconds / len(records),
        "verdicts": [verdict.state for verdict in verdicts],
    }


def _search(problem: MatmulProblem, runner: Runner, budget: int, seed: int) -> Record:
    record = tune(MATMUL, problem, budget=budget, runner=runner, seed=seed)
    best = record.winner
    print(f"{problem}, seed {seed}: {best.backend} {best.measurement.median_s * 1e6:.1f} us", flush=True)
    return record


def _row(problem: MatmulProblem, pair: Sequence[Record], fresh: Runner, rounds: int) -> dict[str, Any]:
    """Both winners timed in turns; the same winner twice agrees with itself and is timed once."""
    winners = [record.winner for record in pair]
    tasks = {
        str(seed): Task(MATMUL, problem, winner.backend, winner.schedule, REPETITIONS)
        for seed, winner in zip(SEEDS, winners, strict=True)
    }
    timed = time_in_rounds(fresh, tasks, rounds)
    if timed.failures:
        raise SystemExit(f"{problem}: {'; '.join(f'seed {seed}: {why}' for seed, why in timed.failures.items())}")
    first, second = (timed.rounds[name] for name in tasks)
    # Within a round both met the same clocks; the median ratio of the rounds is what is left.
    ratio = statistics.median(b.median_s / a.median_s for a, b in zip(first, second, strict=True))
    times = [timer.join(first), *([] if first == second else [timer.join(second)])]
    return {
        "problem": str(problem),
        "disagreement": max(ratio, 1 / ratio) - 1,
        "same_winner": len(times) == 1,
        "winners": [{"backend": winner.backend, "schedule": dict(winner.schedule)} for winner in winners],
        "winner_us": [times[0].median_s * 1e6, times[-1].median_s * 1e6],
        "searched_us": [winner.measurement.median_s * 1e6 for winner in winners],
        "run_off": [{"rounds": r.confidence.rounds, "tied": len(r.confidence.tied)} for r in pair],
        "samples_us": [[round(sample * 1e6, 3) for sample in taken.samples_s] for taken in times],
    }


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
