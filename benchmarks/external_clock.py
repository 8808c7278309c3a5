"""Whether programs of their own take the times that searches store: problems drawn at random, fresh processes.

    python benchmarks/external_clock.py --seconds 540     # as often as it says that problems are left
    python benchmarks/external_clock.py --count 8 --seed 1

Each problem (`drawn_problems`) is searched first, or found in the cache. Then fresh processes, each for several
problems, compile one program for the winner and one for the library. A program calls its kernel on several sets of
operands, one launch after another, so that no call finds its operands in the cache. If the search timed cached operands
("warm"), the program calls it on one set. CUPTI times its kernels. The *deviation* is the time of a call over the mean
of the stored samples. The time of a call is the median, over rounds in all processes, of the mean in a round.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import suite
from drawn_problems import KINDS, SMALL, drawn
from harness import Kept, paced, told
from rich.console import Console
from rich.table import Table

from scheduler.core import hardware as chips
from scheduler.core.records import Record
from scheduler.functions.comparison import interleaves_on, sample_seconds
from scheduler.measure.buffers import copying, rotating_sets
from scheduler.measure.pool import start_runner
from scheduler.search import jobs
from scheduler.store.store import Store, default_url
from search_spaces import jax_compat, load

PROCESSES, ROUNDS = 3, 5
# In a round, a program runs so often, and calls its kernel at least so often in all.
RUNS, CALLS = 4, 16
# What counts as agreement.
WITHIN = 0.015
SEARCHING = 0.6
# Problems of one process.
BATCH = 10
Case = tuple[jobs.Task, Record]


def main(arguments: Sequence[str] | None = None) -> None:
    started = time.perf_counter()
    parser = suite.options(__doc__, "external_clock", budget=16, rounds=ROUNDS)
    parser.add_argument("--count", type=int, default=40, help="number of problems")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child is not None:
        print(json.dumps(timed(json.loads(options.child))))
        return
    store = Store(options.cache or default_url())
    with contextlib.closing(start_runner(load("matmul"))) as runner:
        kinds = SMALL if runner.hardware.platform == "cpu" else KINDS
        every = drawn(options.count, options.seed, kinds, options.budget)
        chosen = jobs.part(every, options.part)
        suite.search(chosen, runner, store, started + SEARCHING * options.seconds)
        cases = [
            (task, record)
            for task in chosen
            if (record := suite.found(task.operation, task.problem, runner.hardware, store)) is not None
        ]
        rows = all_rows(cases, options.rounds, options.work / "timed.jsonl", started + options.seconds)
        figures = summary(rows)
        _print(rows)
        Console().print(figures)
        done = {(row["operation"], row["problem"]) for row in rows}
        missing = [str(task) for task in every if (task.operation.name, told(task.problem)) not in done]
        operations = {task.operation.name: task.operation for task in every}
        suite.conclude(
            "external_clock", runner, rows, figures, *operations.values(), missing=missing, chosen=options, partly=False
        )


def candidates(record: Record) -> dict[str, dict[str, Any]]:
    """Returns what is timed, by name: the winner, and the library if another candidate won."""
    entries = {"winner": record.winner, "library": record.library_entry}
    return {
        name: {"backend": entry.backend, "schedule": dict(entry.schedule)}
        for name, entry in entries.items()
        if entry is not None and (name == "winner" or entry is not record.winner)
    }


def all_rows(cases: Sequence[Case], rounds: int, path: Path, deadline: float) -> list[dict[str, Any]]:
    """Returns a row for each case, but for those that time did not suffice for; the file keeps each."""
    kept = Kept(path)
    conditions = [request(*case, rounds) | {"date": case[1].environment.date} for case in cases]
    left = [n for n in range(len(cases)) if kept.get(conditions[n]) is None]
    for batch in paced([left[n : n + BATCH] for n in range(0, len(left), BATCH)], "time", deadline):
        requests = [request(*cases[n], rounds) for n in batch]
        processes = [_in_a_process(requests) for _ in range(PROCESSES)]
        for n, samples in zip(batch, zip(*processes, strict=True), strict=True):
            kept.add(row(*cases[n], samples), conditions[n])
    kept = Kept(path)
    return [found for each in conditions if (found := kept.get(each)) is not None]


def request(task: jobs.Task, record: Record, rounds: int) -> dict[str, Any]:
    return {
        "operation": task.operation.name,
        "problem": task.problem.canonical(),
        "candidates": candidates(record),
        "l2": record.winner.measurement.l2,
        "rounds": rounds,
    }


def _in_a_process(requests: Sequence[Mapping[str, Any]]) -> list[dict[str, list[float]]]:
    """Returns what `timed` returns for each request; raises a SystemExit with the message of a process that fails."""
    command = [sys.executable, str(Path(__file__).resolve()), "--child", json.dumps(requests)]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"a process failed:\n{ran.stderr}")
    found: list[dict[str, list[float]]] = json.loads(ran.stdout.splitlines()[-1])
    return found


def row(task: jobs.Task, record: Record, processes: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, Any]:
    """One line of the result, from the seconds of each process, by candidate."""
    stored = {"winner": record.winner, "library": record.library_entry}
    line: dict[str, Any] = {
        "operation": task.operation.name,
        "problem": told(task.problem),
        "backend": record.winner.backend,
        "schedule": dict(record.winner.schedule),
        "l2": record.winner.measurement.l2,
    }
    for name in processes[0]:
        samples, entry = [each[name] for each in processes], stored[name]
        assert entry is not None
        seconds = statistics.median(x for each in samples for x in each)
        stored_s = statistics.fmean(entry.measurement.samples_s)
        line |= {
            f"{name}_us": seconds * 1e6,
            f"{name}_stored_us": stored_s * 1e6,
            f"{name}_stored_median_us": entry.measurement.median_s * 1e6,
            f"{name}_deviation": seconds / stored_s - 1,
            f"{name}_samples_us": [[round(x * 1e6, 3) for x in each] for each in samples],
        }
    return line


def timed(requests: Sequence[Mapping[str, Any]]) -> list[dict[str, list[float]]]:
    """Returns the seconds of a call of each candidate of each request, in each round, in this process."""
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        programs = list(threads.map(_compiled, requests))
    with interleaves_on(jax.devices()[:1]):
        return [_seconds(one, program) for one, program in zip(requests, programs, strict=True)]


def _sets(one: Mapping[str, Any]) -> tuple[Any, int]:
    """Returns the problem of a request, and the number of sets of its operands."""
    problem = load(one["operation"]).problem.from_canonical(one["problem"])
    return problem, rotating_sets(problem, chips.detect()) if one["l2"] == "cold" else 1


def _compiled(one: Mapping[str, Any]) -> dict[str, Any]:
    operation, target, (problem, many) = load(one["operation"]), chips.detect().target, _sets(one)
    programs = {}
    for name, candidate in one["candidates"].items():
        kernel = operation.kernel(candidate["backend"])
        schedule = kernel.space(problem, target).decode(candidate["schedule"])

        run = jax.jit(functools.partial(kernel.run, problem, schedule, target))

        def each_set(sets: Any, run: Any = run) -> list[Any]:
            return [run(*operands) for operands in sets]

        programs[name] = jax.jit(each_set).lower([problem.operands()] * many).compile()
    return programs


def _seconds(one: Mapping[str, Any], programs: Mapping[str, Any]) -> dict[str, list[float]]:
    problem, many = _sets(one)
    operands = problem.inputs(0)
    copy = copying(operands)
    sets = [copy(operands) for _ in range(many)]
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    order = random.Random(0)
    for _ in range(one["rounds"]):
        for name in order.sample(list(programs), len(programs)):
            call = functools.partial(programs[name], sets)
            on_cpu = jax.default_backend() == "cpu"
            runs = max(RUNS, CALLS // many)
            found = [sample_seconds(call, 1, 1)] if on_cpu else jax_compat.device_seconds(call, runs)
            seconds[name].append(statistics.fmean(found) / many)
    return seconds


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | int | None]:
    """Returns the number of problems, those that agree, and the deviations of winners."""
    deviations = [row["winner_deviation"] for row in rows]
    beaten = [row for row in rows if "library_us" in row and row["library_us"] < row["winner_us"]]
    return {
        "problems": len(rows),
        "within": WITHIN,
        "agree": sum(abs(x) <= WITHIN for x in deviations),
        "deviation_median": statistics.median(deviations) if rows else None,
        "deviation_least": min(deviations, default=None),
        "deviation_most": max(deviations, default=None),
        "library_is_faster": len(beaten),
        "final_vs_library_worst": min(
            (row["library_us"] / row["winner_us"] for row in rows if "library_us" in row), default=None
        ),
    }


def _print(rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table(title="microseconds of a call: stored, and in programs of fresh processes")
    for column in ("problem", "winner", "stored", "external", "deviation", "library", "external"):
        table.add_column(column, justify="left" if column == "problem" else "right")
    for row in rows:
        library = [suite.cell(row.get(f"library_{name}"), ".1f") for name in ("stored_us", "us")]
        times = [f"{row[f'winner_{name}']:.1f}" for name in ("stored_us", "us")]
        table.add_row(
            f"{row['operation']} {row['problem']}", row["backend"], *times, f"{row['winner_deviation']:+.1%}", *library
        )
    Console(width=180).print(table)


if __name__ == "__main__":
    main()
