"""What the matmul benchmark concludes from times: a row for each problem, the summary, the table."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from independent import Timed, conditions, times_of
from jax_hopper import JAX_HOPPER
from problems import Product
from rich.table import Table
from suite import answers, cell

from scheduler.core.hardware import Hardware
from scheduler.core.records import Entry, Measurement, Record, Sweep, Trial
from scheduler.measure.runner import Runner
from scheduler.model.cost import CostModel
from search_spaces.matmul import MATMUL

# Who is compared, in the order of the table.
NAMES = ("xla", "jax_hopper", "pallas", "final")
# Of the rival's draw: which of these is the fastest, the independent benchmark finds out.
RIVAL_FINALISTS = 3
# Below it launches and tails decide, above it arithmetic does.
LARGE_FLOPS = 10e9

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Draw:
    """Schedules of the rival that were drawn at random and timed: what was drawn from, and each with its time."""

    head: Sweep
    trials: Sequence[Trial]

    @property
    def tried(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.backend == JAX_HOPPER.backend]

    @property
    def fastest(self) -> list[Trial]:
        """Those that ran, the fastest first."""
        times = {n: one.outcome.median_s for n, one in enumerate(self.tried) if isinstance(one.outcome, Measurement)}
        return [self.tried[n] for n in sorted(times, key=times.__getitem__)]

    @property
    def best_s(self) -> float | None:
        """The time of the fastest, seconds; None where none ran."""
        return min((one.outcome.median_s for one in self.tried if isinstance(one.outcome, Measurement)), default=None)


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem with all that the steps before left for the independent benchmark.

    Attributes:
      draw: None where the rival cannot do the problem, or was not asked.
    """

    product: Product
    record: Record
    draw: Draw | None

    @property
    def candidates(self) -> dict[str, Entry | Trial]:
        """Who is to be timed, by name: the answers of the record, and the first few of the draw, numbered."""
        rivals = self.draw.fastest[:RIVAL_FINALISTS] if self.draw else []
        return answers(MATMUL, self.record) | {f"jax_hopper {n}": trial for n, trial in enumerate(rivals, start=1)}

    def conditions(self, fresh: Runner, rounds: int) -> dict[str, Any]:
        """All that a row depends on: an earlier one stands for today's where these are the same."""
        return conditions(MATMUL, self.product.problem, self.candidates, fresh, rounds)


def row(case: Case, timed: Timed, hardware: Hardware) -> Row:
    """What one problem showed: times in microseconds, rates, and ratios of the others' times to ours."""
    problem, found = case.product.problem, case.candidates
    bound_s = CostModel(hardware).lower_bound(problem)
    rivals = {name: joined.median_s for name in timed.rounds if (joined := timed.times(name)) and name not in NAMES}
    alias = {name: name for name in NAMES} | {"jax_hopper": min(rivals, key=rivals.__getitem__, default="")}
    times = {name: timed.times(alias[name]) for name in NAMES}
    result: Row = {
        "problem": str(problem),
        "origin": case.product.origin,
        "flops": problem.flops,
        "bytes": problem.bytes_moved,
        "bound_us": bound_s * 1e6,
        "trials": case.record.tried,
        "rival": _told(case, hardware),
        "failures": {name: str(failure) for name, failure in timed.failures.items()},
    }
    for name in NAMES:
        measured, one = times[name], found.get(alias[name])
        result |= times_of(name, measured)
        result[f"{name}_vs_xla"] = _ratio(times["xla"], measured)
        result[f"{name}_tflops"] = measured and problem.flops / measured.median_s / 1e12
        result[f"{name}_of_bound"] = measured and bound_s / measured.median_s
        result[f"{name}_backend"] = one and one.backend
        result[f"{name}_schedule"] = one and dict(one.schedule)
        result[f"{name}_predicted_us"] = one and one.predicted_s * 1e6
    result["pallas_vs_jax_hopper"] = _ratio(times["jax_hopper"], times["pallas"])
    result["final_vs_jax_hopper"] = _ratio(times["jax_hopper"], times["final"])
    return result


def _ratio(other: Measurement | None, ours: Measurement | None) -> float | None:
    return other.median_s / ours.median_s if other and ours else None


def _told(case: Case, hardware: Hardware) -> dict[str, Any]:
    """What the rival's time is the best of, or why it has none."""
    if case.draw is None:
        refused = JAX_HOPPER.supports(case.product.problem, hardware.target)
        return {"refused": refused or "nothing was drawn of it"}
    return {
        "legal": case.draw.head.legal - 1,  # without the library
        "drawn": len(case.draw.tried),
        "seed": case.draw.head.seed,
        "failed": len(case.draw.tried) - len(case.draw.fastest),
        "date": case.draw.head.environment.date,
    }


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """The figures that matter; None where no problem has one."""

    def of(name: str, over: float = 0.0) -> list[float]:
        return [row[name] for row in rows if row[name] is not None and row["flops"] > over]

    def told(reduce: Callable[[list[float]], float], values: list[float]) -> float | None:
        return reduce(values) if values else None

    drawn = [row["rival"] for row in rows if "drawn" in row["rival"]]
    return {
        "problems": len(rows),
        "problems_with_pallas": len(of("pallas_us")),
        "problems_with_jax_hopper": len(of("jax_hopper_us")),
        "candidates_that_failed": sum(len(row["failures"]) for row in rows),
        "pallas_vs_xla_geomean": told(statistics.geometric_mean, of("pallas_vs_xla")),
        "pallas_vs_xla_worst": told(min, of("pallas_vs_xla")),
        "pallas_vs_xla_worst_over_10gflop": told(min, of("pallas_vs_xla", over=LARGE_FLOPS)),
        "final_vs_xla_geomean": told(statistics.geometric_mean, of("final_vs_xla")),
        "final_vs_xla_worst": told(min, of("final_vs_xla")),
        "jax_hopper_vs_xla_geomean": told(statistics.geometric_mean, of("jax_hopper_vs_xla")),
        "pallas_vs_jax_hopper_geomean": told(statistics.geometric_mean, of("pallas_vs_jax_hopper")),
        "pallas_vs_jax_hopper_worst": told(min, of("pallas_vs_jax_hopper")),
        "jax_hopper_schedules": max((one["drawn"] for one in drawn), default=0),
        "jax_hopper_seeds": sorted({one["seed"] for one in drawn}),
    }


def table(rows: Sequence[Row], hardware: Hardware) -> Table:
    told = Table(title=f"matmul on {hardware.kind}: kernel time in us; ratios above one: the second is faster")
    right = (
        "bound",
        "XLA",
        "JAX's",
        "Pallas",
        "final",
        "TFLOP/s",
        "of roofline",
        "XLA/Pallas",
        "JAX's/Pallas",
        "XLA/final",
    )
    told.add_column("problem")
    for column in (*right, "by"):
        told.add_column(column, justify="right")
    for one in rows:
        told.add_row(
            one["problem"],
            f"{one['bound_us']:.1f}",
            *(cell(one[f"{name}_us"], ".1f") for name in NAMES),
            cell(one["final_tflops"], ".0f"),
            cell(one["final_of_bound"], ".0%"),
            *(cell(one[name], ".3f") for name in ("pallas_vs_xla", "pallas_vs_jax_hopper", "final_vs_xla")),
            one["final_backend"] or "-",
        )
    return told
