"""Writes the result of a benchmark from the rows that it has timed so far, without a device, and says what is missing.

    python benchmarks/report.py matmul

For a suite that takes longer than a device can be had at a time: `matmul`, `rows`, `fused` and `attention` keep each
row as soon as it is measured. The result is written in the place of a whole one, with the list of problems that have no
row in it.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attention
import comparison
import fused
import rows
from harness import RESULTS, ROOT, Kept, told, write_result
from jax_hopper import RIVALS
from problems import FUSED, MATMULS

from scheduler.core import hardware
from search_spaces import Operation, load

Rows = Sequence[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """One that keeps rows.

    Attributes:
      suite: its problems on a chip, each as the name of its operation and what its row is kept by, in their order.
      summarize: the figures to speak of.
      operations: whose kernels' versions a result names.
    """

    suite: Callable[[hardware.Hardware], Sequence[tuple[str, str]]]
    summarize: Callable[[Rows], Mapping[str, Any]]
    operations: Sequence[Operation[Any]]


BENCHMARKS = {
    "attention": Benchmark(
        lambda chip: [(attention.timed_by(one).name, told(one.problem)) for one in attention.suite_of(chip)],
        attention.summary,
        [attention.FORWARD, attention.BACKWARD],
    ),
    "matmul": Benchmark(
        lambda _: [("matmul", told(product.problem)) for product in MATMULS], comparison.summarize, [RIVALS]
    ),
    "fused": Benchmark(
        lambda _: [(fused.WRITTEN.name, told(product.problem)) for product in FUSED], fused.summary, [fused.WRITTEN]
    ),
    "rows": Benchmark(
        lambda chip: [(task.operation.name, told(task.problem)) for task in rows.tasks(chip, None)],
        rows.summary,
        [load(name) for name in rows.FORWARD],
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", choices=sorted(BENCHMARKS))
    parser.add_argument("--work", type=Path, help="the benchmark's: where it keeps judged.jsonl")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the result is written")
    options = parser.parse_args(arguments)
    benchmark = BENCHMARKS[options.benchmark]
    kept = (options.work or ROOT / "build" / options.benchmark) / "judged.jsonl"
    timed = {(row["conditions"]["operation"], row["conditions"]["problem"]): row for row in Kept(kept).latest()}
    if not timed:
        raise SystemExit(f"{kept} holds no rows")
    devices = {row["conditions"]["device"] for row in timed.values()}
    chips = [chip for chip in hardware.table() if chip.id in devices]
    if len(devices) != 1 or not chips:
        raise SystemExit(f"{kept} holds rows of {', '.join(sorted(devices))}: one known chip is wanted")
    suite = benchmark.suite(chips[0])
    found = [timed[name] for name in suite if name in timed]
    missing = [" ".join(name) for name in suite if name not in timed]
    one = found[0]["conditions"]
    environment = {
        **{name: one[name] for name in ("jax", "jaxlib", "driver")},
        "kernels": {f"{o.name}/{k.backend}": k.version for o in benchmark.operations for k in o.kernels},
        "commit": ", ".join(sorted({row["commit"] for row in found})),
        "dirty": any(row["dirty"] for row in found),
        "missing": missing,
    }
    summary = benchmark.summarize(found)
    write_result(
        options.benchmark, chips[0], summary=summary, rows=found, environment=environment, directory=options.results
    )
    print(f"{len(found)} of {len(suite)} problems; missing:", *missing or ["none"], sep="\n  ")


if __name__ == "__main__":
    main()
