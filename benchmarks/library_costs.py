"""What XLA's and the vendor's programs cost by what they run: alignment, layouts, dtypes, kernel families, epilogues.

    python benchmarks/library_costs.py --seconds 150     # as often as it says that points are left

The points are a table, none of them drawn. Each has one time for each of its programs, taken as a search takes it
(`unverified`). The constants of `CostModel.library_seconds` are fitted to them, and the figures of the summary
are its errors. Programs of a batch compile at once; none compiles while another is timed.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from harness import RESULTS, ROOT, Kept, paced, told
from rich.console import Console
from rich.table import Table
from unverified import conclude, exclusive, prepared, timed

from scheduler.core import hardware as chips
from scheduler.core.hardware import Hardware
from scheduler.core.records import Failure, Measurement
from scheduler.measure import runner
from scheduler.model.calibration import Observed, fit
from scheduler.model.cost import CostModel
from search_spaces import Operation, Problem, load
from search_spaces.row_alignment import row_alignment

# Points whose programs compile at once, before they are timed.
BATCH = 24
Fields = dict[str, int | str | bool]


class Point(NamedTuple):
    """A problem, and what it is to tell."""

    operation: Operation[Any]
    problem: Problem
    family: str

    def __str__(self) -> str:
        return f"{self.operation.name} {told(self.problem)}"


LAYOUTS: tuple[Fields, ...] = (
    {},
    {"transpose_b": True},
    {"transpose_a": True},
    {"transpose_a": True, "transpose_b": True},
)


def _aligned(m: int, n: int, k: int, layouts: int) -> Iterator[tuple[str, Fields]]:
    """Products of about these extents whose rows have each alignment: in bfloat16, an extent plus 4, 2 or 1."""
    for layout in LAYOUTS[:layouts]:
        rows = {("m" if layout.get("transpose_a") else "k"), ("k" if layout.get("transpose_b") else "n"), "n"}
        for more in (4, 2, 1):
            for odd in ("m", "n", "k"):
                if odd in rows and (not layout or more != 2):
                    sizes = {"m": m, "n": n, "k": k}
                    yield "alignment", {**sizes, odd: sizes[odd] + more, **layout}
    for more in (4, 2, 1):
        yield "alignment", {"m": m, "n": n + more, "k": k + more}
        yield "alignment", {"m": m + more, "n": n + more, "k": k + more, "transpose_a": True}
    yield "aligned", {"m": m, "n": n, "k": k}


def _products() -> Iterator[tuple[str, Fields]]:
    yield from _aligned(4096, 4096, 4096, layouts=4)
    yield from _aligned(2048, 1536, 1024, layouts=2)
    for m, n, k in ((8192, 50257, 768), (512, 50257, 768), (2048, 50257, 4096), (4096, 32001, 4096)):  # vocabularies
        yield "vocabulary", {"m": m, "n": n, "k": k}
        yield "vocabulary", {"m": m, "n": n, "k": k, "transpose_b": True}
        yield "vocabulary", {"m": m, "n": k, "k": n}
    for m, n, k in ((1000, 1000, 1000), (1001, 1001, 1001), (1500, 700, 900), (2048, 3000, 1001), (1999, 997, 1601)):
        yield "medium", {"m": m, "n": n, "k": k}
        yield "medium", {"m": m, "n": n, "k": k, "transpose_b": True}
    for m, n, k in (
        (197, 768, 768),
        (788, 3072, 768),
        (77, 2048, 2048),
        (256, 1000, 2048),
        (1576, 1000, 768),
    ):  # vision
        yield "medium", {"m": m, "n": n, "k": k}
        yield "medium", {"m": m, "n": n + 1, "k": k + 1}
    for m in (1, 4, 16, 64):
        for n, k in ((4096, 4096), (4097, 4096), (4096, 4095), (50257, 768)):
            yield "few rows", {"m": m, "n": n, "k": k}
        yield "few rows", {"m": m, "n": 4096, "k": 4095, "transpose_b": True}
    for m, n, k in ((256, 256, 16384), (128, 512, 65536), (512, 512, 8192)):
        for more in (0, 1):
            yield "split k", {"m": m, "n": n, "k": k + more}
            yield "split k", {"m": m, "n": n + more, "k": k, "transpose_a": True}
    for batch, m, n, k in ((16, 1024, 1024, 1024), (64, 512, 512, 128), (96, 197, 197, 64), (8, 2048, 2048, 1024)):
        for more in (0, 1):
            yield "batch", {"batch": batch, "m": m, "n": n + more, "k": k}
            yield "batch", {"batch": batch, "m": m, "n": n, "k": k + more, "transpose_b": True}


def _narrow_and_wide() -> Iterator[tuple[str, Fields]]:
    odd = ((4096, 4096, 4096), (4096, 4097, 4096), (4096, 4096, 4097), (4096, 4100, 4100))
    for m, n, k in odd:
        yield "float16", {"m": m, "n": n, "k": k, "dtype": "float16"}
        for transpose_b in (False, True):
            layout: Fields = {"m": m, "n": n, "k": k, "transpose_b": transpose_b}
            yield "int8", {**layout, "dtype": "int8", "out_dtype": "int32"}
            yield "float8", {**layout, "dtype": "float8_e4m3fn", "out_dtype": "bfloat16"}
    for m, n, k in ((2048, 2048, 2048), (2048, 2049, 2048), (2048, 2048, 2047), (2048, 2050, 2048)):
        for precision in ("default", "high", "highest"):
            yield f"float32 {precision}", {"m": m, "n": n, "k": k, "dtype": "float32", "precision": precision}
    yield "out float32", {"m": 4096, "n": 4096, "k": 4096, "out_dtype": "float32"}
    yield "out float32", {"m": 4096, "n": 4097, "k": 4096, "out_dtype": "float32"}
    for m, n, k in ((4096, 4096, 4096), (4096, 4097, 4096), (2048, 3000, 1001), (16, 4097, 4096)):
        for after in (
            {"bias": "bfloat16"},
            {"activation": "gelu"},
            {"residual": "bfloat16"},
            {"bias": "bfloat16", "activation": "gelu"},
        ):
            yield "epilogue", {"m": m, "n": n, "k": k, **after}


def _others() -> Iterator[tuple[str, str, Fields]]:
    for m, n, k in ((4096, 8192, 2048), (4096, 8191, 2048), (4096, 8192, 2047), (16, 8191, 2048), (1001, 2731, 1023)):
        yield "gated", "gated_matmul", {"m": m, "n": n, "k": k, "pair": True}
    for m, n, k in ((4096, 4096, 4096), (4096, 4097, 4096), (4096, 4096, 4095), (16, 4096, 4096)):
        for scales in ("blocks", "rows"):
            yield "scaled", "scaled_matmul", {"m": m, "n": n, "k": k, "a_scales": scales, "b_scales": scales}
    for k, n in ((1024, 1024), (1024, 1023), (1023, 1024)):
        for rows in (512, 4096):
            yield "grouped", "ragged_dot", {"rows": rows, "groups": 8, "k": k, "n": n}
            yield "grouped", "ragged_dot_weights", {"rows": rows, "groups": 8, "k": k, "n": n}
    heads: Fields = {"heads": 16, "kv_heads": 16, "head_dim": 64}
    for length in (77, 197, 512, 1024, 1023):
        for causal in (False, True):
            sizes: Fields = {"batch": 4, "q_len": length, "kv_len": length, **heads, "causal": causal}
            yield "attention", "flash_attention", sizes
            yield "attention", "flash_attention_backward", sizes
    for more in ({"window_left": 256, "causal": True}, {"softcap": True}, {"kv_lengths": True}, {"dtype": "float32"}):
        yield "attention", "flash_attention", {"batch": 4, "q_len": 1024, "kv_len": 1024, **heads, **more}
    for batch, kv_len in ((16, 1024), (16, 4001)):
        yield "attention", "flash_attention", {"batch": batch, "q_len": 1, "kv_len": kv_len, **heads}
    for name in ("softmax", "rms_norm", "layer_norm", "silu_and_mul"):
        for rows, columns in ((4096, 1024), (4096, 1001), (4096, 1002), (2048, 50257), (2048, 50304), (64, 1001)):
            yield "rows", name, {"rows": rows, "columns": columns}
        yield "rows", name, {"rows": 4096, "columns": 1001, "dtype": "float32"}


def points() -> list[Point]:
    """Returns the table, in an order in which each part of it is about as varied as the whole."""
    matmul = load("matmul")
    products = [*_products(), *_narrow_and_wide()]
    found = [Point(matmul, matmul.problem(**fields), family) for family, fields in products]
    found += [Point(load(name), load(name).problem(**fields), family) for family, name, fields in _others()]
    each = list({(point.operation.name, point.problem): point for point in found}.values())
    stride = 7
    return [point for start in range(stride) for point in each[start::stride]]


def small() -> list[Point]:
    """Returns the points of a rehearsal."""
    matmul, softmax = load("matmul"), load("softmax")
    products = [matmul.problem(m=16, n=n, k=32, dtype="float32") for n in (32, 33)]
    return [*(Point(matmul, p, "alignment") for p in products), Point(softmax, softmax.problem(8, 33), "rows")]


def main(arguments: Sequence[str] | None = None) -> None:
    started = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing that would end after so many")
    parser.add_argument("--small", action="store_true", help="a rehearsal of three points, on a CPU")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "library_costs", help="kept for the next command")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the result is written")
    options = parser.parse_args(arguments)
    hardware = chips.detect()
    table = small() if options.small else points()
    rows = measured(table, hardware, options.work / "points.jsonl", started + options.seconds)
    show(rows)
    fits(rows, hardware)
    conclude("library_costs", table, hardware, rows, summary(rows, hardware), options.results)


def measured(table: Sequence[Point], hardware: Hardware, path: Path, deadline: float) -> list[dict[str, Any]]:
    """Returns a row for each point, but for those that time did not suffice for; the file keeps each."""
    kept = Kept(path)

    def conditions(point: Point) -> dict[str, Any]:
        versions = {k.backend: k.version for k in point.operation.kernels if k.library or k.vendor}
        return {"operation": point.operation.name, "problem": told(point.problem), "versions": versions}

    left = [point for point in table if kept.get(conditions(point)) is None]
    for batch in paced([left[n : n + BATCH] for n in range(0, len(left), BATCH)], "batch", deadline):
        with exclusive(hardware):
            for point, (operands, built) in zip(batch, prepared(batch, hardware), strict=True):
                if isinstance(operands, Failure):
                    print(f"{point}: {operands}", flush=True)
                    continue
                kept.add(row(point, timed(point.problem, operands, built, hardware)), conditions(point))
    kept = Kept(path)
    return [found for point in table if (found := kept.get(conditions(point))) is not None]


def row(point: Point, found: Mapping[str, Measurement | Failure]) -> dict[str, Any]:
    """Returns one line of the result: of each program the median, all samples and the cache state, or its failure."""
    line: dict[str, Any] = {
        "operation": point.operation.name,
        "problem": point.problem.canonical(),
        "family": point.family,
        "row_alignments": [*map(row_alignment, (*point.problem.matrices, *point.problem.results()))],
    }
    times = {name: one for name, one in found.items() if isinstance(one, Measurement)}
    return line | {
        "microseconds": {name: one.median_s * 1e6 for name, one in times.items()},
        "samples_us": {name: [round(1e6 * x, 3) for x in one.samples_s] for name, one in times.items()},
        "l2": {name: one.l2 for name, one in times.items()},
        "failures": {name: str(one) for name, one in found.items() if isinstance(one, Failure)},
    }


def observations(rows: Sequence[Mapping[str, Any]], operation: Operation[Any]) -> list[Observed]:
    """Returns what `calibration.fit` takes of the operation's library: of each problem, its fastest program."""
    backend, found = operation.library.backend, []
    for line in rows:
        times = [us for name, us in line["microseconds"].items() if name.partition("/")[0] == backend]
        if line["operation"] == operation.name and times:
            problem = operation.problem.from_canonical(line["problem"])
            found.append(Observed(problem, None, np.array([min(times) * 1e-6])))
    return found


def fits(rows: Sequence[Mapping[str, Any]], hardware: Hardware) -> None:
    """Prints what a calibration would be fitted to these rows alone."""
    for name in sorted({line["operation"] for line in rows}):
        operation = load(name)
        if seen := observations(rows, operation):
            found = fit(operation, operation.library, hardware, seen, runner.environment(driver=""))
            print(f"{name}: {dict(found.constants)}, remaining error {found.error:.3f}")


def summary(rows: Sequence[Mapping[str, Any]], hardware: Hardware) -> dict[str, Any]:
    """Returns the median and the worst error of the model's default constants, as factors, by family of points."""
    errors: dict[str, list[float]] = {}
    for name in {line["operation"] for line in rows}:
        mine = [line for line in rows if line["operation"] == name]
        for line in mine:
            for one in observations([line], load(name)):
                ratio = float(one.seconds[0]) / CostModel(hardware).library_seconds(one.problem)
                errors.setdefault(line["family"], []).append(math.log(ratio))
    return {
        "points": len(rows),
        "failures": sum(len(line["failures"]) for line in rows),
        "measured_over_predicted": {
            family: {
                "points": len(some),
                "median": math.exp(statistics.median(some)),
                "least": math.exp(min(some)),
                "most": math.exp(max(some)),
            }
            for family, some in sorted(errors.items())
        },
    }


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table(title="microseconds")
    for column in ("operation", "problem", "alignment", "programs"):
        table.add_column(column)
    for line in rows:
        each = [f"{name} {us:.1f}" for name, us in line["microseconds"].items()]
        each += [f"{name}: {why[:60]}" for name, why in line["failures"].items()]
        table.add_row(line["operation"], line["problem"], str(line["row_alignments"]), ", ".join(each))
    Console(width=180).print(table)


if __name__ == "__main__":
    main()
