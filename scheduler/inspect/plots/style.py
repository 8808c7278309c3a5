"""What pictures share: sizes, colours on a light and on a dark ground, and how a figure becomes a file."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import html
import importlib.util
import io
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from scheduler.core.errors import MissingPackage

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class Theme:
    """Colours; those that tell things apart are Okabe and Ito's, which colour-blind readers tell apart, too.

    Attributes:
      ground, ink, faint, grid: of the paper, of words and lines, of what matters less, and of what matters least.
      ours, xla, third, bad: the schedules that were searched, XLA's programs, something else, and what failed.
      several: for what has many kinds, in the order of use.
      magnitude: from the best, which stands out from the ground, to the worst.
    """

    ground: str
    ink: str
    faint: str
    grid: str
    ours: str
    xla: str
    third: str
    bad: str
    several: tuple[str, ...]
    magnitude: tuple[str, ...]


LIGHT = Theme(
    ground="#ffffff",
    ink="#1f2328",
    faint="#59636e",
    grid="#d8dee4",
    ours="#0072b2",
    xla="#c75000",
    third="#008763",
    bad="#b3407f",
    several=("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#8c8c8c", "#d55e00", "#56b4e9", "#6a51a3"),
    magnitude=("#083a7a", "#1c6bb0", "#6baed6", "#e3eef9"),
)
DARK = Theme(
    ground="#0d1117",
    ink="#e6edf3",
    faint="#9198a1",
    grid="#2b323b",
    ours="#58b5ec",
    xla="#f39c3d",
    third="#2fc79b",
    bad="#e58abf",
    several=("#58b5ec", "#f0b32e", "#2fc79b", "#e08fbd", "#a0a0a0", "#ee7733", "#2f7fc1", "#a992dd"),
    magnitude=("#d2e3f3", "#8fc2de", "#2f7fbc", "#0a3a75"),
)
# Inches: a slide of 16 to 9, on which 12 points are read from the last row.
WIDTH, HEIGHT = 10.0, 5.625
DPI = 160
_TEXT = 12.0
_LINE = 106  # letters of the smaller kind
# Of one width as far as may be: a viewer without the first has the second, or a narrower one.
_FONT: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Geneva", "Arial", "Helvetica", "sans-serif"],
    "font.size": _TEXT,
}


def available() -> bool:
    """Whether matplotlib is here."""
    return importlib.util.find_spec("matplotlib") is not None


def require() -> None:
    """Asks before anything is computed for a picture.

    Raises:
      MissingPackage: matplotlib is not installed.
    """
    if not available():
        raise MissingPackage("pictures need matplotlib, which is not installed: pip install 'tile-scheduler[plots]'")


def theme(dark: bool) -> Theme:
    return DARK if dark else LIGHT


@contextlib.contextmanager
def drawing(dark: bool) -> Iterator[Theme]:
    """Within, what is drawn looks as all pictures do; nothing of a program's own settings of matplotlib counts.

    Raises:
      MissingPackage: matplotlib is not installed.
    """
    require()
    from matplotlib import style

    look = theme(dark)
    settings = _FONT | {
        "figure.facecolor": look.ground,
        "savefig.facecolor": look.ground,
        "axes.facecolor": look.ground,
        "axes.edgecolor": look.faint,
        "axes.labelcolor": look.ink,
        "axes.titlesize": _TEXT + 1,
        "axes.titlelocation": "left",
        "axes.titlecolor": look.ink,
        "axes.labelsize": _TEXT,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "grid.color": look.grid,
        "grid.linewidth": 0.8,
        "hatch.color": look.faint,
        "hatch.linewidth": 0.7,
        "legend.frameon": False,
        "legend.fontsize": _TEXT - 1,
        "legend.labelcolor": look.ink,
        "text.color": look.ink,
        "xtick.color": look.faint,
        "xtick.labelcolor": look.ink,
        "xtick.labelsize": _TEXT - 1,
        "ytick.color": look.faint,
        "ytick.labelcolor": look.ink,
        "ytick.labelsize": _TEXT - 1,
    }
    with style.context(["default", settings]):
        yield look


def figure(title: str, look: Theme, *, subtitle: str = "", height: float = HEIGHT) -> Figure:
    """An empty one of the width of a slide, under its title and how to read it; a reader of screens says both."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    said = textwrap.wrap(subtitle, _LINE)
    head = 0.5 + 0.21 * len(said)  # inches
    layout = ConstrainedLayoutEngine(
        w_pad=0.1, h_pad=0.08, wspace=0.05, hspace=0.05, rect=(0.006, 0.01, 0.988, 1 - head / height)
    )
    made = Figure(figsize=(WIDTH, height), dpi=DPI, layout=layout, facecolor=look.ground)
    made.set_label(f"{title}: {subtitle}" if subtitle else title)
    made.text(0.014, 1 - 0.13 / height, title, va="top", fontsize=_TEXT + 3, fontweight="bold", color=look.ink)
    for number, line in enumerate(said):
        y = 1 - (0.43 + 0.21 * number) / height
        made.text(0.014, y, line, va="top", fontsize=_TEXT - 1, color=look.faint)
    return made


def ratio_axis(axes: Axes, which: Literal["x", "y"]) -> None:
    """Ratios in the logarithm: twice as fast is as far from 1 as half as fast."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axis = axes.xaxis if which == "x" else axes.yaxis
    axes.set(**{f"{which}scale": "log"})
    low, high = sorted(axis.get_view_interval())
    wide = (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)
    close = (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.4, 1.6, 1.8, 2)
    closer = tuple(0.9 + 0.02 * step for step in range(16))
    ticks = wide if high / low > 2.2 else close if high / low > 1.25 else closer
    axis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}x"))
    axis.set_minor_locator(NullLocator())


def plain_log(axis: Axis) -> None:
    """Powers of ten as people write them, no smaller ticks."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = sorted(axis.get_view_interval())
    subs = (1.0,) if high > 50 * low else (1.0, 2.0, 5.0) if high > 8 * low else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
    axis.set_major_locator(LogLocator(subs=subs, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_locator(NullLocator())


def label_lines(axes: Axes, lines: Sequence[tuple[float, str, str]]) -> None:
    """Words in the colour of each horizontal line, at its right end: height, words, colour; none over another."""
    low, high = axes.get_ylim()
    inches = HEIGHT - 1.6
    placed = low - (high - low)
    for height, words, colour in sorted(lines):
        tall = (words.count("\n") + 1) * 0.2 / inches * (high - low)
        place = max(height, placed + tall / 2)
        placed = place + tall / 2
        axes.text(
            1.012, place, words, transform=axes.get_yaxis_transform(), va="center", color=colour, fontsize=11
        )  # fmt: skip


def cloud(axes: Axes, x: npt.ArrayLike, y: npt.ArrayLike, colour: str, size: float) -> None:
    """Many points as one path: in an SVG each takes a twentieth of what a marker does."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    # A dot is a line of no length with round ends; renderers leave out one of exactly none.
    ends = np.stack([np.column_stack([x, y]), np.column_stack([np.multiply(x, 1.0001), y])], axis=1).reshape(-1, 2)
    codes = np.tile([Path.MOVETO, Path.LINETO], len(ends) // 2)
    axes.add_patch(
        PathPatch(Path(ends, codes), fill=False, ec=colour, lw=size, capstyle="round", alpha=0.75, snap=False)
    )


def time_unit(seconds: float) -> tuple[float, str]:
    """By what to divide times of about this length, and the unit they then have."""
    units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
    return next(((scale, unit) for scale, unit in units if seconds >= 2 * scale), (1e-6, "µs"))


def legend_right(axes: Axes, handles: Sequence[Any], title: str = "") -> None:
    """What colours stand for, beside the axes, where it hides nothing."""
    axes.legend(
        handles=list(handles), loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0, title=title or None,
        alignment="left", handlelength=1.3,
    )  # fmt: skip


def svg(drawn: Figure) -> str:
    """`drawn` as an SVG element: the same text for the same figure, its ids unlike those of any other."""
    from matplotlib import style

    file = io.StringIO()
    with style.context(["default", _FONT | {"svg.fonttype": "none", "svg.hashsalt": "tile-scheduler"}]):
        drawn.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(?<= d=")[^"]+', lambda path: re.sub(r"\d+\.\d+", _shorter, path[0]), text)
    # matplotlib's ids are digests of places to the last bit, which differ between runs: here they are counted.
    ids = {name: f"{number}" for number, name in enumerate(re.findall(r'\bid="([^"]+)"', text))}
    text = re.sub(r'(\bid="|href="#|url\(#)([^")]+)', lambda found: f"{found[1]}@{ids[found[2]]}", text)
    own = f"p{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    text = re.sub(r'(\bid="|href="#|url\(#)@', rf"\g<1>{own}-", text)
    # What the element says of all elements would hold for all of a page.
    text = text.replace("*{stroke-linejoin", f"#{own} *{{stroke-linejoin")
    label = html.escape(str(drawn.get_label()), quote=True)
    return text.replace("<svg ", f'<svg id="{own}" role="img" aria-label="{label}" ', 1).rstrip() + "\n"


def _shorter(number: re.Match[str]) -> str:
    """A hundredth of a point is less than anybody sees."""
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")


def png(drawn: Figure) -> bytes:
    """`drawn` as a PNG of 1,600 pixels' width."""
    from matplotlib import style

    file = io.BytesIO()
    with style.context(["default", _FONT]):
        drawn.savefig(file, format="png", dpi=DPI, metadata={"Software": None})
    return file.getvalue()
