"""Tuned ranges as JSON and as text: their points, and the quality of the schedules between the points."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from scheduler.cli.layout import Json, Row, ledger
from scheduler.core import codec
from scheduler.core.quantities import seconds_text
from scheduler.core.ranges import Range
from scheduler.core.records import Key, Record
from scheduler.inspect.verdict import gain_text
from scheduler.inspect.wording import compared

if TYPE_CHECKING:
    from search_spaces.operation import Operation


def range_json(of: Range) -> Json:
    """Returns a range as JSON, with times in seconds; null if no held-out problem was timed."""
    return {
        **dataclasses.asdict(of),
        "problem": codec.problem_to_json(of.problem),
        "worst_of_best": None if of.worst is None else of.worst.of_best,
        "geomean_of_best": of.of_best,
        "geomean_of_library": of.of_library,
    }


def summary(of: Range) -> list[str]:
    """Returns sentences about the points of a range, and about the results of held-out problems."""
    said = [f"{of.field}={of.points[0]}..{of.points[-1]} is answered by the records at {len(of.points)} points"]
    if of.worst is None or of.of_best is None:
        return [*said, "held-out: nothing was timed"]
    library = "" if of.of_library is None else f"; {of.of_library:.3f} of the library's speed"
    count, worst = len(of.held_out), of.worst
    said.append(
        f"held-out: {count} {of.field}, {worst.of_best:.3f} of the best at worst ({of.field}={worst.value}), "
        f"{of.of_best:.3f} in the geometric mean{library}"
    )
    return said


def key_at(of: Range, operation: Operation[Any], value: int) -> Key:
    """Returns the key of the record at a point of a range."""
    fields = codec.problem_to_json(of.problem)
    assert isinstance(fields, dict), "a range checks that"
    texts = {name: str(each) for name, each in {**fields, of.field: value}.items()}
    return Key(of.operation, of.hardware, operation.problem.parse(texts).canonical())


def points(of: Range, records: Sequence[Record | None], width: int) -> Iterator[RenderableType]:
    """Yields the winner at each point, one row per point."""
    won = [record.winner for record in records if record is not None]
    choices = compared([(entry.backend, entry.schedule) for entry in won])
    schedules = iter(choices.texts)
    rows = []
    for value, record in zip(of.points, records, strict=True):
        if record is None:
            rows.append(Row(f"{of.field}={value}", ("", "", ""), ["its record is gone"]))
            continue
        library = record.library_entry
        figures = (
            seconds_text(record.winner.measurement.median_s),
            seconds_text(library.measurement.median_s) if library else "",
            gain_text(record),
        )
        rows.append(Row(f"{of.field}={value}", figures, [next(schedules), *["a brief search"] * record.brief]))
    how = "estimated" if any(record is not None and record.estimated for record in records) else "time"
    yield from ledger("point, and what won there", (how, "XLA", "gain"), [(choices.note, rows)], width)
