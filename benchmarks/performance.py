"""Writes the table of docs/performance.md: the floor of each problem of the suite, and what was measured of it last."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from harness import RESULTS, ROOT, posed
from problems import MATMULS, Product

from scheduler.core import hardware
from scheduler.core.hardware import Hardware
from search_spaces.matmul import MatmulProblem

DOCUMENT = ROOT / "docs" / "performance.md"
RESULT = RESULTS / "matmul-nvidia-h200.json"
H200 = hardware.find("NVIDIA H200")
PLACE = re.compile(r"(?<=<!-- by benchmarks/performance.py -->\n).*?(?=<!-- end -->)", re.DOTALL)
COLUMNS = {  # title: field of a row of the result, how it is written
    "XLA": ("xla_us", ".1f"),
    "JAX's": ("jax_hopper_us", ".1f"),
    "Pallas": ("pallas_us", ".1f"),
    "final": ("final_us", ".1f"),
    "XLA / Pallas": ("pallas_vs_xla", ".3f"),
    "JAX's / Pallas": ("pallas_vs_jax_hopper", ".3f"),
    "XLA / final": ("final_vs_xla", ".3f"),
}


def main() -> None:
    rows = json.loads(RESULT.read_text())["rows"]
    DOCUMENT.write_text(written(DOCUMENT.read_text(), rows))
    print(f"{DOCUMENT.relative_to(ROOT)}: {len(rows)} of {len(MATMULS)} problems are measured")


def written(document: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The document with today's table in its place."""
    measured = {posed(MatmulProblem, row["problem"]): row for row in rows}
    titles = ["problem", "from", "floor", "by", *COLUMNS, "Pallas tile"]
    lines = [titles, ["---"] * 2 + ["---:"] * (len(titles) - 2)]
    lines += [_line(product, measured.get(product.problem, {}), H200) for product in MATMULS]
    return PLACE.sub(lambda _: "".join(f"| {' | '.join(line)} |\n" for line in lines), document)


def _line(product: Product, row: Mapping[str, Any], chip: Hardware) -> list[str]:
    problem = product.problem
    arithmetic_s = problem.flops / chip.peak(problem.arithmetic)
    memory_s = problem.bytes_moved / chip.hbm_bytes_per_s
    cells = [(row.get(field), form) for field, form in COLUMNS.values()]
    tile = row.get("pallas_schedule") or {}
    return [
        str(problem),
        product.origin,
        f"{max(arithmetic_s, memory_s) * 1e6:.1f}",
        "flops" if arithmetic_s > memory_s else "bytes",
        *("" if value is None else format(value, form) for value, form in cells),
        " x ".join(str(tile[name]) for name in ("tile_m", "tile_n", "tile_k") if name in tile),
    ]


if __name__ == "__main__":
    main()
