"""All pictures of a cache and of recorded sweeps, by name: those of the documentation are made of what is shipped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scheduler.core.identity import key_of
from scheduler.core.records import Record
from scheduler.inspect import case as cases_of
from scheduler.inspect.case import Case
from scheduler.inspect.plots.best_so_far import best_so_far
from scheduler.inspect.plots.block_sizes import block_sizes
from scheduler.inspect.plots.gains import gains
from scheduler.inspect.plots.landscape import landscape
from scheduler.inspect.plots.predictions import predictions
from scheduler.inspect.plots.roofline import roofline
from scheduler.inspect.plots.tiles import tiles
from scheduler.inspect.plots.time_breakdown import time_breakdown

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def gallery(
    records: Sequence[Record], recordings: Sequence[Path], *, dark: bool = False
) -> Iterator[tuple[str, Figure]]:
    """Each picture with its name: of all records of one chip, and of the recorded problem that tells most.

    That is the one of whose schedules the most were measured; without recordings, there are only those of all records.
    """
    if records:
        known = [case for case in map(cases_of.of_record, records) if case is not None]
        yield "gains", gains(records, dark=dark)
        yield "roofline", roofline(known, dark=dark)
    swept = {path: cases_of.of_recording(path) for path in recordings}
    if swept:
        path = max(swept, key=lambda path: len(swept[path].measured()))
        yield "best-so-far", best_so_far(cases_of.of_replay(path), dark=dark)
        yield from of_problem(swept[path], records, dark=dark)


def of_problem(swept: Case, records: Sequence[Record], *, dark: bool) -> Iterator[tuple[str, Figure]]:
    """Pictures of a recorded problem; those of its best schedule are of its record's, where it has one."""
    key = key_of(swept.operation, swept.problem, swept.hardware)
    record = next((record for record in records if record.key == key), None)
    tuned = swept if record is None else Case(swept.operation, swept.problem, swept.hardware, record)
    yield "predictions", predictions([swept], dark=dark)
    yield "landscape", landscape(swept, dark=dark)
    yield "block-sizes", block_sizes(tuned, dark=dark)
    yield "tiles", tiles(tuned, dark=dark)
    yield "time-breakdown", time_breakdown(tuned, dark=dark)
