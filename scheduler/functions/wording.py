"""Formats a function's problems as text, 100 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from scheduler.core.frames import Call
from scheduler.core.quantities import seconds_text

if TYPE_CHECKING:
    from scheduler.functions.counted import Counted
    from scheduler.functions.problems import Problems
    from scheduler.functions.suggestions import Suggestion

WIDTH = 100
HEAD = ("count", "at least", "share")


def place(line: Call) -> str:
    """Returns ``model.py:41``, with the relative path if the file is below the current directory."""
    file = Path(line.file)
    try:
        name = str(file.relative_to(Path.cwd()))
    except (ValueError, OSError):
        name = file.name
    return f"{name}:{line.line}" if name.isprintable() else f"{name!r}:{line.line}"


def places(lines: Iterable[Call]) -> str:
    return ", ".join(map(place, lines))


def figures(found: Problems) -> list[tuple[str, str, str]]:
    """Returns the count, the minimum time of all runs, and the share of the total time, for each tuned problem."""
    total = sum(row.least_s for row in found.tuned)
    return [(str(row.count), seconds_text(row.least_s), f"{100 * row.least_s / total:.1f} %") for row in found.tuned]


def of(row: Counted) -> str:
    return f"{row.operation.name} {row.problem}"


def times(row: Counted) -> str:
    return f"{row.count} times" if row.count > 1 else "once"


def notes(found: Problems) -> Iterator[str]:
    """Yields notes on the counts and the times."""
    if found.tuned:
        yield f"Times are what {found.hardware.kind} needs at least, by its roofline."
    elif not found.left:
        yield "It calls no tuned function."
    if found.mesh:
        yield f"Problems are those of one device; XLA divides the function over {found.mesh}."
    for each in found.left:
        yield f"XLA answers {of(each.row)}, {times(each.row)}: {each.reason}."
    for kind, says in (("while", "the turns of a while loop count as one"), ("cond", "all branches of a cond count")):
        loops = [loop for loop in found.loops if loop.kind == kind]
        if loops:
            yield ": ".join(filter(None, (places(loop.line for loop in loops if loop.line), f"{says}.")))


def untuned(found: Problems) -> str:
    """Returns the heading of the suggestions."""
    return f"Not tuned, and could be{', before XLA divides it' if found.mesh else ''}:"


def suggestion(found: Suggestion) -> str:
    """Returns ``model.py:41: softmax rows=2048 columns=32000, 3 times: tuned_softmax; 2.14x expected``."""
    row = found.row
    where = f"{places(row.lines)}: " if row.lines else ""
    gain = f"; {found.gain:.2f}x expected" if found.gain is not None else ""
    return f"{where}{of(row)}, {times(row)}: {found.call}{gain}"


def text(found: Problems) -> str:
    """Returns the full text: for each problem its figures, and below them the lines of the user's code."""
    lines: list[str] = []
    if found.tuned:
        cells = [HEAD, *figures(found)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        heads = ["".join(f"{cell:>{width}}  " for cell, width in zip(row, widths, strict=True)) for row in cells]
        lines.append(f"{heads[0]}problem")
        for head, row in zip(heads[1:], found.tuned, strict=True):
            below = " " * len(head)
            lines += _folded(of(row), head, below) + _folded(places(row.lines), below, below)
    lines += [line for note in notes(found) for line in _folded(note)]
    if found.untuned:
        lines.append(untuned(found))
    return "\n".join(lines + [line for each in found.untuned for line in _folded(suggestion(each), "  ", "    ")])


def _folded(said: str, first: str = "", others: str = "") -> list[str]:
    return textwrap.wrap(said, WIDTH, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)
