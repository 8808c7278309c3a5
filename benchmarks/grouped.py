"""Grouped products beside XLA, JAX's and tokamax's kernels, torch, and a dense matmul of as many FLOPs, interleaved.

    python benchmarks/grouped.py --seconds 540                      # searches, then times; again, where points are left
    python benchmarks/grouped.py --points qwen3,decode --out out.json
    python benchmarks/grouped.py --points moe                       # only the layer of experts

Each point is searched first (or found in the cache) for the sizes of groups of any call. Then fresh processes, which
chose nothing, verify the best Pallas schedule, the final answer, XLA (where it takes at most 20 ms) and the rivals, and
time them in turns for the sizes of the point on the same buffers; of a rival the fastest configuration counts. torch
has its own process and takes part in the same rounds. Times are those of kernels on the device. Ratios are the other's
time over ours: above one is faster. `moe` is a layer of experts in plain JAX, by `scheduler.optimize` against
`jax.jit`, in wall time. The result is written of what there is, and the same command goes on from there.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grouped_moe
import grouped_torch
import numpy as np
import suite
from grouped_points import REHEARSED, Point, points
from grouped_rivals import FORWARD_AND_RIVALS, GATED_AND_RIVALS, RIVALS, WEIGHTS_AND_RIVALS
from grouped_torch import LAYOUTS, MEMORY_BYTES
from harness import Kept
from independent import REPETITIONS, Candidate, FreshProcesses, WithTorch, conditions, time_in_rounds, times_of
from rich.console import Console
from rich.table import Table
from suite import cell, conclude, found, search, time_all
from torch_process import TORCH, TorchProcess, available

from scheduler.core.arguments import named_backends
from scheduler.core.hardware import Hardware
from scheduler.core.records import Measurement, Record
from scheduler.measure.gpu import Gpu
from scheduler.measure.pool import start_runner
from scheduler.measure.runner import InProcess, Task
from scheduler.search import jobs
from scheduler.store.store import Store, default_url
from search_spaces import Operation
from search_spaces.matmul import MATMUL
from search_spaces.ragged_dot import GATED_RAGGED_DOT, RAGGED_DOT, RAGGED_DOT_WEIGHTS
from search_spaces.ragged_dot.jax_kernels import JaxRaggedDot
from search_spaces.ragged_dot.problem import GroupedProblem

OPERATIONS: Mapping[str, tuple[Operation[Any], Operation[Any]]] = {
    "forward": (RAGGED_DOT, FORWARD_AND_RIVALS),
    "rows": (RAGGED_DOT, FORWARD_AND_RIVALS),
    "decode": (RAGGED_DOT, FORWARD_AND_RIVALS),
    "weights": (RAGGED_DOT_WEIGHTS, WEIGHTS_AND_RIVALS),
    "gated": (GATED_RAGGED_DOT, GATED_AND_RIVALS),
}
DENSE, XLA, MOE = "dense", "xla", "moe"
OTHERS = (XLA, *RIVALS, TORCH, DENSE)
# XLA is left out where it takes longer.
MOST_XLA_S = 0.02
# A group with as many rows is limited by arithmetic.
MANY_ROWS = 256
# Of the time, for searches; the rest is for the comparison.
SEARCHING = 0.6


def main(arguments: Sequence[str] | None = None) -> None:
    started = time.perf_counter()
    options = _parser().parse_args(arguments)
    deadline = started + options.seconds
    skipped = frozenset(filter(None, options.skip.split(",")))
    if unknown := skipped - {*OTHERS, MOE}:
        raise SystemExit(f"--skip {', '.join(sorted(unknown))}: there are {', '.join((*OTHERS, MOE))}")
    cache = options.cache or default_url()
    store = Store(cache)

    with contextlib.closing(start_runner(RAGGED_DOT)) as runner:
        chosen = jobs.part(_chosen(runner.hardware, options.points), options.part)
        search(_tasks(chosen, skipped, options.budget), runner, store, started + SEARCHING * options.seconds)
        hardware = runner.hardware
    if options.search:
        return
    with contextlib.ExitStack() as stack:
        fresh = stack.enter_context(contextlib.closing(_fresh(skipped, options.torch)))
        rows = measured(chosen, fresh, store, options, skipped, deadline)
    if MOE not in skipped and (not options.points or MOE in options.points.split(",")):
        rows += grouped_moe.rows(cache, hardware, options.budget, Kept(options.work / "moe.jsonl"), deadline)
    _write(options.out, rows)
    _print(rows, hardware)
    Console().print(figures := summary(rows))
    done = {row["point"] for row in rows}
    missing = [str(point) for point in chosen if str(point) not in done]
    conclude(
        "grouped",
        fresh,
        rows,
        figures,
        FORWARD_AND_RIVALS,
        WEIGHTS_AND_RIVALS,
        GATED_AND_RIVALS,
        missing=missing,
        chosen=options,
        partly=bool(options.points or skipped),
        incomplete=True,
    )


def _parser() -> argparse.ArgumentParser:
    parser = suite.options(__doc__, "grouped", budget=24, rounds=5)
    parser.add_argument("--search", action="store_true", help="only fill the cache")
    parser.add_argument("--points", default="", help=f"parts of names of points, with commas between them, or {MOE}")
    parser.add_argument("--skip", default="", help=f"what is not timed: {', '.join((*OTHERS, MOE))}")
    parser.add_argument("--torch", default=sys.executable, help="a Python interpreter that has torch")
    parser.add_argument("--out", type=Path, help="a file for summary and rows, written after each point")
    return parser


def _chosen(hardware: Hardware, names: str) -> list[Point]:
    wanted = [name for name in names.split(",") if name]
    of = REHEARSED if hardware.platform == "cpu" else points()
    return [point for point in of if not wanted or any(name in str(point) for name in wanted)]


def _tasks(chosen: Sequence[Point], skipped: frozenset[str], budget: int) -> list[jobs.Task]:
    """Returns the searches that the points need, each once."""
    tasks: dict[tuple[str, Any], jobs.Task] = {}
    for point in chosen:
        operation, _ = OPERATIONS[point.kind]
        tasks[operation.name, point.tuned] = jobs.Task(operation, point.tuned, jobs.SearchOptions(budget))
        if _has_dense(point, skipped):
            tasks[MATMUL.name, point.dense] = jobs.Task(MATMUL, point.dense, jobs.SearchOptions(budget))
    return list(tasks.values())


def _has_dense(point: Point, skipped: frozenset[str]) -> bool:
    return DENSE not in skipped and point.dense is not None and point.kind != "decode"


# ------------------------------------------------------------------------------
# The runner of the comparison: fresh processes, and torch.


def _request(task: Task) -> dict[str, Any]:
    """Returns what torch is asked for a task."""
    p: Any = task.problem
    (boundaries,) = p.draws()
    shape = {"rows": p.rows, "k": p.k, "n": p.n, "groups": p.groups, "sizes": np.diff(boundaries).tolist()}
    return shape | dict(task.schedule)


def _fresh(skipped: frozenset[str], python: str) -> Any:
    """Returns the runner of the comparison; there is torch where it is installed and finds a GPU."""
    gpu = Gpu.wanted()
    if gpu is None:
        return InProcess()
    if TORCH in skipped or not available(python, "_grouped_mm"):
        return FreshProcesses(gpu, 1)
    fresh = FreshProcesses(dataclasses.replace(gpu, free_bytes=gpu.free_bytes - MEMORY_BYTES), 1)
    return WithTorch(fresh, TorchProcess(python, Path(grouped_torch.__file__)), _request)


# ------------------------------------------------------------------------------
# The comparison.


def ours(operation: Operation[Any]) -> frozenset[str]:
    """Returns the Pallas backends of ours: JAX's kernel is a rival."""
    return (named_backends(operation, "pallas") or frozenset()) - {JaxRaggedDot.backend}


def candidates(point: Point, record: Record, fresh: Any, skipped: frozenset[str]) -> dict[str, Candidate]:
    """By name: "xla", "pallas", "final", "jax 1", "tokamax 1", "torch 1" and so on, of those that there are."""
    operation, timed = OPERATIONS[point.kind]
    entries = {"pallas": record.best(ours(operation)), "final": record.winner}
    library = record.library_entry
    if library is not None and library.measurement.median_s <= MOST_XLA_S:
        entries[XLA] = library
    found = {name: Candidate(one.backend, one.version, one.schedule) for name, one in entries.items() if one}
    target = fresh.hardware.target
    for rival in (kernel for kernel in timed.kernels if kernel.backend in RIVALS):
        if rival.supports(point.problem, target) is None:
            space = rival.space(point.problem, target)
            for n, schedule in enumerate(space.schedules(space.legal()[0]), start=1):
                found[f"{rival.backend} {n}"] = Candidate(rival.backend, rival.version, vars(schedule))
    if isinstance(fresh, WithTorch) and point.kind in ("forward", "decode") and point.problem.dtype == "bfloat16":
        found |= {f"{TORCH} {n}": Candidate(TORCH, 0, {"layout": layout}) for n, layout in enumerate(LAYOUTS, start=1)}
    return {name: one for name, one in found.items() if name.split()[0] not in skipped}


def measured(
    chosen: Sequence[Point],
    fresh: Any,
    store: Store,
    options: argparse.Namespace,
    skipped: frozenset[str],
    deadline: float,
) -> list[dict[str, Any]]:
    """A row for each point that has an answer; those of an earlier command stand where nothing has changed."""
    cases = [
        (point, record)
        for point in chosen
        if (record := found(OPERATIONS[point.kind][0], point.tuned, fresh.hardware, store)) is not None
    ]
    path = options.work / "judged.jsonl"

    def conditions_of(case: tuple[Point, Record]) -> dict[str, Any]:
        point, _ = case
        entries = candidates(*case, fresh, skipped)
        of = conditions(OPERATIONS[point.kind][1], point.problem, entries, fresh, options.rounds)
        return of | {"kind": point.kind, "dense": _has_dense(point, skipped)}

    earlier = Kept(path)
    done = [kept for case in cases if (kept := earlier.get(conditions_of(case))) is not None]

    def timed(case: tuple[Point, Record]) -> dict[str, Any]:
        done.append(row(*case, fresh, store, options.rounds, skipped))
        _write(options.out, done)
        return done[-1]

    return time_all(cases, conditions_of, timed, path, deadline)


def row(point: Point, record: Record, fresh: Any, store: Store, rounds: int, skipped: frozenset[str]) -> dict[str, Any]:
    """One line of the result: times in microseconds, rates, ratios; what failed has no time, and says why."""
    operation, problem = OPERATIONS[point.kind][1], point.problem
    entries = candidates(point, record, fresh, skipped)
    tasks = {name: Task(operation, problem, one.backend, one.schedule, REPETITIONS) for name, one in entries.items()}
    outcome = time_in_rounds(fresh, tasks, rounds)
    times: dict[str, Measurement | None] = {}
    best: dict[str, str] = {}
    for name in ("pallas", "final", XLA, *RIVALS, TORCH):
        timed = {one: joined for one in entries if one.split()[0] == name and (joined := outcome.times(one))}
        best[name] = min(timed, key=lambda one: timed[one].median_s, default="")
        times[name] = timed.get(best[name])
    times[DENSE] = _dense(point, fresh, store, rounds) if _has_dense(point, skipped) else None
    line: dict[str, Any] = {
        "point": str(point),
        "kind": point.kind,
        "problem": str(problem),
        "flops": problem.flops,
        "bytes": problem.bytes_moved,
        "least_rows": least_rows(problem),
        "final_backend": record.winner.backend,
        "tuned_worst_over_mean": _ratio(record.winner.measurement.worst_s, record.winner.measurement.median_s),
        "trials": record.tried,
        "failures": {name: str(failure) for name, failure in outcome.failures.items()},
    }
    for name, joined in times.items():
        entry = entries.get(best.get(name, ""))
        line |= times_of(name, joined)
        line[f"{name}_tflops"] = joined and problem.flops / joined.median_s / 1e12
        line[f"{name}_schedule"] = entry and dict(entry.schedule)
    for mine in ("pallas", "final"):
        for other in OTHERS:
            line[f"{mine}_vs_{other}"] = _ratio(line[f"{other}_us"], line[f"{mine}_us"])
    peak = fresh.hardware.hbm_bytes_per_s
    pallas = times["pallas"]
    line["pallas_of_bandwidth"] = pallas and problem.bytes_moved / pallas.median_s / peak
    return line


def least_rows(problem: GroupedProblem) -> int:
    """Returns the rows of the smallest group that has any."""
    return min(int(size) for boundaries in problem.draws() for size in np.diff(boundaries) if size)


def _dense(point: Point, fresh: Any, store: Store, rounds: int) -> Measurement | None:
    """Times the tuned matmul, alone, because other operands make a process give up those of the point."""
    assert point.dense is not None
    record = found(MATMUL, point.dense, fresh.hardware, store)
    if record is None:
        return None
    best = record.winner
    task = Task(MATMUL, point.dense, best.backend, best.schedule, REPETITIONS)
    return time_in_rounds(fresh, {DENSE: task}, rounds).times(DENSE)


def _ratio(other: float | None, ours: float | None) -> float | None:
    return other / ours if other and ours else None


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | int | None]:
    """The figures to speak of, from rows as the result file keeps them; None where no row is meant.

    Ratios are of the best Pallas schedule. `fwd` includes decoding. `dx` and `dw` are the gradients of rows and of
    matrices. A dense matmul is compared where each group has at least `MANY_ROWS` rows: else the matrices take longer.
    """
    of = {kind: [row for row in rows if row.get("kind") == kind] for kind in OPERATIONS}
    timed = [row for each in of.values() for row in each]
    layer = {row["point"]: row for row in rows if row["point"].startswith(MOE)}
    forward = [*of["forward"], *of["decode"]]
    large = {kind: [row for row in each if row["least_rows"] >= MANY_ROWS] for kind, each in of.items()}

    def values(figure: str, chosen: Sequence[Mapping[str, Any]]) -> list[float]:
        return [row[figure] for row in chosen if row[figure]]

    def mean(figure: str, chosen: Sequence[Mapping[str, Any]]) -> float | None:
        ratios = values(figure, chosen)
        return statistics.geometric_mean(ratios) if ratios else None

    def worst(figure: str, chosen: Sequence[Mapping[str, Any]]) -> float | None:
        return min(values(figure, chosen), default=None)

    return {
        "points": len(timed),
        "points_without_pallas": sum(not row["pallas_us"] for row in timed),
        "fwd_vs_torch_geomean": mean("pallas_vs_torch", forward),
        "fwd_vs_torch_worst": worst("pallas_vs_torch", forward),
        "decode_vs_torch_worst": worst("pallas_vs_torch", of["decode"]),
        "vs_tokamax_geomean": mean("pallas_vs_tokamax", timed),
        "vs_tokamax_worst": worst("pallas_vs_tokamax", timed),
        "vs_jax_geomean": mean("pallas_vs_jax", timed),
        "fwd_of_dense_rate": mean("pallas_vs_dense", large["forward"]),
        "dx_of_dense_rate": mean("pallas_vs_dense", large["rows"]),
        "dw_of_dense_rate": mean("pallas_vs_dense", large["weights"]),
        "decode_of_bandwidth_worst": worst("pallas_of_bandwidth", of["decode"]),
        "final_vs_xla_worst": worst("final_vs_xla", timed),
        "moe_layer_forward": layer.get(grouped_moe.FORWARD, {}).get("optimize_vs_jit"),
        "moe_layer_backward": layer.get(grouped_moe.BACKWARD, {}).get("optimize_vs_jit"),
    }


def _write(out: Path | None, rows: Sequence[Mapping[str, Any]]) -> None:
    if out is not None:
        out.write_text(json.dumps({"summary": summary(rows), "rows": list(rows)}, indent=1) + "\n")


def _print(rows: Sequence[dict[str, Any]], hardware: Hardware) -> None:
    table = Table(title=f"grouped products on {hardware.kind}: microseconds")
    names = ("pallas", "final", *OTHERS)
    for column in ("point", *names, "TFLOP/s", "by"):
        table.add_column(column, justify="left" if column == "point" else "right")
    for row in rows:
        if "pallas_us" in row:
            times = (cell(row[f"{name}_us"], ".1f") for name in names)
            table.add_row(row["point"], *times, cell(row["pallas_tflops"], ".0f"), row["final_backend"])
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
