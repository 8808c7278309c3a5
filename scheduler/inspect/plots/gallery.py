"""Draws all plots of a cache and of recorded sweeps. The documentation's plots use the shipped records."""

from __future__ import annotations

import functools
import hashlib
import html
import io
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scheduler.core.errors import NothingToDraw
from scheduler.core.records import Record, key_of
from scheduler.inspect import case as cases_of
from scheduler.inspect.case import Case
from scheduler.inspect.plots.roofline import gains, roofline
from scheduler.inspect.plots.search import best_so_far, predictions
from scheduler.inspect.plots.style import DPI, FONT
from scheduler.inspect.plots.tiles import block_sizes, tiles
from scheduler.inspect.plots.time_breakdown import landscape, time_breakdown

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def gallery(
    records: Sequence[Record], recordings: Sequence[Path], *, dark: bool = False
) -> Iterator[tuple[str, Figure | str]]:
    """Yields the name of each plot with its figure, or with the reason why it cannot be drawn.

    Plots of many problems use all records of one chip. Plots of one problem use the recorded problem with the most
    measured schedules. Without recordings, they use the tuned problem with the most schedules.
    """
    known = [case for case in map(cases_of.of_record, records) if case is not None]
    swept = {path: cases_of.of_recording(path) for path in recordings}
    path = max(swept, key=lambda path: len(swept[path].measured()), default=None)
    one = swept[path] if path is not None else _largest(known)
    of_all: dict[str, Callable[[], Figure]] = {
        "gains": lambda: gains(records, dark=dark),
        "roofline": lambda: roofline(known, dark=dark),
        "best-so-far": lambda: best_so_far(_replayed(path), dark=dark),
        "predictions": lambda: predictions([one] if path is not None and one is not None else known, dark=dark),
    }
    of_one: dict[str, Callable[[Case], Figure]] = {
        "landscape": lambda case: landscape(case, dark=dark),
        "block-sizes": lambda case: block_sizes(_tuned(case, records), dark=dark),
        "tiles": lambda case: tiles(_tuned(case, records), dark=dark),
        "time-breakdown": lambda case: time_breakdown(_tuned(case, records), dark=dark),
    }
    for name, draw in of_all.items():
        yield name, _drawn(draw)
    for name, draw_one in of_one.items():
        yield name, _drawn(functools.partial(_of_one, draw_one, one))


def _drawn(draw: Callable[[], Figure]) -> Figure | str:
    try:
        return draw()
    except NothingToDraw as missing:
        return str(missing)


def _of_one(draw: Callable[[Case], Figure], one: Case | None) -> Figure:
    if one is None:
        raise NothingToDraw("it needs a record or a recorded sweep of a problem; tune a problem first")
    return draw(one)


def _replayed(path: Path | None) -> Case:
    if path is None:
        raise NothingToDraw(
            "it needs the trials of a search, which shipped records do not keep: name a problem that was tuned here, "
            "as in tile-scheduler plot best-so-far matmul m=4096 n=4096 k=4096, or give the file of a tile-scheduler "
            "sweep by --recording"
        )
    return cases_of.of_replay(path)


def _largest(known: Sequence[Case]) -> Case | None:
    """Returns the case with the most schedules among those won by a searched schedule, so that all its choices vary."""

    def schedules(case: Case) -> int:
        libraries = {kernel.backend for kernel in case.operation.kernels if kernel.library or kernel.vendor}
        return case.record.space if case.record and case.record.winner.backend not in libraries else -1

    return max((case for case in known if schedules(case) >= 0), key=schedules, default=None)


def _tuned(one: Case, records: Sequence[Record]) -> Case:
    """Returns the case with its record if one exists, to use the best schedule of the final comparison."""
    key = key_of(one.operation, one.problem, one.hardware)
    record = next((record for record in records if record.key == key), None)
    return one if record is None else Case(one.operation, one.problem, one.hardware, record)


# ------------------------------------------------------------------------------
# Converts a figure to SVG text, or to a PNG.


def svg(drawn: Figure) -> str:
    """Returns `drawn` as an SVG element. The text is reproducible, and its ids are unique among figures."""
    from matplotlib import style

    file = io.StringIO()
    with style.context(["default", FONT | {"svg.fonttype": "none", "svg.hashsalt": "tile-scheduler"}]):
        drawn.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(?<= d=")[^"]+', lambda path: re.sub(r"\d+\.\d+", _shorter, path[0]), text)
    # matplotlib derives ids from floating-point coordinates, which differ between runs in the last bit. They are
    # replaced by numbers.
    ids = {name: f"{number}" for number, name in enumerate(re.findall(r'\bid="([^"]+)"', text))}
    text = re.sub(r'(\bid="|href="#|url\(#)([^")]+)', lambda found: f"{found[1]}@{ids[found[2]]}", text)
    own = f"p{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    text = re.sub(r'(\bid="|href="#|url\(#)@', rf"\g<1>{own}-", text)
    # A global CSS selector would apply to the whole page, so it is restricted to this element.
    text = text.replace("*{stroke-linejoin", f"#{own} *{{stroke-linejoin")
    label = html.escape(str(drawn.get_label()), quote=True)
    return text.replace("<svg ", f'<svg id="{own}" role="img" aria-label="{label}" ', 1).rstrip() + "\n"


def _shorter(number: re.Match[str]) -> str:
    """Rounds a coordinate to a hundredth of a point, which is not visible."""
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")


def png(drawn: Figure) -> bytes:
    """Returns `drawn` as a PNG, 1,600 pixels wide."""
    from matplotlib import style

    file = io.BytesIO()
    with style.context(["default", FONT]):
        drawn.savefig(file, format="png", dpi=DPI, metadata={"Software": None})
    return file.getvalue()
