"""Common style of all plots: sizes, fonts, and colours for light and dark backgrounds."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import html
import importlib.util
import io
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from scheduler.core.errors import MissingPackage

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class Theme:
    """Colours of a plot. The colours of categories are Okabe and Ito's palette, suitable for colour-blind readers.

    Attributes:
      ground, ink, faint, grid: Background, text and lines, less important elements, and grid lines.
      ours, xla, third, bad: Searched schedules, XLA's programs, a third category, and failures.
      several: Colours for many categories, in the order of use.
      magnitude: Colours of a scale from the best value, which contrasts most with the background, to the worst.
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
# Inches: a 16:9 slide, on which 12-point text is legible from the last row.
WIDTH, HEIGHT = 10.0, 5.625
DPI = 160
_TEXT = 12.0
# Side margin of titles in inches, and a factor for viewers with wider fonts than the one measured here.
_MARGIN, _WIDER = 0.14, 1.04
# Fonts of similar width: a viewer without the first uses the second, or a narrower one.
FONT: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Geneva", "Arial", "Helvetica", "sans-serif"],
    "font.size": _TEXT,
}


def available() -> bool:
    """Returns whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def require() -> None:
    """Checks for matplotlib before any data for a plot is computed.

    Raises:
      MissingPackage: matplotlib is not installed.
    """
    if not available():
        raise MissingPackage("pictures need matplotlib, which is not installed: pip install 'tile-scheduler[plots]'")


def legible_on(colour: Sequence[float]) -> str:
    """Returns black or white, whichever has the higher contrast on `colour` (sRGB red, green and blue, 0 to 1)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour[:3]]
    luminance = sum(share * c for share, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    # The contrasts of WCAG 2 are equal where (luminance + 0.05)^2 is 0.05 x 1.05.
    return "#000000" if luminance > 0.179 else "#ffffff"


@contextlib.contextmanager
def drawing(dark: bool) -> Iterator[Theme]:
    """Applies the common style within the context, and ignores the program's own matplotlib settings.

    Raises:
      MissingPackage: matplotlib is not installed.
    """
    require()
    from matplotlib import style

    look = DARK if dark else LIGHT
    settings = FONT | {
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
        "text.parse_math": False,
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
    """Returns an empty figure as wide as a slide, with a title and a subtitle.

    Its label for screen readers contains both.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    said = fold(subtitle, WIDTH - 2 * _MARGIN)
    head = 0.5 + 0.21 * len(said)  # inches
    layout = ConstrainedLayoutEngine(
        w_pad=0.1, h_pad=0.08, wspace=0.05, hspace=0.05, rect=(0.006, 0.01, 0.988, 1 - head / height)
    )
    made = Figure(figsize=(WIDTH, height), dpi=DPI, layout=layout, facecolor=look.ground)
    made.set_label(f"{title}: {subtitle}" if subtitle else title)
    left, size = _MARGIN / WIDTH, _TEXT + 3
    (shown,) = fold(title, WIDTH - 2 * _MARGIN, size, bold=True, most=1)
    made.text(left, 1 - 0.13 / height, shown, va="top", fontsize=size, fontweight="bold", color=look.ink)
    for number, line in enumerate(said):
        y = 1 - (0.43 + 0.21 * number) / height
        made.text(left, y, line, va="top", fontsize=_TEXT - 1, color=look.faint)
    return made


@functools.cache
def letters_width(text: str, size: float = _TEXT - 1, *, bold: bool = False) -> float:
    """Returns the width in inches of one line of `text` in a font of `size` points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(family=["DejaVu Sans"], weight="bold" if bold else "normal", size=size)
    return float(text_to_path.get_text_width_height_descent(text, font, ismath=False)[0]) / 72


def fold(
    text: str, inches: float, size: float = _TEXT - 1, *, bold: bool = False, most: int | None = None
) -> list[str]:
    """Wraps `text` to lines of at most `inches`, by the widths of its letters. Longer words are broken.

    Args:
      most: Maximum number of lines. If there are more, the last line kept ends in an ellipsis.
    """

    def fits(line: str) -> bool:
        return letters_width(line, size, bold=bold) * _WIDER <= inches

    lines: list[str] = []
    for word in text.split():
        if lines and fits(f"{lines[-1]} {word}"):
            lines[-1] += f" {word}"
            continue
        while len(word) > 1 and not fits(word):
            end = next((n for n in range(len(word) - 1, 1, -1) if fits(word[:n])), 1)
            end = next((n for n in range(end, end // 2, -1) if word[n - 1] in "_:.,=/"), end)
            lines.append(word[:end])
            word = word[end:]
        lines.append(word)
    if most is None or len(lines) <= most:
        return lines
    last = f"{lines[most - 1]} …"
    while len(last) > 1 and not fits(last):
        last = f"{last[:-2]}…"
    return [*lines[: most - 1], last]


# ------------------------------------------------------------------------------
# Helpers for axes: scales, line labels, legends.


def plain_log(axis: Axis) -> None:
    """Sets a logarithmic scale with plain numbers as labels, and no minor ticks."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = sorted(axis.get_view_interval())
    subs = (1.0,) if high > 50 * low else (1.0, 2.0, 5.0) if high > 8 * low else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
    base = 10.0 if high < 10**5.5 * low else 100.0
    axis.set_major_locator(LogLocator(base=base, subs=subs, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_locator(NullLocator())


def label_lines(axes: Axes, lines: Sequence[tuple[float, str, str]]) -> None:
    """Labels horizontal lines at their right ends without overlaps, each given as height, text and colour."""
    low, high = axes.get_ylim()
    line = _LINE / _DOWN * (high - low)
    lines = sorted(lines)
    tall = [(words.count("\n") + 1) * line for _, words, _ in lines]
    for place, (_, words, colour) in zip(spread([height for height, *_ in lines], tall, high), lines, strict=True):
        axes.text(
            1.012, place, words, transform=axes.get_yaxis_transform(), va="center", color=colour, fontsize=11
        )  # fmt: skip


# Inches: the height of a label line, and the minimum height of the axes.
_LINE, _DOWN = 0.2, 3.3


def spread(places: Sequence[float], tall: Sequence[float], top: float) -> list[float]:
    """Returns the centres of items of heights `tall`, as close to `places` (ascending) as possible without overlaps.

    No item extends beyond `top`. Items that would are moved down.
    """
    middles: list[float] = []
    end = -np.inf
    for place, each in zip(places, tall, strict=True):
        middles.append(max(place, end + each / 2))
        end = middles[-1] + each / 2
    end = top
    for number in reversed(range(len(middles))):
        middles[number] = min(middles[number], end - tall[number] / 2)
        end = middles[number] - tall[number] / 2
    return middles


def time_unit(seconds: float) -> tuple[float, str]:
    """Returns the divisor and the unit for times of about this length."""
    units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
    return next(((scale, unit) for scale, unit in units if seconds >= 2 * scale), (1e-6, "µs"))


def legend_right(axes: Axes, handles: Sequence[Any], title: str = "") -> None:
    """Adds a legend to the right of the axes, where it hides no data."""
    axes.legend(
        handles=list(handles), loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0, title=title or None,
        alignment="left", handlelength=1.3,
    )  # fmt: skip


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
