"""Whether programs of their own take the times that searches store: problems drawn at random, fresh processes.

    python benchmarks/external_clock.py --seconds 540     # as often as it says that problems are left
    python benchmarks/external_clock.py --count 8 --seed 1

Each problem (`drawn_problems`) is searched first, or found in the cache. Then fresh processes, each for several
problems, compile one program for the winner and one for the library. A program calls its kernel on several sets of
operands, one launch after another, so that no call finds its operands in the cache. If the search timed cached operands
("warm"), the program calls it on one set. The sets lie elsewhere in each round. CUPTI times the kernels of all calls
but the first ones of a round. The time of a call is the median, over rounds in all processes, of the mean in a round.
The *deviation* is this time over the mean of the stored samples, less one.
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
from scheduler.measure.buffers import copying, elsewhere, rotating_sets
from scheduler.measure.pool import start_runner
from scheduler.measure.timer import MOST_SETTLING
from scheduler.rewriting.interleaved import interleaves_on, sample_seconds
from scheduler.search import jobs
from scheduler.store.store import Store, default_url
from search_spaces import jax_compat, load
from search_spaces.space import cdiv

PROCESSES, ROUNDS = 3, 5
# Runs of a program in a round, on several sets of operands and on cached ones.
RUNS, WARM_RUNS = 4, 16
# What a process says.
COMPILED, TIMED = "compiled", "timed: "
# What counts as agreement.
WITHIN = 0.015
SEARCHING = 0.6
# Problems of one process.
BATCH = 20
Case = tuple[jobs.Task, Record]


def main(arguments: Sequence[str] | None = None) -> None:
    started = time.perf_counter()
    parser = suite.options(__doc__, "external_clock", budget=16, rounds=ROUNDS)
    parser.add_argument("--count", type=int, default=40, help="number of problems")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child is not None:
        timed(json.loads(options.child))
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
        processes = in_processes(requests)
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


def in_processes(requests: Sequence[Mapping[str, Any]]) -> list[list[dict[str, list[float]]]]:
    """Returns what `timed` returns in each of several processes, which compile at once and time in turn.

    Raises:
      SystemExit: a process failed; the message has its status.
    """
    command = [sys.executable, str(Path(__file__).resolve()), "--child", json.dumps(requests)]
    own = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with contextlib.ExitStack() as stack:
        open_one = functools.partial(subprocess.Popen, command, env=own, text=True)
        pipe = subprocess.PIPE
        running = [stack.enter_context(open_one(stdin=pipe, stdout=pipe)) for _ in range(PROCESSES)]
        for process in running:
            _said(process, COMPILED)
        return [json.loads(_said(process, TIMED, asked="go")) for process in running]


def _said(process: subprocess.Popen[str], word: str, asked: str | None = None) -> str:
    """Returns the rest of the next line that begins with `word`; sends a line before if `asked`."""
    assert process.stdin is not None
    assert process.stdout is not None
    if asked:
        print(asked, file=process.stdin, flush=True)
    for line in process.stdout:
        if line.startswith(word):
            return line.removeprefix(word)
    raise SystemExit(f"a process that compiles and times ended with status {process.wait()}")


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


def timed(requests: Sequence[Mapping[str, Any]]) -> None:
    """Compiles each candidate of each request, says so, waits for a line, and prints the seconds of calls as JSON.

    Library programs are compiled under the lock of the device, because XLA tries algorithms on it.
    """
    every = [(n, name) for n, one in enumerate(requests) for name in one["candidates"]]
    programs: list[dict[str, Any]] = [{} for _ in requests]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        operands = list(threads.map(lambda one: jax.block_until_ready(_sets(one)[0].inputs(0)), requests))
        for libraries in (False, True):
            with interleaves_on(jax.devices()[:1]) if libraries else contextlib.nullcontext():
                chosen = [(n, name) for n, name in every if _kernel(requests[n], name).library == libraries]
                compiled = threads.map(lambda each: _compiled(requests[each[0]], each[1]), chosen)
                for (n, name), program in zip(chosen, compiled, strict=True):
                    programs[n][name] = program
    print(COMPILED, flush=True)
    sys.stdin.readline()
    with interleaves_on(jax.devices()[:1]):
        print(TIMED + json.dumps(list(map(_seconds, requests, programs, operands))), flush=True)


def _sets(one: Mapping[str, Any]) -> tuple[Any, int]:
    """Returns the problem of a request, and the number of sets of its operands."""
    problem = load(one["operation"]).problem.from_canonical(one["problem"])
    return problem, rotating_sets(problem, chips.detect()) if one["l2"] == "cold" else 1


def _kernel(one: Mapping[str, Any], name: str) -> Any:
    return load(one["operation"]).kernel(one["candidates"][name]["backend"])


def _compiled(one: Mapping[str, Any], name: str) -> Any:
    """Returns a program of a candidate that calls it on each set of operands."""
    kernel, target, (problem, many) = _kernel(one, name), chips.detect().target, _sets(one)
    schedule = kernel.space(problem, target).decode(one["candidates"][name]["schedule"])
    run = jax.jit(functools.partial(kernel.run, problem, schedule, target))

    def each_set(sets: Any) -> list[Any]:
        return [run(*operands) for operands in sets]

    return jax.jit(each_set).lower([problem.operands()] * many).compile()


def _seconds(one: Mapping[str, Any], programs: Mapping[str, Any], operands: tuple[Any, ...]) -> dict[str, list[float]]:
    """Returns the seconds of a call in each round, of each program."""
    _, many = _sets(one)
    copy = copying(operands)
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    order = random.Random()
    for _ in range(one["rounds"]):
        with elsewhere(order):
            sets = jax.block_until_ready([copy(operands) for _ in range(many)])
        for name in order.sample(list(programs), len(programs)):
            call = functools.partial(programs[name], sets)
            if jax.default_backend() == "cpu":
                found = [sample_seconds(call, 1, 1)]
            else:
                runs, settling = WARM_RUNS if one["l2"] == "warm" else RUNS, cdiv(MOST_SETTLING, many)
                found = jax_compat.device_seconds(call, settling + runs)[settling:]
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
