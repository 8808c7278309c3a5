"""How well on-chip memory and times of TPU kernels are predicted, judged by the TPU's own compiler: no TPU is needed.

    python benchmarks/tpu_fit.py --chips v5e v6e --operations matmul softmax --seconds 1200

For each chip and each operation with such a kernel, schedules are drawn over several problems, ragged ones among them:
those that the model ranks first, legal ones at random, and some that ask for a little more memory than they may have.
Each is compiled for the chip. Memory is compared byte by byte; what the model calls legal and the compiler refuses is a
false accept, the reverse a false reject. Times are compared with the compiler's static estimate of cycles, which is no
measurement: Kendall's tau of each problem, and how near the top prediction comes to the best estimate among the
schedules drawn.

What is compiled is kept (`--work`) and not compiled again; predictions are those of today's model. A command takes as
long as `--seconds`; another goes on. The result is written of what is there.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import queue
import random
import statistics
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np
import numpy.typing as npt
from harness import ROOT, Kept, environment, write_result
from rich.console import Console
from rich.table import Table
from scipy.stats import kendalltau
from tpu_compiler import Compiler
from tpu_problems import PROBLEMS

from scheduler.contrib.tpu import estimate
from scheduler.contrib.tpu.chips import TPUS
from scheduler.core.hardware import Hardware, find
from scheduler.core.records import Environment
from scheduler.model.cost import CostModel
from scheduler.model.pruning import onchip_demand, onchip_limit
from scheduler.model.traffic import block_count, column
from search_spaces import Operation, Problem, load
from search_spaces.kernel import Kernel
from search_spaces.space import Columns

BACKEND = "mosaic_tpu"
SCHEDULES = 200  # of each operation on each chip
FIRST, JUST_ABOVE = 8, 0.2  # those that the model ranks first; the share of those that ask for too much
# The estimator goes through a grid step by step, 5 to 40 ms each.
MOST_STEPS = 128
ABOVE = 1.5  # times the limit, at most

Array = npt.NDArray[np.float64]
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem's schedules on one chip, in the order of the kernel's space, with what is predicted of each.

    Attributes:
      demand, limit: on-chip bytes that the model prunes by, spills at the least included, and those it may have.
      onchip_bytes: without spills.
      predicted_s: the model's time.
    """

    operation: Operation[Any]
    kernel: Kernel[Any, Any]
    problem: Problem
    hardware: Hardware
    points: Columns
    demand: Array
    limit: Array
    onchip_bytes: Array
    predicted_s: Array

    def schedule(self, index: int) -> dict[str, Any]:
        return self.kernel.space(self.problem, self.hardware.target).encode(self.points.row(index))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", default=[row.kind for row in TPUS])
    parser.add_argument("--operations", nargs="+", default=list(PROBLEMS))
    parser.add_argument("--schedules", type=int, default=SCHEDULES, help="of each operation on each chip")
    parser.add_argument("--seconds", type=float, default=3600.0, help="that compiling may take; 0 judges what is kept")
    parser.add_argument("--workers", type=int, default=2, help="processes that compile")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build" / "tpu_fit", help="where compiled programs are kept"
    )
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + options.seconds
    path = options.work / "compiled.jsonl"
    operations = [one for name in options.operations if BACKEND in (one := load(name)).backends]
    for hardware in map(find, options.chips):
        if (reason := estimate.missing_compiler(hardware)) is not None:
            raise SystemExit(reason)
        cases = [case for one in operations for case in cases_of(one, hardware)]
        drawn = [
            each
            for one in operations
            for each in draw([case for case in cases if case.operation is one], options.schedules)
        ]
        compile_all(drawn, Kept(path), options.workers, deadline)
        rows = judged(drawn, Kept(path))
        if not rows:
            continue
        summary = summarise(rows)
        show(hardware, summary)
        made = Environment(
            jax=jax.__version__,
            jaxlib=jaxlib.__version__,
            driver=f"libtpu {libtpu()}",
            date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        )
        write_result("tpu_fit", hardware, summary=summary, rows=rows, environment=environment(made, *operations))


def libtpu() -> str:
    return importlib.metadata.version("libtpu")


def cases_of(operation: Operation[Any], hardware: Hardware) -> Iterator[Case]:
    """Those of its problems that its kernel can do on this chip, with the part of each space that is soon estimated."""
    kernel, model = operation.kernel(BACKEND), CostModel(hardware)
    for fields in PROBLEMS[operation.name]:
        problem = operation.problem(**fields)
        if kernel.supports(problem, hardware.target):
            continue
        points, _ = kernel.space(problem, hardware.target).legal()
        footprint = kernel.footprint(problem, points, hardware.target)
        assert footprint is not None, "a kernel for TPUs predicts its memory"
        grid = block_count(footprint) * column(footprint.steps) * np.ones(len(points))
        few = points.take(grid <= MOST_STEPS)
        if not len(few):
            continue
        footprint = kernel.footprint(problem, few, hardware.target)
        assert footprint is not None
        ones = np.ones(len(few))
        yield Case(
            operation,
            kernel,
            problem,
            hardware,
            few,
            onchip_demand(footprint) * ones,
            onchip_limit(footprint, hardware) * ones,
            column(footprint.onchip_bytes) * ones,
            model.seconds(footprint) * ones,
        )


def draw(cases: Sequence[Case], count: int) -> list[tuple[Case, int]]:
    """So many schedules of an operation, or all there are, from its problems in turn: a longer draw begins with this.

    What a problem's schedules are drawn by is its own, so that another problem in the table changes none of them; what
    the model ranks first is of today's.
    """
    queues = [list(_of(case)) for case in cases]
    found: list[tuple[Case, int]] = []
    for turn in range(max(map(len, queues), default=0)):
        for case, order in zip(cases, queues, strict=True):
            if turn < len(order) and len(found) < count:
                found.append((case, order[turn]))
    return found


def _of(case: Case) -> Iterator[int]:
    """All that may be drawn of a case: a few that ask for too much among legal ones, the model's first among those."""
    rng = random.Random(f"{case.operation.name} {case.problem.canonical()}")
    legal = np.flatnonzero(case.demand <= case.limit).tolist()
    above = np.flatnonzero((case.demand > case.limit) & (case.demand <= ABOVE * case.limit)).tolist()
    first = sorted(legal, key=lambda index: case.predicted_s[index])[:FIRST]
    rng.shuffle(legal)
    rng.shuffle(above)
    others = [index for index in legal if index not in first]
    while first or others or above:
        kinds: list[tuple[list[int], float]] = [(above, JUST_ABOVE), (first, 0.5), (others, 1.0)]
        chosen = rng.random()
        yield next((kind for kind, share in kinds if kind and chosen < share), first or others or above).pop(0)


def compile_all(drawn: Sequence[tuple[Case, int]], kept: Kept, workers: int, deadline: float) -> None:
    """Compiles what is not kept yet, as far as there is time."""
    waiting: queue.SimpleQueue[Row] = queue.SimpleQueue()
    left = [asked for case, index in drawn if kept.get(asked := conditions(case, index)) is None]
    for asked in left:
        waiting.put(asked)
    lock, done = threading.Lock(), 0

    def work(hardware: Hardware) -> None:
        nonlocal done
        compiler = Compiler(hardware)
        try:
            while time.monotonic() < deadline:
                try:
                    asked = waiting.get_nowait()
                except queue.Empty:
                    return
                said = compiler.ask(asked)
                with lock:
                    kept.add({"compiled": said}, asked)
                    done += 1
                    if done % 20 == 0:
                        print(f"{hardware.kind}: compiled {done} of {len(left)}", flush=True)
        finally:
            compiler.close()

    threads = [threading.Thread(target=work, args=(drawn[0][0].hardware,)) for _ in range(min(workers, len(left)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def conditions(case: Case, index: int) -> Row:
    """All that the answer depends on."""
    return {
        "chip": case.hardware.kind,
        "operation": case.operation.name,
        "backend": BACKEND,
        "version": case.kernel.version,
        "problem": case.problem.canonical(),
        "schedule": case.schedule(index),
        "jax": jax.__version__,
        "libtpu": libtpu(),
    }


def judged(drawn: Iterable[tuple[Case, int]], kept: Kept) -> list[Row]:
    """A row for each that is compiled: what was predicted, and what the compiler says."""
    return [
        {
            "operation": case.operation.name,
            "problem": str(case.problem),
            "schedule": case.schedule(index),
            "predicted_bytes": int(case.onchip_bytes[index]),
            "demand_bytes": int(case.demand[index]),
            "limit_bytes": int(case.limit[index]),
            "predicted_s": float(case.predicted_s[index]),
            **found["compiled"],
        }
        for case, index in drawn
        if (found := kept.get(conditions(case, index))) is not None
    ]


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Figures of all operations, and of each under its name."""
    names = dict.fromkeys(row["operation"] for row in rows)
    return {
        **figures(rows),
        "operations": {name: figures([row for row in rows if row["operation"] == name]) for name in names},
    }


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """Those of these rows; None where none has what a figure is made of."""
    fits = [row for row in rows if "onchip_bytes" in row]
    refused = [row for row in rows if "refused_bytes" in row]
    errors = [row["onchip_bytes"] - row["spill_bytes"] - row["predicted_bytes"] for row in fits]
    order = [found for case in _problems(fits) if (found := ranking(case)) is not None]

    def median(name: str) -> float | None:
        return statistics.median(each[name] for each in order) if order else None

    return {
        "schedules": len(rows),
        "false_accepts": sum(row["demand_bytes"] <= row["limit_bytes"] for row in refused),
        "false_rejects": sum(row["demand_bytes"] > row["limit_bytes"] for row in fits),
        "failed": sum("failed" in row for row in rows),
        "bytes_equal": sum(error == 0 for error in errors),
        "bytes_compared": len(errors),
        "largest_error_bytes": max(errors, key=abs, default=None),
        "problems_ranked": len(order),
        "tau_median": median("tau"),
        "tau_worst": min((each["tau"] for each in order), default=None),
        "first_choice_median": median("first_choice"),
        "best_of_8_median": median("best_of_8"),
    }


def _problems(rows: Sequence[Row]) -> list[list[Row]]:
    """Legal ones with an estimate, of each problem of each operation."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.get("cycles") and row["demand_bytes"] <= row["limit_bytes"]:
            found.setdefault((row["operation"], row["problem"]), []).append(row)
    return list(found.values())


def ranking(rows: Sequence[Row]) -> dict[str, float] | None:
    """How the model orders the schedules of one problem; None where they are too few, or all the same to it."""
    predicted = np.array([row["predicted_s"] for row in rows])
    cycles = np.array([row["cycles"] for row in rows], dtype=float)
    if len(rows) < FIRST or np.ptp(predicted) == 0 or np.ptp(cycles) == 0:
        return None
    order = np.argsort(predicted, kind="stable")
    return {
        "tau": float(kendalltau(predicted, cycles).statistic),
        "first_choice": float(cycles.min() / cycles[order[0]]),
        "best_of_8": float(cycles.min() / cycles[order[:FIRST]].min()),
    }


def show(hardware: Hardware, summary: Mapping[str, Any]) -> None:
    counts, shares = (
        ("schedules", "false_accepts", "false_rejects", "failed"),
        ("tau_median", "first_choice_median", "best_of_8_median"),
    )
    titles = ("", "schedules", "false accepts", "false rejects", "failed", "bytes equal", "tau", "first", "best of 8")
    table = Table(*titles, title=hardware.kind)
    for name, of in {**summary["operations"], "all": summary}.items():
        equal = f"{of['bytes_equal']} of {of['bytes_compared']}"
        shown = ("" if of[share] is None else f"{of[share]:.2f}" for share in shares)
        table.add_row(name, *(str(of[count]) for count in counts), equal, *shown)
    Console().print(table)


if __name__ == "__main__":
    main()
