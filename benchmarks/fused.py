"""A product and its epilogue in one call, against XLA's program for the same thing as people write it.

    python benchmarks/fused.py --search --seconds 540     # as often as it says that problems are left
    python benchmarks/fused.py                            # searches and times what is left, and writes the result

People write ``jax.nn.gelu(a @ b + bias) + residual`` in the operands' dtype, which rounds after each operation;
`tuned_matmul(a, b, bias=, activation=, residual=)` rounds once. Fresh processes, which chose nothing, time the best
Pallas schedule, the final answer and XLA's program for what is written, in turns and on the same operands. Ratios are
the written program's time over ours: above one, ours is faster.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import suite
from harness import posed
from independent import REPETITIONS, conditions, start_fresh, time_in_rounds, times_of
from jax import lax
from problems import FUSED, FUSED_REHEARSED, Product
from rich.console import Console
from rich.table import Table
from suite import answers, cell, conclude, found, search, time_all

from scheduler.core.records import Record
from scheduler.measure.pool import start_runner
from scheduler.measure.runner import Runner, Task
from scheduler.model.cost import CostModel
from scheduler.search import jobs
from scheduler.store.store import Store, default_url
from search_spaces import Library, LibraryKernel, Operation, Target
from search_spaces.matmul import MATMUL, MatmulProblem
from search_spaces.matmul.xla import XlaMatmul
from search_spaces.problem import Tolerance

ACTIVATIONS = {"": lambda x: x, "relu": jax.nn.relu, "gelu": jax.nn.gelu, "silu": jax.nn.silu}
AS_WRITTEN = "as_written"


@dataclasses.dataclass(frozen=True)
class WrittenProblem(MatmulProblem):
    """The same problem, of which an answer may round after the product, the bias, the activation and the residual."""

    def tolerance(self) -> Tolerance:
        # Values are standard normal, so within 6; a rounding is off by half of eps of them.
        exact = super().tolerance()
        return Tolerance(absolute=exact.absolute + 4 * 6 * exact.relative / 2, relative=exact.relative)


class AsWritten(LibraryKernel[MatmulProblem]):
    """The expression in the result's dtype."""

    backend = AS_WRITTEN

    def run(self, problem: MatmulProblem, schedule: Library, target: Target, /, *args: Any, **params: Any) -> jax.Array:
        a, b, bias, residual = problem.named(args)
        out = problem.result().dtype
        product = lax.dot_general(a, b, problem.dimension_numbers, preferred_element_type=out)
        sums = product if bias is None else product + bias[..., None, :]
        activated: jax.Array = ACTIVATIONS[problem.activation](sums)
        return (activated if residual is None else activated + residual).astype(out)


class OwnXla(XlaMatmul):
    """XLA's program for a fused problem, beside the one for what is written."""

    library = False


# One bench times all of them on the same operands.
WRITTEN = Operation(
    "matmul_as_written",
    WrittenProblem,
    (AsWritten(), OwnXla(), *(kernel for kernel in MATMUL.kernels if not kernel.library)),
)


def main(arguments: Sequence[str] | None = None) -> None:
    started = time.perf_counter()
    options = _options(arguments)
    deadline = started + options.seconds
    store = Store(options.cache or default_url())
    with contextlib.closing(start_runner(WRITTEN)) as runner:
        products = jobs.part(FUSED_REHEARSED if runner.hardware.platform == "cpu" else FUSED, options.part)
        search(
            [jobs.Task(MATMUL, p.problem, jobs.SearchOptions(options.budget)) for p in products],
            runner,
            store,
            deadline,
        )
    if options.search:
        return
    with contextlib.closing(start_fresh()) as fresh:
        rows = measured(products, fresh, store, options.work, options.rounds, deadline)
    Console(width=180).print(table(rows))
    Console().print(figures := summary(rows))
    done = {posed(MatmulProblem, row["problem"]) for row in rows}
    missing = [str(product) for product in products if product.problem not in done]
    conclude("fused", fresh, rows, figures, WRITTEN, missing=missing, chosen=options, partly=False)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = suite.options(__doc__, "fused", budget=64, rounds=10)
    parser.add_argument("--search", action="store_true", help="only fill the cache")
    return parser.parse_args(arguments)


def measured(
    products: Sequence[Product], fresh: Runner, store: Store, work: Path, rounds: int, deadline: float
) -> list[dict[str, Any]]:
    """A row for each problem that has an answer; those of an earlier command stand where nothing has changed."""
    cases = [
        (product, record)
        for product in products
        if (record := found(MATMUL, product.problem, fresh.hardware, store)) is not None
    ]
    return time_all(
        cases,
        lambda case: conditions(WRITTEN, case[0].problem, answers(MATMUL, case[1]), fresh, rounds),
        lambda case: row(*case, fresh, rounds),
        work / "judged.jsonl",
        deadline,
    )


def row(product: Product, record: Record, fresh: Runner, rounds: int) -> dict[str, Any]:
    """One line of the result; what failed has no time, and says why."""
    problem = WrittenProblem(**vars(product.problem))
    entries = answers(MATMUL, record)
    ours = {name: (entry.backend, entry.schedule) for name, entry in entries.items()}
    outcome = time_in_rounds(
        fresh,
        {
            name: Task(WRITTEN, problem, backend, schedule, REPETITIONS)
            for name, (backend, schedule) in {AS_WRITTEN: (AS_WRITTEN, {}), **ours}.items()
        },
        rounds,
    )
    bound_s = CostModel(fresh.hardware).lower_bound(product.problem)
    times = {name: outcome.times(name) for name in (AS_WRITTEN, "xla", "pallas", "final")}
    written = times[AS_WRITTEN]
    line: dict[str, Any] = {
        "problem": str(product.problem),
        "origin": product.origin,
        "bound_us": bound_s * 1e6,
        "final_backend": record.winner.backend,
        "trials": record.tried,
        "failures": {name: str(failure) for name, failure in outcome.failures.items()},
    }
    for name, measured in times.items():
        line |= times_of(name, measured)
        line[f"{name}_vs_written"] = written.median_s / measured.median_s if written and measured else None
        line[f"{name}_schedule"] = dict(entries[name].schedule) if name in entries else None
    return line


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures to speak of; None where no problem has one."""

    def of(name: str) -> list[float]:
        return [row[name] for row in rows if row[name] is not None]

    return {"problems": len(rows), "candidates_that_failed": sum(len(row["failures"]) for row in rows)} | {
        f"{name}_vs_written_{said}": reduce(ratios) if (ratios := of(f"{name}_vs_written")) else None
        for name in ("pallas", "final")
        for said, reduce in (("geomean", statistics.geometric_mean), ("worst", min))
    }


def table(rows: Sequence[dict[str, Any]]) -> Table:
    told = Table(title="kernel time in us; ratios above one: the second is faster")
    told.add_column("problem")
    for column in ("bound", "as written", "XLA", "Pallas", "final", "written/Pallas", "written/final", "by"):
        told.add_column(column, justify="right")
    for one in rows:
        figures = [one["bound_us"], *(one[f"{name}_us"] for name in (AS_WRITTEN, "xla", "pallas", "final"))]
        ratios = [one["pallas_vs_written"], one["final_vs_written"]]
        told.add_row(
            one["problem"],
            *(cell(figure, ".1f") for figure in figures),
            *(cell(ratio, ".3f") for ratio in ratios),
            one["final_backend"],
        )
    return told


if __name__ == "__main__":
    main()
