"""What an answer without a search is worth on shapes as users have them, measured: no records of such shapes are used.

    python benchmarks/no_search_drawn.py --seconds 540                 # as often as it says that problems are left
    python benchmarks/no_search_drawn.py --seconds 540 --searched 40   # searches some of them, too

Each problem (`drawn_problems.ANY_SHAPE`) is answered by `predict` from the shipped constants and records, without those
of problems with unaligned rows. The answer, the programs of XLA and of the vendor, and the model's first three
schedules are timed as a search times them, and not verified (`unverified`). The *gain* is over the fastest library, in
log time; the answers take a share of what the fastest of those three, or a search, gains.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import itertools
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import suite
import unverified
from drawn_problems import ANY_SHAPE, SMALL, drawn
from harness import RESULTS, ROOT, Kept, paced, told
from no_search import gain_taken

from scheduler.core import hardware as chips
from scheduler.core.hardware import Hardware, siblings
from scheduler.core.records import Calibration, Failure, Measurement, Record, Schedule
from scheduler.measure.build import Built
from scheduler.measure.pool import start_runner
from scheduler.model.constants import ProblemPoint, calibrations, model_of, residuals_of
from scheduler.model.pruning import prune
from scheduler.prediction.predict import Answer, predict
from scheduler.search import jobs
from scheduler.store import text_files
from scheduler.store.store import Store
from search_spaces import Operation, Problem, load
from search_spaces.problem import nbytes
from search_spaces.row_alignment import ROW_BYTES

# Schedules of the model that are timed.
FIRST = 3
# Problems whose libraries compile at once, before all their candidates are timed.
BATCH = 16
# A larger problem takes too much of a command's time or memory.
MOST_FLOPS, MOST_BYTES, MOST_MOVED = 1e12, 2**31, 2**34
# An answer below this share of the library's speed is printed with its reason.
LOSES = 0.97
# Products with fewer rows are limited by memory.
FEW_ROWS = 256
BUDGET = 16
# Seeds of the draws that the shipped constants are fitted to (ship_constants.py).
EVIDENCE = (0, 1)


def main(arguments: Sequence[str] | None = None) -> None:
    started = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="number of problems")
    parser.add_argument("--seed", type=int, default=2, help="of the draw; 0 and 1 are evidence")
    parser.add_argument("--searched", type=int, default=0, help=f"problems that {BUDGET} trials are spent on, too")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing that would end after so many")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 1) - 4), help="that compile")
    parser.add_argument("--small", action="store_true", help="a rehearsal, on a CPU")
    parser.add_argument("--cache", default=None, help="path or URL of the cache to search in")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "no_search_drawn", help="for the next command")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the result is written")
    parser.add_argument("--serve", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve is not None:
        unverified.serve(options.serve, plan)
        return
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # a search has a process of its own
    hardware, deadline = chips.detect(), started + options.seconds
    tasks = drawn(options.count, options.seed, SMALL if options.small else ANY_SHAPE, BUDGET, small_enough)
    measured(tasks, hardware, options.work / "timed.jsonl", deadline, options.processes)
    chosen = tasks[:: max(1, len(tasks) // options.searched)][: options.searched] if options.searched else []
    store = Store(options.cache or str(options.work / "cache.db"))
    if chosen:
        with contextlib.closing(start_runner(load("matmul"))) as pool:
            suite.search(chosen, pool, store, deadline)
    rows = [
        line | searched(task, hardware, store)
        for task, line in zip(tasks, kept_rows(tasks, options.work / "timed.jsonl"), strict=True)
        if line is not None
    ]
    figures = summary(rows)
    for line in losses(rows):
        print(line)
    for name, value in figures.items():
        print(f"{name}: {value}")
    name = "drawn_evidence" if options.seed in EVIDENCE else "no_search_drawn"
    unverified.conclude(name, tasks, hardware, rows, figures, options.results)


def small_enough(task: jobs.Task) -> bool:
    """Whether a problem is timed in a second or two."""
    problem = task.problem
    size = sum(map(nbytes, (*problem.operands(), *problem.results())))
    return (
        problem.library_flops("cuda") <= MOST_FLOPS
        and size <= MOST_BYTES
        and problem.library_bytes_moved + problem.library_bytes_read_again <= MOST_MOVED
    )


# ------------------------------------------------------------------------------
# What a process without a device does for a problem: it answers, ranks and compiles.


Evidence = tuple[Mapping[str, Calibration], Sequence[Record]]
_evidence: dict[tuple[str, str], Evidence] = {}


def evidence(name: str, hardware: Hardware) -> Evidence:
    """Returns the shipped constants and records of an operation, without searches of problems with unaligned rows.

    Times of the library alone (library_costs.py) are part of the constants, also with unaligned rows.
    """
    if (name, hardware.id) in _evidence:
        return _evidence[name, hardware.id]
    operation = load(name)
    here = {chip.id for chip in (hardware, *siblings(hardware))}
    records = [r for r in _records() if r.key.operation == name and r.key.hardware in here]
    hidden = {r.key.problem for r in records if not aligned(operation, r.key.problem)}
    fitted = {
        backend: dataclasses.replace(one, observations=tuple(o for o in one.observations if o.problem not in hidden))
        for backend, one in calibrations(name, hardware, shared_only=True).items()
    }
    records = [r for r in records if r.key.problem not in hidden]
    return _evidence.setdefault((name, hardware.id), (fitted, records))


def aligned(operation: Operation[Any], text: str) -> bool:
    with contextlib.suppress(ValueError):  # written by another version of the operation
        return operation.problem.from_canonical(text).row_alignment == ROW_BYTES
    return False


@functools.cache
def _records() -> Sequence[Record]:
    return text_files.read_records(ROOT / "records")


def plan(compiler: unverified.Compiler, request: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the answer for a problem, and the first schedules of the model with the files of their programs."""
    operation, hardware = load(request["operation"]), compiler.hardware
    problem = operation.problem.from_canonical(request["problem"])
    fitted, records = evidence(operation.name, hardware)
    answer = predict(operation, problem, hardware, records=records, fitted=fitted)
    candidates = first_schedules(operation, problem, hardware, fitted)
    mine = operation.kernel(answer.backend)
    if not unverified.on_device(mine) and (answer.backend, answer.schedule) not in [c[:2] for c in candidates]:
        candidates.append((answer.backend, answer.schedule, answer.predicted_s))
    return {
        "answer": told_answer(answer),
        "candidates": [
            {
                "backend": backend,
                "schedule": dict(schedule),
                "predicted_us": predicted_s * 1e6,
                "program": compiler.compile(operation.kernel(backend), problem, schedule),
            }
            for backend, schedule, predicted_s in candidates
        ],
    }


def told_answer(answer: Answer) -> dict[str, Any]:
    return {
        "backend": answer.backend,
        "schedule": dict(answer.schedule),
        "predicted_us": answer.predicted_s * 1e6,
        "predicted_xla_us": answer.library_s * 1e6,
        "otherwise": answer.otherwise,
        "faster": answer.faster,
        "reason": answer.reason,
    }


def first_schedules(
    operation: Operation[Any], problem: Problem, hardware: Hardware, fitted: Mapping[str, Calibration]
) -> list[tuple[str, Schedule, float]]:
    """Returns the schedules that the model expects to be fastest, of all kernels verified on the chip: `FIRST` of them.

    On a CPU, where none is verified, kernels are interpreted.
    """
    found: list[tuple[str, Schedule, float]] = []
    for kernel in operation.kernels_on(hardware.platform):
        verified = hardware.architecture in kernel.verified_on
        if unverified.on_device(kernel) or kernel.supports(problem, hardware.target):
            continue
        if not verified and not hardware.abilities.interpreted:
            continue
        model = model_of(operation, kernel, hardware, found=fitted)
        pruned = prune(kernel, problem, hardware, model, keep=FIRST, verified=verified)
        for row in range(len(pruned.points)):
            seconds = float(pruned.predicted_s[row])
            error, _ = residuals_of(operation, kernel, fitted).at(ProblemPoint(problem, seconds))
            found.append((kernel.backend, pruned.schedule(row), seconds * math.exp(error)))
    return sorted(found, key=lambda each: each[2])[:FIRST]


# ------------------------------------------------------------------------------
# The device.


def conditions(task: jobs.Task) -> dict[str, Any]:
    """What a row depends on; answers depend on the model, too: remove the file to measure those of another one."""
    versions = {kernel.backend: kernel.version for kernel in task.operation.kernels}
    return {"operation": task.operation.name, "problem": told(task.problem), "versions": versions}


def kept_rows(tasks: Sequence[jobs.Task], path: Path) -> list[dict[str, Any] | None]:
    kept = Kept(path)
    return [kept.get(conditions(task)) for task in tasks]


def measured(tasks: Sequence[jobs.Task], hardware: Hardware, path: Path, deadline: float, processes: int) -> None:
    """Adds a row for each problem to the file, but for those that time does not suffice for."""
    kept = Kept(path)
    left = [task for task, row in zip(tasks, kept_rows(tasks, path), strict=True) if row is None]
    if not left:
        return
    command = [sys.executable, str(Path(__file__).resolve())]
    compilers = unverified.Compilers(command, min(processes, len(left)), hardware)
    with contextlib.closing(compilers):
        plans = iter([compilers.ask({"operation": t.operation.name, "problem": t.problem.canonical()}) for t in left])
        for batch in paced([left[n : n + BATCH] for n in range(0, len(left), BATCH)], "batch", deadline):
            for task, row in _rows(batch, list(itertools.islice(plans, len(batch))), hardware):
                kept.add(row, conditions(task))


def _rows(
    tasks: Sequence[jobs.Task], plans: Sequence[Future[Any]], hardware: Hardware
) -> Iterator[tuple[jobs.Task, dict[str, Any]]]:
    """Yields the row of each problem of a batch that could be planned and drawn."""
    with unverified.exclusive(hardware):
        prepared = collections.deque(unverified.prepared(tasks, hardware))
        for task, planned in zip(tasks, plans, strict=True):
            operands, libraries = prepared.popleft()  # frees the operands after each problem
            found = planned.result()
            if found is None or isinstance(operands, Failure):
                print(f"{task}: {operands if isinstance(operands, Failure) else 'its process ended'}", flush=True)
                continue
            built: dict[str, Built | Failure] = dict(libraries)
            for number, one in enumerate(found["candidates"]):
                kernel = task.operation.kernel(one["backend"])
                built[f"pallas/{number}"] = unverified.loaded(one["program"], kernel, task.problem, one["schedule"])
            times = unverified.timed(task.problem, operands, built, hardware)
            yield task, row_of(task, found, times)


def row_of(task: jobs.Task, found: Mapping[str, Any], times: Mapping[str, Measurement | Failure]) -> dict[str, Any]:
    """Returns one line of the result."""
    us = {name: one.median_s * 1e6 for name, one in times.items() if isinstance(one, Measurement)}
    candidates = {f"pallas/{number}": one for number, one in enumerate(found["candidates"])}
    answer, backend = found["answer"], task.operation.library.backend
    same = [
        n for n, c in candidates.items() if (c["backend"], c["schedule"]) == (answer["backend"], answer["schedule"])
    ]
    name = same[0] if same else answer["backend"]
    libraries = {n: x for n, x in us.items() if n not in candidates}
    return {
        "operation": task.operation.name,
        "problem": told(task.problem),
        "row_alignment": task.problem.row_alignment,
        "few_rows": getattr(task.problem, "m", FEW_ROWS) < FEW_ROWS,
        "answer": answer,
        "answer_us": us.get(name),
        "xla_us": min((x for n, x in libraries.items() if n.partition("/")[0] == backend), default=None),
        "library_us": min(libraries.values(), default=None),
        "pallas_us": min((us[n] for n in list(candidates)[:FIRST] if n in us), default=None),
        "us": us,
        "candidates": {n: {k: x for k, x in c.items() if k != "program"} for n, c in candidates.items()},
        "failures": {n: str(one) for n, one in times.items() if isinstance(one, Failure)},
    }


def searched(task: jobs.Task, hardware: Hardware, store: Store) -> dict[str, Any]:
    """Returns what a search found, in microseconds; nothing if none was made."""
    record = suite.found(task.operation, task.problem, hardware, store)
    if record is None:
        return {}
    libraries = [e for e in record.entries if unverified.on_device(task.operation.kernel(e.backend))]
    return {
        "searched_us": record.winner.measurement.median_s * 1e6,
        "searched_library_us": min((e.measurement.median_s * 1e6 for e in libraries), default=None),
    }


# ------------------------------------------------------------------------------
# Figures.


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the figures that matter, of all operations and of each."""
    known = [judged(row) for row in rows if row["answer_us"] and row["library_us"]]
    both = [row | {"best_us": min(row["searched_us"], row["us"])} for row in known if "searched_us" in row]
    unaligned = [row for row in known if row["operation"] == "matmul" and row["row_alignment"] < ROW_BYTES]
    some = [row["xla_us"] / row["us"] for row in unaligned if not row["few_rows"]]
    few = [row["xla_us"] / row["us"] for row in unaligned if row["few_rows"]]
    return {
        "problems": len(rows),
        "unknown": len(rows) - len(known),
        "drawn_gain_taken": gain_taken(known) if known else None,
        "drawn_gain_taken_searched": gain_taken(both) if both else None,
        "searched": len(both),
        "drawn_worst": min((row["library_us"] / row["us"] for row in known), default=None),
        "drawn_losses": len(losses(rows)),
        "drawn_vs_library_geomean": geomean([row["library_us"] / row["us"] for row in known]),
        "unaligned_products": len(some),
        "unaligned_vs_xla_geomean": geomean(some),
        "unaligned_vs_xla_worst": min(some, default=None),
        "unaligned_few_rows_products": len(few),
        "unaligned_few_rows_vs_xla_worst": min(few, default=None),
        "by_operation": {
            name: {
                "problems": len(mine),
                "gain_taken": gain_taken(mine),
                "worst": min(row["library_us"] / row["us"] for row in mine),
            }
            for name in sorted({row["operation"] for row in known})
            for mine in [[row for row in known if row["operation"] == name]]
        },
    }


def judged(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row with the times that `gain_taken` compares: of the answer, and the best that is known."""
    times = [row["library_us"], row["answer_us"], row["pallas_us"]]
    return {**row, "us": row["answer_us"], "best_us": min(us for us in times if us is not None)}


def geomean(ratios: Sequence[float]) -> float | None:
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None


def losses(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a line for each answer that is slower than the library, or that has no time, with the answer's reason."""
    lines = []
    for row in rows:
        us, library_us, answer = row["answer_us"], row["library_us"], row["answer"]
        if library_us is None or (us is not None and library_us / us >= LOSES):
            continue
        speed = f"no time, {row['failures']}" if us is None else f"{library_us / us:.2f} of the library's speed"
        lines.append(
            f"{row['operation']} {row['problem']}: {answer['backend']} has {speed} ({us} us, predicted "
            f"{answer['predicted_us']:.1f}; library {library_us:.1f} us, XLA predicted "
            f"{answer['predicted_xla_us']:.1f}): {answer['reason']}"
        )
    return lines


if __name__ == "__main__":
    main()
