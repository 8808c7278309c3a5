"""Layers of models, whole: tuned calls under a plan, and `optimize` of plain code, beside plain jnp with cuDNN.

    python benchmarks/layer.py --only prefill,train --minutes 4     # measures these, and keeps their rows
    python benchmarks/layer.py                                      # measures what is left, and writes the result

Each case is one jitted function of a few layers (layer_models.py), written once on plain jnp and once on tuned calls.
`tune_function` searches what no store answers and makes a plan, `optimize` gets the plain function as it is. Then all
are timed in interleaved rounds of wall time under sustained load, and once more by the device's clock, by kernel.
Ratios are the wall time of jnp over ours: above one is faster. What results are off by is their distance from the same
model in float32 over the distance of jnp's, of the result where that is largest.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from harness import RESULTS, ROOT, Kept, environment, write_result
from layer_models import CASES, REHEARSED, Case, Jnp, Tuned
from rich.console import Console
from rich.table import Table
from whole_functions import Run, distances, kernel_times, wall_times, worst

import scheduler
from scheduler.core import hardware
from scheduler.measure.runner import environment as measured
from scheduler.store.store import Store, default_url


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of cases, with commas between them")
    parser.add_argument("--minutes", type=float, default=10.0, help="of searches, for each case")
    parser.add_argument("--budget", type=int, default=64, help="trials of each search")
    parser.add_argument("--cache", default=None, help="path or URL of the cache to search in and to fill")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "layer", help="what is kept for the next command")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the result is written")
    options = parser.parse_args(arguments)

    chip = hardware.detect()
    cases = REHEARSED if chip.platform == "cpu" else CASES
    only = [name for name in options.only.split(",") if name]
    if unknown := set(only) - {case.name for case in cases}:
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(case.name for case in cases)}")
    store, kept = Store(options.cache or default_url()), Kept(options.work / "rows.jsonl")
    rows = {case.name: kept.get(_conditions(case)) for case in cases}
    for case in cases:
        if case.name in only or (not only and rows[case.name] is None):
            made = row(case, store, options.minutes, options.budget)
            rows[case.name] = kept.add(made, _conditions(case))
            _print(made)
    if only:
        return
    done = [one for one in rows.values() if one]
    Console().print(figures := summary(done))
    told = environment(measured(""))
    write_result("layer", chip, summary=figures, rows=done, environment=told, directory=options.results)


def _conditions(case: Case) -> dict[str, Any]:
    return {"case": case.name, "model": str(case.model), "train": case.train, "jax": jax.__version__}


def row(case: Case, store: Store, minutes: float, budget: int) -> dict[str, Any]:
    """One line of the result: seconds as microseconds a layer."""
    args = case.arguments()
    written, ours = case.function(Jnp()), case.function(Tuned())
    began = time.perf_counter()
    plan = scheduler.tune_function(ours, *args, minutes=minutes, budget=budget, store=store)
    print(plan, flush=True)
    optimized = scheduler.optimize(written)
    jax.block_until_ready(optimized(*args))
    print(optimized.report(), flush=True)
    took_s = time.perf_counter() - began
    with scheduler.plan(plan):
        planned = jax.jit(ours).lower(*args).compile()
    runs: dict[str, Run] = {
        "jnp": functools.partial(jax.jit(written).lower(*args).compile(), *args),
        "plan": functools.partial(planned, *args),
        "tuned": functools.partial(jax.jit(ours).lower(*args).compile(), *args),
        "optimize": functools.partial(optimized, *args),
    }
    off = distances(written, args, {name: runs[name]() for name in ("jnp", "plan", "optimize")})
    layers = case.model.layers
    line: dict[str, Any] = {"case": case.name, "model": str(case.model), "train": case.train, "deciding_s": took_s}
    line |= wall_times(runs, layers)
    for name, run in runs.items():
        kernels = kernel_times(run, layers)
        line[f"{name}_device_us"] = kernels and sum(kernels.values())
        line[f"{name}_kernels_us"] = kernels
    line["error_vs_jnp"] = {name: worst(off[name], off["jnp"]) for name in ("plan", "optimize")}
    line["error"] = {name: max(each) for name, each in off.items()}
    line["plan"] = plan.verdict
    line["answers"] = [str(answer) for answer in plan.answers]
    line["optimized"] = optimized.report()
    return line


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """The figures to speak of, from rows as the result file keeps them."""
    of = {row["case"]: row for row in rows}
    named: dict[str, float | None] = {
        f"{case.name}_vs_jnp": of[case.name]["plan_vs_jnp"] if case.name in of else None for case in CASES
    }
    named["optimize_worst"] = min((row["optimize_vs_jnp"] for row in rows), default=None)
    named["error_vs_jnp_worst"] = max((max(row["error_vs_jnp"].values()) for row in rows), default=None)
    return named


def _print(row: Mapping[str, Any]) -> None:
    table = Table(title=f"{row['case']}: microseconds a layer, {row['model']}")
    for column in ("", "wall", "vs jnp", "device"):
        table.add_column(column, justify="right")
    for name in ("jnp", "plan", "tuned", "optimize"):
        ratio = "" if name == "jnp" else f"{row[f'{name}_vs_jnp']:.3f}"
        device = row[f"{name}_device_us"]
        table.add_row(name, f"{row[f'{name}_us']:.1f}", ratio, f"{device:.1f}" if device else "-")
    Console(width=160).print(table)
    print({"error_vs_jnp": row["error_vs_jnp"], "deciding_s": round(row["deciding_s"])})
    for name in ("jnp", "plan"):
        for kernel, us in row[f"{name}_kernels_us"].items():
            print(f"  {name:5} {us:9.1f}  {kernel}")


if __name__ == "__main__":
    main()
