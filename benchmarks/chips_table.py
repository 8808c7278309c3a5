"""Writes the table of what there is for each chip (docs/use/chips.md): kernels, and shipped records of what kind.

python benchmarks/chips_table.py     # with JAX 0.11.2 or newer: older ones compile none for GPUs before Hopper
"""

from __future__ import annotations

from collections.abc import Sequence

from harness import ROOT
from markdown_page import in_place, line, table

from scheduler.core.records import Record
from scheduler.inspect.doctor import coverage
from scheduler.store import text_files

PAGE = ROOT / "docs" / "use" / "chips.md"


def main() -> None:
    PAGE.write_text(with_chips(PAGE.read_text(), text_files.read_records(ROOT / "records")))
    print(PAGE.relative_to(ROOT))


def with_chips(document: str, records: Sequence[Record]) -> str:
    """The page with today's table in its place."""
    return in_place(document, "chips_table.py", chips(records))


def chips(records: Sequence[Record]) -> list[str]:
    """A row for each chip of the table; chips that differ in name only share a row."""
    names: dict[tuple[str, str, str], list[str]] = {}
    for row in coverage(records):
        chip = row.hardware.kind if not row.hardware.names else f"{row.hardware.names[0]} ({row.hardware.kind})"
        found = (row.kernels_text or "none: XLA alone", row.records_text or "none", f"calls use {row.fallback_text}")
        names.setdefault(found, []).append(chip)
    return [
        *table("chip", "Pallas kernels", "shipped records", "without a record", left=4),
        *(line(", ".join(chips), *found) for found, chips in names.items()),
    ]


if __name__ == "__main__":
    main()
