"""XLA's time over ours by problem: of the best searched schedule, and of what answers in the end."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from scheduler.core.errors import NothingToDraw
from scheduler.core.records import Record
from scheduler.inspect.plots.axes import ratio_axis
from scheduler.inspect.plots.style import Theme, drawing, figure
from search_spaces import spelled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# So many bars can be named, each on a line of its own.
_NAMED = 22


@dataclasses.dataclass(frozen=True)
class Gain:
    """XLA's time over another, of one record.

    Attributes:
      searched: over that of the best searched schedule; None where none ran.
      final: over that of the winner, which may be XLA.
    """

    operation: str
    problem: str
    searched: float | None
    final: float

    @property
    def beaten(self) -> bool:
        """Whether XLA answers though something else ran."""
        return self.searched is not None and self.searched != self.final

    @classmethod
    def of(cls, record: Record) -> Gain | None:
        """None where XLA did not run."""
        library = record.library_entry
        if library is None:
            return None
        rival = next((entry for entry in record.entries if entry.backend != record.library), None)
        xla_s = library.measurement.median_s
        return cls(
            record.key.operation,
            spelled(record.key.operation, record.key.problem),
            None if rival is None else xla_s / rival.measurement.median_s,
            xla_s / record.winner.measurement.median_s,
        )


def gains(records: Sequence[Record], *, dark: bool = False) -> Figure:
    """Of records of one chip, by operation, the least gain first; those in which XLA did not run are left out.

    Raises:
      NothingToDraw: XLA ran in none of them.
    """
    found = [gain for gain in map(Gain.of, records) if gain is not None]
    if not found:
        raise NothingToDraw("no record has a time of XLA to compare with; tune a problem first")
    chips = dict.fromkeys(record.key.hardware.partition(" (")[0] for record in records)
    found.sort(key=lambda gain: (gain.operation, gain.final, gain.searched or 0.0))
    title = f"XLA's time over ours, {' and '.join(chips)}: {len(found)} problem{'s' * (len(found) > 1)}"
    subtitle = "bar: what answers a call; dot: the best searched schedule, where XLA answers in its place"
    with drawing(dark) as look:
        if len(found) <= _NAMED:
            made = figure(title, look, subtitle=subtitle, height=max(2.4, 1.5 + 0.42 * len(found)))
            _named(made.add_subplot(), found, look)
        else:
            made = figure(title, look, subtitle=subtitle)
            _by_rank(made.add_subplot(), found, look)
        return made


def _named(axes: Axes, found: Sequence[Gain], look: Theme) -> None:
    """One line for each."""
    final = [gain.final for gain in found]
    several = len({gain.operation for gain in found}) > 1
    names = [f"{gain.operation} {gain.problem}" if several else gain.problem for gain in found]
    axes.barh(range(len(found)), np.array(final) - 1, left=1, height=0.62, color=look.ours)
    _beaten(axes, [(gain.searched, place) for place, gain in enumerate(found) if gain.beaten], look)
    axes.set_yticks(range(len(found)), ["\n".join(textwrap.wrap(name, 56)) for name in names])
    axes.set_ylim(-0.6, len(found) - 0.4)
    for place, value in enumerate(final):
        axes.annotate(
            f"{value:.2f}x", (value, place), (6, 0), textcoords="offset points", va="center_baseline", color=look.ink
        )
    axes.set_xlim(_lowest(found), max(1.05, max(final) ** 1.12))
    ratio_axis(axes, "x")
    axes.axvline(1.0, color=look.xla, lw=1.6)
    axes.grid(axis="x")
    axes.set_xlabel("XLA's time over ours (right of the line: ours is faster)")


def _by_rank(axes: Axes, found: Sequence[Gain], look: Theme) -> None:
    """Too many for names: columns in groups by operation, with the mean of each."""
    gap, start, least = len(found) * 0.025, 0.0, len(found) * 0.13  # so wide is what stands above a group
    top = max(1.05, max(gain.final for gain in found) ** 1.05)
    for operation, of_it in itertools.groupby(found, lambda gain: gain.operation):
        group = list(of_it)
        final = np.array([gain.final for gain in group])
        spare = max(0.0, least - len(group)) / 2
        start += spare
        axes.bar(start + np.arange(len(group)), final - 1, bottom=1, width=0.86, color=look.ours, lw=0)
        _beaten(axes, [(start + place, gain.searched) for place, gain in enumerate(group) if gain.beaten], look)
        mean = math.exp(statistics.fmean(np.log(final)))
        axes.annotate(
            f"{operation}\n{len(group)} problems\ngeomean {mean:.2f}x", (start + (len(group) - 1) / 2, top), (0, 4),
            textcoords="offset points", ha="center", va="bottom", color=look.ink, fontsize=11, annotation_clip=False,
        )  # fmt: skip
        start += len(group) + spare + gap
    axes.axhline(1.0, color=look.xla, lw=1.6)
    axes.annotate(
        "XLA", (start - gap, 1.0), (6, 0), textcoords="offset points", color=look.xla, va="center", fontweight="bold"
    )
    axes.set_xlim(-1.5, start - gap + 0.5)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.set_ylim(_lowest(found), top)
    ratio_axis(axes, "y")
    axes.grid(axis="y")
    axes.set_ylabel("XLA's time over ours")


def _beaten(axes: Axes, points: Sequence[tuple[float | None, float | None]], look: Theme) -> None:
    if points:
        axes.plot(*zip(*points, strict=True), "o", color=look.xla, ms=4.5, mew=0)


def _lowest(found: Sequence[Gain]) -> float:
    return min([0.97, *(gain.searched / 1.03 for gain in found if gain.beaten and gain.searched)])
