"""Output of `extract`: the problems of a function, and the operations that it could tune."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from scheduler.cli.layout import table, texts
from scheduler.functions import wording

if TYPE_CHECKING:
    from scheduler.functions.problems import Problems


def lines(found: Problems) -> Iterator[RenderableType]:
    if found.tuned:
        made = table(*wording.HEAD, "problem", "lines", numbers=wording.HEAD)
        for cells, row in zip(wording.figures(found), found.tuned, strict=True):
            made.add_row(*texts(*cells, wording.of(row), wording.places(row.lines)))
        yield made
    yield from map(Text, wording.notes(found))
    if found.untuned:
        yield Text(wording.untuned(found))
        yield from (Text(f"  {wording.suggestion(each)}") for each in found.untuned)
