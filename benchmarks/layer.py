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
import collections
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from harness import RESULTS, ROOT, Kept, environment, write_result
from layer_models import CASES, REHEARSED, Case, Jnp, Tuned
from rich.console import Console
from rich.table import Table

import scheduler
from scheduler.core import hardware
from scheduler.functions import in_turns
from scheduler.measure.runner import environment as measured
from scheduler.store.store import Store, default_url
from search_spaces import jax_compat

Run = Callable[[], Any]
# Seconds of rounds for each version of a function, and calls that the device's clock takes the kernels of.
SECONDS_OF_VERSION, DEVICE_CALLS = 3.0, 5
MOST_KERNELS = 24


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
    off = _distances(case, {name: runs[name]() for name in ("jnp", "plan", "optimize")})
    walls = in_turns.compare(runs, seconds=SECONDS_OF_VERSION * len(runs), at_least_rounds=12)
    layers = case.model.layers
    line: dict[str, Any] = {"case": case.name, "model": str(case.model), "train": case.train, "deciding_s": took_s}
    for name, run in runs.items():
        line[f"{name}_us"] = walls[name].median_s / layers * 1e6
        line[f"{name}_spread_us"] = walls[name].spread_s / layers * 1e6
        line[f"{name}_samples_us"] = [round(sample / layers * 1e6, 3) for sample in walls[name].samples_s]
        kernels = _kernels(run)
        line[f"{name}_device_us"] = kernels and sum(kernels.values()) / layers * 1e6
        line[f"{name}_kernels_us"] = {kernel: round(s / layers * 1e6, 3) for kernel, s in kernels.items()}
    for name in ("plan", "tuned", "optimize"):
        line[f"{name}_vs_jnp"] = line["jnp_us"] / line[f"{name}_us"]
    line["error_vs_jnp"] = {name: _worst(off[name], off["jnp"]) for name in ("plan", "optimize")}
    line["error"] = {name: max(distances) for name, distances in off.items()}
    line["plan"] = plan.verdict
    line["answers"] = [str(answer) for answer in plan.answers]
    line["optimized"] = optimized.report()
    return line


def _kernels(run: Run) -> dict[str, float]:
    """Seconds of a call by the kernel's name, the longest first; those beyond the longest few together."""
    if hardware.detect().platform == "cpu":
        return {}
    seconds: dict[str, float] = collections.defaultdict(float)
    for kernels in jax_compat.device_kernels(run, DEVICE_CALLS):
        for name, s in kernels:
            seconds[name[:80]] += s / DEVICE_CALLS
    ordered = sorted(seconds.items(), key=lambda one: -one[1])
    others = sum(s for _, s in ordered[MOST_KERNELS:])
    return dict(ordered[:MOST_KERNELS]) | ({"others": others} if others else {})


def _distances(case: Case, results: Mapping[str, Any]) -> dict[str, list[float]]:
    """Of each result and each array of it: the norm of its distance from float32, over that array's norm."""
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), case.arguments())
    with jax.default_matmul_precision("highest"):
        exact = jax.tree.leaves(jax.jit(case.function(Jnp()))(*wide))

    @jax.jit
    def distance(x: Any, right: Any) -> Any:
        x, right = x.astype(jnp.float32), right.astype(jnp.float32)
        return jnp.linalg.norm((x - right).ravel()) / (jnp.linalg.norm(right.ravel()) + 1e-30)

    return {
        name: [float(distance(x, right)) for x, right in zip(jax.tree.leaves(result), exact, strict=True)]
        for name, result in results.items()
    }


def _worst(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return max(a / b if b else float(a > 0) + 1.0 for a, b in zip(ours, theirs, strict=True))


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
