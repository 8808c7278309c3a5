"""Plots how one launch spends its time, by the model, next to the measured time."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from scheduler.core.text import digits
from scheduler.inspect import landscape as landscapes
from scheduler.inspect.case import Case
from scheduler.inspect.explain import GROUPS, group_of
from scheduler.inspect.landscape import Landscape
from scheduler.inspect.plots.style import Theme, drawing, figure, fold, legend_right, legible_on, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch


# Terms below this share of a launch are not shown separately.
_SHOWN = 0.004


def time_breakdown(case: Case, *, backend: str | None = None, dark: bool = False) -> Figure:
    """Plots the best schedule of a backend, by default the best searched one, or the top prediction.

    Raises:
      NothingToDraw: No kernel except the library's supports the problem.
      ValueError: There is no such backend.
    """
    best = case.best_searched(backend)
    parts = case.model(best.kernel).breakdown(case.footprint(best))
    overlapped = {name: float(np.max(seconds)) for name, seconds in parts.overlapped.items()}
    serial = {name: float(np.max(seconds)) for name, seconds in parts.serial.items()}
    steps_s = float(np.max(parts.steps_s))
    total = steps_s + sum(serial.values())
    scale, unit = time_unit(total)
    subtitle = case.text(best)
    with drawing(dark) as look:
        made = figure(f"Where a launch of {case.operation.name} spends its time", look, subtitle=subtitle)
        upper, lower = made.subplots(2, 1, height_ratios=(3, 4), sharex=True)
        bars = {"model": total}
        if best.seconds is not None:
            bars[case.took] = best.seconds
        if (library_s := case.library_s) is not None:
            bars["XLA"] = library_s
        # Bars of much longer times are cut at the edge, to leave room for the others.
        inner = max(total, bars.get(case.took, 0.0), *overlapped.values())
        upper.set_xlim(0, min(1.12 * max(inner, bars.get("XLA", 0.0)), 1.6 * inner) / scale)
        _stacked(upper, bars, _parts(overlapped, steps_s, serial, look), scale, look)
        _steps(lower, overlapped, steps_s, scale, look)
        lower.set_xlabel(f"time, {unit}")
        return made


def _colours(look: Theme) -> Mapping[str, str]:
    return dict(zip(GROUPS, look.several, strict=False))


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the predicted time. The parts add up to it."""

    name: str
    seconds: float
    colour: str
    alpha: float = 1.0
    hatch: str | None = None


def _parts(overlapped: Mapping[str, float], steps_s: float, serial: Mapping[str, float], look: Theme) -> list[Part]:
    colours, longest = _colours(look), max(overlapped, key=lambda name: overlapped[name])
    first, colour = min(overlapped[longest], steps_s), colours[group_of(longest)]
    steps = [
        Part(f"steps: {longest}", first, colour),
        Part("steps: not hidden behind it", steps_s - first, colour, hatch="////"),
    ]
    terms = sorted(serial.items(), key=lambda term: -term[1])
    tones = np.linspace(1.0, 0.35, max(1, len(terms)))
    return steps + [Part(n, s, colours[group_of(n)], float(tone)) for (n, s), tone in zip(terms, tones, strict=False)]


def _stacked(axes: Axes, bars: Mapping[str, float], parts: Sequence[Part], scale: float, look: Theme) -> None:
    """Draws the prediction as stacked parts, and the measured times."""
    from matplotlib.patches import Patch

    names, left, handles = list(bars)[::-1], 0.0, []
    for part in parts:
        if part.seconds >= _SHOWN * bars["model"]:
            how: dict[str, Any] = {"color": part.colour, "alpha": part.alpha, "hatch": part.hatch}
            how |= {"ec": look.ground, "lw": 0.8}
            axes.barh(names.index("model"), part.seconds / scale, left=left / scale, height=0.66, **how)
            handles.append(Patch(label=f"{part.name}, {digits(part.seconds / scale)}", fc=how.pop("color"), **how))
        left += part.seconds
    for name in (name for name in bars if name != "model"):  # in a fixed order, so that plots are reproducible
        axes.barh(names.index(name), bars[name] / scale, height=0.66, color=look.xla if name == "XLA" else look.faint)
    edge = axes.get_xlim()[1]
    for name, seconds in bars.items():
        beyond = seconds / scale > edge
        axes.annotate(
            f"{digits(seconds / scale)}{' →' if beyond else ''}", (min(edge, seconds / scale), names.index(name)),
            (-5 if beyond else 5, 0), textcoords="offset points", va="center_baseline",
            ha="right" if beyond else "left", color=look.ground if beyond else look.ink,
        )  # fmt: skip
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
    legend_right(axes, handles, "one after the other")


def _steps(axes: Axes, overlapped: Mapping[str, float], steps_s: float, scale: float, look: Theme) -> None:
    """Draws the overlapped terms of the steps, each with the time that it would take alone."""
    from matplotlib.patches import Patch

    colours = _colours(look)
    shown = sorted(((s, n) for n, s in overlapped.items() if s >= _SHOWN * steps_s), reverse=True)
    places: Sequence[int] = range(len(shown))[::-1]
    for place, (seconds, name) in zip(places, shown, strict=True):
        axes.barh(place, seconds / scale, height=0.66, color=colours[group_of(name)])
        axes.annotate(
            digits(seconds / scale), (seconds / scale, place), (5, 0), textcoords="offset points", va="center_baseline",
            color=look.ink, fontsize=10, bbox={"fc": look.ground, "ec": "none", "pad": 0.6},
        )  # fmt: skip
    axes.axvline(steps_s / scale, color=look.ink, lw=1.2, ls="--")
    axes.annotate(
        "all steps", (steps_s / scale, 1.0), (0, 1), xycoords=("data", "axes fraction"), textcoords="offset points",
        ha="center", va="bottom", color=look.ink, fontsize=10,
    )  # fmt: skip
    axes.set_yticks(list(places), [name for _, name in shown])
    axes.tick_params(axis="y", length=0, labelsize=10)
    axes.grid(axis="x")
    used = [group for group in GROUPS if any(group_of(name) == group for _, name in shown)]
    title = "at once in the steps, each\nas long as it takes alone"
    legend_right(axes, [Patch(color=colours[group], label=group) for group in used], title)


# ------------------------------------------------------------------------------
# Plots the best time over two choices, measured if known, and the reasons for pruned pairs.

_HATCHES = ("///", "\\\\\\", "xxx", "---", "+++", "|||", "//", "xx")
# Times above this multiple of the best have one colour. Above this number of cells, numbers are omitted.
_SCALE = 1.6
_NUMBERED = 130
# Width of a reason's line in inches, and its font size in points.
_REASON, _SMALL = 2.1, 10.5


def landscape(
    case: Case, *, over: tuple[str, str] | None = None, backend: str | None = None, dark: bool = False
) -> Figure:
    """Plots the best times of a backend over two choices.

    The default backend is that of the best searched schedule, and the default choices are the most important ones.

    Raises:
      NothingToDraw: The backend has no legal schedule, or fewer than two choices.
      ValueError: There is no such backend, or the backend has no such choices.
    """
    land = landscapes.landscape(case, over=over, backend=backend)
    scale, unit = time_unit(land.best_s)
    source = f"{land.took}, {land.measured:,} schedules" if land.measured else "predicted by the model"
    subtitle = f"{case.problem} on {case.hardware.kind}, {land.backend}: least time of each pair in {unit}, {source}"
    with drawing(dark) as look:
        from matplotlib.patches import Rectangle

        made = figure(f"{case.operation.name} over {land.x} and {land.y}", look, subtitle=subtitle)
        axes, words = made.subplots(1, 2, width_ratios=(1, 0.36))
        patches = _cells(axes, land, scale, look)
        axes.set_xticks(range(len(land.xs)), list(map(str, land.xs)))
        axes.set_yticks(range(len(land.ys)), list(map(str, land.ys)))
        axes.set(xlabel=land.x, ylabel=land.y, xlim=(-0.5, len(land.xs) - 0.5), ylim=(-0.5, len(land.ys) - 0.5))
        axes.tick_params(length=0)
        for side in axes.spines.values():
            side.set_visible(False)
        if (place := land.place(land.best.schedule)) is not None:  # a frame around the highlighted schedule
            corner = (place[0] - 0.48, place[1] - 0.48)
            axes.add_patch(Rectangle(corner, 0.96, 0.96, fill=False, ec=look.xla, lw=3, zorder=4, clip_on=False))
        _bar(axes, look)
        _legend(words, patches, look)
        return made


def _cells(axes: Axes, land: Landscape, scale: float, look: Theme) -> list[Patch]:
    """Draws the cells, and returns the legend handle of each reason."""
    from matplotlib.patches import Patch, Rectangle

    shades = _shades(look)
    hatches = dict(zip(land.reasons, itertools.cycle(_HATCHES)))
    size = max(7.5, min(13.0, 78 / max(len(land.xs), 1)))
    untried = False
    for j, row in enumerate(land.cells):
        for i, cell in enumerate(row):
            corner = (i - 0.48, j - 0.48)
            if cell.best_s is not None:
                share = min(1.0, np.log(cell.best_s / land.best_s) / np.log(_SCALE))
                colour = shades(share)
                axes.add_patch(Rectangle(corner, 0.96, 0.96, color=colour, lw=0))
                if len(land.xs) * len(land.ys) <= _NUMBERED:
                    axes.text(
                        i, j, digits(cell.best_s / scale), ha="center", va="center_baseline", fontsize=size,
                        color=legible_on(colour),
                    )  # fmt: skip
            elif cell.legal:
                untried = True
                axes.text(i, j, "?", ha="center", va="center_baseline", color=look.faint, fontsize=size)
            else:
                axes.add_patch(
                    Rectangle(corner, 0.96, 0.96, fill=False, ec=look.faint, lw=0, hatch=hatches[cell.reason])
                )
    patches = [
        Patch(fill=False, ec=look.faint, lw=0.5, hatch=hatch, label="\n".join(fold(reason, _REASON, _SMALL)))
        for reason, hatch in hatches.items()
    ]
    return [*patches, *([Patch(fill=False, lw=0, label="?  legal, not tried")] if untried else [])]


def _shades(look: Theme) -> LinearSegmentedColormap:
    """Returns the colour map, from the best to the worst."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("times", look.magnitude)


def _bar(axes: Axes, look: Theme) -> None:
    """Adds a colour bar, in multiples of the best time."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm

    assert axes.figure is not None
    ticks = [1, 1.1, 1.2, 1.4, _SCALE]
    bar = axes.figure.colorbar(
        ScalarMappable(LogNorm(1, _SCALE), cmap=_shades(look)), ax=axes, ticks=ticks, fraction=0.05, aspect=28, pad=0.02
    )
    bar.ax.minorticks_off()
    bar.ax.set_yticklabels(["best", "1.1x", "1.2x", "1.4x", f"{_SCALE}x or more"])
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0)
    bar.ax.invert_yaxis()


def _legend(axes: Axes, patches: list[Patch], look: Theme) -> None:
    from matplotlib.patches import Patch

    axes.set_axis_off()
    frame = Patch(fill=False, ec=look.xla, lw=3, label="holds the best searched\nschedule")
    axes.legend(
        handles=[frame, *patches], loc="upper left", bbox_to_anchor=(0, 1), borderaxespad=0.0, handlelength=1.8,
        handleheight=1.6, labelspacing=0.9, alignment="left", fontsize=_SMALL,
    )  # fmt: skip
