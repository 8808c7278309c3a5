"""Measures the table of the README on this card, and prints it beside the figures of benchmarks/results.

    python benchmarks/reproduce.py                              # all: hours
    python benchmarks/reproduce.py --minutes 30 --only rows models
    python benchmarks/reproduce.py --minutes 0                  # measures nothing, prints what there is

Each benchmark gets an equal share of the minutes, an empty cache and a directory of its own; the same command goes on
where the last one ended. Results are in `--work`/results, in the format of benchmarks/results, with clocks and power.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness import RESULTS, ROOT
from headline import COMPARISONS, card, ratios

from scheduler.measure.gpu import Gpu

BENCHMARKS = tuple(dict.fromkeys(comparison.benchmark for comparison in COMPARISONS))
# A suite that ends with problems left writes no result; another program writes that of the rows so far.
REPORTED = ("matmul", "fused")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="begin nothing that would end after so many; default: no limit")
    parser.add_argument(
        "--only", nargs="+", choices=BENCHMARKS, default=BENCHMARKS, metavar="NAME", help="of the table"
    )
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "reproduced", help="cache, kept rows and results")
    options = parser.parse_args(arguments)
    if options.minutes != 0 and Gpu.query() is None:  # the driver says it: a JAX here would take the GPU's memory
        raise SystemExit("there is no GPU here: on a CPU kernels are interpreted, and times say nothing about them")
    share = None if options.minutes is None else options.minutes / len(options.only)
    for benchmark in options.only if share != 0 else ():
        for command in commands(benchmark, options.work, share):
            print("==", *command, flush=True)
            if subprocess.run([sys.executable, *command], check=False).returncode == 0:
                break
    ours = {name: result for name, result in _read(options.work / "results") if name.partition("-")[0] in options.only}
    print("\n".join(["\nMeasured here:", "", *ratios(ours)]))
    for name in dict.fromkeys(card(result) for result in ours.values()):
        print("\n".join([f"\nbenchmarks/results, {name}:", "", *ratios(dict(_read(RESULTS)), name)]))


def commands(benchmark: str, work: Path, minutes: float | None) -> Iterator[list[str]]:
    """Yields the command of a benchmark, without the interpreter, and one to run if it fails."""
    program, results = str(ROOT / "benchmarks" / f"{benchmark}.py"), ["--results", str(work / "results")]
    if benchmark == "models":
        yield [program, *results, "--left", *([] if minutes is None else ["--minutes", f"{minutes:g}"])]
        return
    kept = ["--work", str(work / benchmark)]
    limit = [] if minutes is None else ["--seconds", f"{60 * minutes:g}"]
    yield [program, *results, *kept, "--cache", str(work / "cache.db"), *limit]
    if benchmark in REPORTED:
        yield [str(ROOT / "benchmarks" / "report.py"), benchmark, *results, *kept]


def _read(directory: Path) -> list[tuple[str, Any]]:
    """Returns the results in a directory by name; of a tree with changes, too."""
    return [
        (path.stem.removesuffix(".dirty"), json.loads(path.read_text())) for path in sorted(directory.glob("*.json"))
    ]


if __name__ == "__main__":
    main()
