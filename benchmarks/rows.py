"""Softmax, RMS norm and SiLU-and-mul against XLA's program for what people write, interleaved, beside a copy.

    python benchmarks/rows.py --search --seconds 540     # as often as it says that problems are left
    python benchmarks/rows.py                            # searches what is left, then times what is left

Each problem of a job is searched first (or found in the cache). Then fresh processes, which chose nothing, verify the
best Pallas schedule, the final answer, the library's best program and XLA's for what people write (`WRITTEN`), and time
them in turns, and XLA's copy of as many bytes. Rates count each operand read once and each result written once. Ratios
are the time of what people write over ours: above one is faster.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import suite
from harness import posed
from independent import REPETITIONS, conditions, start_fresh, time_in_rounds, times_of
from jax import lax
from rich.console import Console
from rich.table import Table
from suite import answers, cell, conclude, found, search, time_all

from scheduler.core.hardware import Hardware
from scheduler.core.records import Record
from scheduler.measure.pool import start_runner
from scheduler.measure.runner import Runner, Task
from scheduler.search import jobs
from scheduler.search.jobs import Malformed
from scheduler.store.store import Store, default_url
from search_spaces import LibraryKernel, Operation, load
from search_spaces.rms_norm import ADD_RMS_NORM, EPS, RMS_NORM, AddRmsNormProblem, RmsNormProblem
from search_spaces.rowwise import XlaRows, rounded_at_each_step
from search_spaces.rowwise.problem import RowProblem
from search_spaces.silu_and_mul import SILU_AND_MUL, SiluAndMulProblem
from search_spaces.softmax import SOFTMAX, SoftmaxProblem

JOB = Path(__file__).with_suffix(".toml")
# Where the interpreter rehearses: a run of seconds whose times say nothing about the kernels.
CPU_SUITE: tuple[tuple[Operation[Any], RowProblem], ...] = (
    (SOFTMAX, SoftmaxProblem(64, 128, "float32")),
    (RMS_NORM, RmsNormProblem(33, 100, "float32")),
    (ADD_RMS_NORM, AddRmsNormProblem(33, 100, "float32")),
    (SILU_AND_MUL, SiluAndMulProblem(16, 256, "float32")),
)
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


class AsWritten(LibraryKernel[RowProblem]):
    """What people write, of operands as they come."""

    backend = "as_written"

    def __init__(self, write: Callable[..., Any]) -> None:
        self.write = write

    def tolerance(self, problem: RowProblem, schedule: Any) -> Any:
        return rounded_at_each_step(problem)

    def run(self, problem: RowProblem, schedule: Any, target: Any, /, *args: Any, **params: Any) -> Any:
        return self.write(*args)


class OwnXla(XlaRows[RowProblem]):
    """The library's programs, beside the one for what is written."""

    library = False


def _rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    """As flax.linen.RMSNorm: statistics and product in float32."""
    wide = x.astype(jnp.float32)
    return (wide * (lax.rsqrt(jnp.mean(lax.square(wide), axis=-1, keepdims=True) + EPS) * weight)).astype(x.dtype)


def _add_rms_norm(x: jax.Array, residual: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As a step of a residual stream."""
    total = x + residual
    return _rms_norm(total, weight), total


def _silu_and_mul(x: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    return jax.nn.silu(x[..., :half]) * x[..., half:]


def _written(operation: Operation[Any], write: Callable[..., Any]) -> Operation[RowProblem]:
    library = operation.library
    assert isinstance(library, XlaRows)
    others = [kernel for kernel in operation.kernels if not kernel.library]
    return Operation(
        f"{operation.name}_as_written", operation.problem, (AsWritten(write), OwnXla(library.plain), *others)
    )


# Workers find each by its name in this module. One bench times all of its kernels on the same operands.
SOFTMAX_WRITTEN = _written(SOFTMAX, jax.nn.softmax)
RMS_NORM_WRITTEN = _written(RMS_NORM, _rms_norm)
ADD_RMS_NORM_WRITTEN = _written(ADD_RMS_NORM, _add_rms_norm)
SILU_AND_MUL_WRITTEN = _written(SILU_AND_MUL, _silu_and_mul)
WRITTEN = {
    SOFTMAX.name: SOFTMAX_WRITTEN,
    RMS_NORM.name: RMS_NORM_WRITTEN,
    ADD_RMS_NORM.name: ADD_RMS_NORM_WRITTEN,
    SILU_AND_MUL.name: SILU_AND_MUL_WRITTEN,
}


def main(arguments: Sequence[str] | None = None) -> None:
    started = time.perf_counter()
    parser = suite.options(__doc__, "rows", budget=None, rounds=5)
    parser.add_argument("--search", action="store_true", help="only fill the cache")
    parser.add_argument("--only", default="", help="only problems whose text holds this, such as 'softmax'")
    options = parser.parse_args(arguments)
    deadline = started + options.seconds

    store = Store(options.cache or default_url())
    with contextlib.closing(start_runner(SOFTMAX)) as runner:
        chosen = [task for task in tasks(runner.hardware, options.budget) if options.only in str(task)]
        chosen = jobs.part(chosen, options.part)
        search(chosen, runner, store, deadline)
    if options.search:
        return
    with contextlib.closing(start_fresh()) as fresh:
        rows = measured(chosen, fresh, store, options.work, options.rounds, deadline)
    figures = summary(rows)
    _print(rows, fresh.hardware)
    Console().print(figures)
    done = {(row["operation"], posed(load(row["operation"]).problem, row["problem"])) for row in rows}
    missing = [str(task) for task in chosen if (task.operation.name, task.problem) not in done]
    operations = (SOFTMAX, RMS_NORM, ADD_RMS_NORM, SILU_AND_MUL)
    conclude("rows", fresh, rows, figures, *operations, missing=missing, chosen=options, partly=bool(options.only))


def tasks(hardware: Hardware, budget: int | None) -> list[jobs.Task]:
    """The suite."""
    if hardware.platform == "cpu":
        return [jobs.Task(operation, problem, budget or 4) for operation, problem in CPU_SUITE]
    parsed = jobs.parse(JOB.read_text())
    wrong = [str(task) for task in parsed if isinstance(task, Malformed)]
    assert not wrong, wrong
    return [
        jobs.Task(task.operation, task.problem, budget or task.budget)
        for task in parsed
        if not isinstance(task, Malformed)
    ]


def measured(
    chosen: Sequence[jobs.Task], fresh: Runner, store: Store, work: Path, rounds: int, deadline: float
) -> list[dict[str, Any]]:
    """A row for each problem that has an answer; those of an earlier command stand where nothing has changed.

    Raises:
      SystemExit: a schedule that a record names does not run, or is wrong.
    """
    cases = [
        (task, record)
        for task in chosen
        if (record := found(task.operation, task.problem, fresh.hardware, store)) is not None
    ]
    return time_all(
        cases,
        lambda case: conditions(
            WRITTEN[case[0].operation.name], case[0].problem, answers(case[0].operation, case[1]), fresh, rounds
        ),
        lambda case: row(*case, fresh, rounds),
        work / "judged.jsonl",
        deadline,
    )


def row(task: jobs.Task, record: Record, fresh: Runner, rounds: int) -> dict[str, Any]:
    """One line of the result.

    Raises:
      SystemExit: a schedule that the record names does not run, or is wrong.
    """
    operation, problem = task.operation, task.problem
    assert isinstance(problem, RowProblem)
    entries = {{"xla": "library"}.get(name, name): entry for name, entry in answers(operation, record).items()}
    written = WRITTEN[operation.name]
    same = written.problem(**vars(problem))
    candidates = {"xla": Task(written, same, written.library.backend, {}, REPETITIONS)} | {
        name: Task(written, same, entry.backend, entry.schedule, REPETITIONS) for name, entry in entries.items()
    }
    outcome = time_in_rounds(fresh, candidates, rounds)
    # As many elements read and written as the operation moves. Alone: other operands make a process give up these.
    elements = round(problem.bytes_moved / 2 / problem.itemsize)
    copied = CopyProblem(rows=max(1, elements // problem.columns), columns=problem.columns, dtype=problem.dtype)
    copy = time_in_rounds(fresh, {"copy": Task(COPY, copied, COPY.library.backend, {}, REPETITIONS)}, rounds)
    if failures := {**outcome.failures, **copy.failures}:
        raise SystemExit(f"{task}: {failures}")
    times = {name: outcome.times(name) for name in ("xla", "library", "pallas", "final")} | {"copy": copy.times("copy")}
    xla = times["xla"]
    assert xla is not None, "what fails has ended this"
    line: dict[str, Any] = {
        "operation": operation.name,
        "problem": str(problem),
        "columns": problem.columns,
        "dtype": problem.dtype,
        "operand_bytes": problem.operands()[0].size * problem.itemsize,
        "bytes": problem.bytes_moved,
        "final_backend": record.winner.backend,
        "trials": record.tried,
    }
    for name, measured in times.items():
        moved_bytes = copied.bytes_moved if name == "copy" else problem.bytes_moved
        entry = entries.get(name)
        line |= times_of(name, measured)
        line[f"{name}_tb_per_s"] = measured and moved_bytes / measured.median_s / 1e12
        line[f"{name}_vs_xla"] = measured and xla.median_s / measured.median_s
        line[f"{name}_schedule"] = entry and dict(entry.schedule)
    return line


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
        "add_rms_norm_vs_xla_worst": worst("pallas_vs_xla", of("add_rms_norm", rows)),
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
            *(cell(row[f"{name}_tb_per_s"], ".2f") for name in ("copy", "xla", "pallas", "final")),
            f"{row['final_tb_per_s'] / row['copy_tb_per_s']:.0%}",
            cell(row["pallas_vs_xla"], ".2f"),
            cell(row["final_vs_xla"], ".2f"),
            row["final_backend"],
        )
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
