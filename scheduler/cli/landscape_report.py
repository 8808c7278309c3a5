"""The landscape of a record as text of 80 columns."""

from __future__ import annotations

import math
import string
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.text import Text

from scheduler.core.quantities import seconds_text

if TYPE_CHECKING:
    from scheduler.inspect.landscape import Cell, Landscape
    from search_spaces.space import Choice

_WIDTH = 80
_CELL = 7
# Background shades by the ratio to the best time, with one shade per step in the logarithm of the ratio.
_STEP, _SHADES = 0.05, ("on green4", "on dark_green", "on grey30", "on grey23", "on grey15", "")


def landscape(land: Landscape) -> Iterator[Text | str]:
    """Yields the grid of times relative to the best time.

    Brackets mark the winner's pair. Letters refer to the reasons why pairs were pruned.
    """
    transposed = len(land.xs) > len(land.ys)
    x, y, xs, ys = (land.y, land.x, land.ys, land.xs) if transposed else (land.x, land.y, land.xs, land.ys)
    label = max(len(y), *(len(str(value)) for value in ys))
    shown = min(len(xs), (_WIDTH - label) // _CELL)
    source = f"{land.took}, {land.measured} schedules" if land.measured else "by the model"
    said = f"{land.backend} over {x} and {y}: least time of each pair, {source}, over the best, "
    said += seconds_text(land.best_s)
    yield from textwrap.wrap(said, _WIDTH)
    yield f"{'':{label}}  {x}" + (f", {shown} of {len(xs)} values" if shown < len(xs) else "")
    yield f"{y:>{label}}" + "".join(f"{value!s:>{_CELL}}" for value in xs[:shown])
    letters = dict(zip(land.reasons, string.ascii_letters, strict=False))
    place = land.place(land.best.schedule)
    for j, value in reversed(list(enumerate(ys))):
        yield _row(value, label, [_cell(land, transposed, i, j, letters, place) for i in range(shown)])
    for reason, letter in letters.items():
        yield Text(textwrap.fill(f"  {letter}  {reason}", _WIDTH, subsequent_indent="     "))
    if any(cell.legal and cell.best_s is None for row in land.cells for cell in row):
        yield "  ?  legal, not tried"


def _cell(
    land: Landscape, transposed: bool, i: int, j: int, letters: dict[str, str], place: tuple[int, int] | None
) -> tuple[str, str]:
    """Returns the text and the background style of a cell."""
    column, row = (j, i) if transposed else (i, j)
    cell: Cell = land.cells[row][column]
    if cell.best_s is None:
        return ("?" if cell.legal else letters[cell.reason]), ""
    ratio = cell.best_s / land.best_s
    text = f"{ratio:.2f}" if ratio < 100 else f"{ratio:.0f}"
    shade = _SHADES[min(int(math.log(ratio) / _STEP), len(_SHADES) - 1)]
    return (f"[{text}]" if place == (column, row) else text), shade


def _row(value: Choice, label: int, cells: list[tuple[str, str]]) -> Text:
    made = Text(f"{value!s:>{label}}")
    for text, shade in cells:
        made.append(" ")
        made.append(f"{text:>{_CELL - 1}}", style=shade)
    return made
