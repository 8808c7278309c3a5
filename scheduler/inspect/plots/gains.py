"""A library's time over ours by problem: of the best searched schedule, and of what answers in the end."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from scheduler.core.errors import NothingToDraw
from scheduler.core.records import Record
from scheduler.inspect.plots.axes import ratio_axis
from scheduler.inspect.plots.style import Theme, drawing, figure
from search_spaces import load_known, spelled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# So many bars can be named, each on a line of its own.
_NAMED = 22
# Of the width of the axes, what a letter above a group takes.
_LETTER = 0.0098


@dataclasses.dataclass(frozen=True)
class Gain:
    """A library's time over another, of one record.

    Attributes:
      library: XLA, or the vendor's library where that ran and is faster: cuDNN.
      searched: over that of the best searched schedule; None where none ran.
      final: over that of the winner, which may be the library.
    """

    library: str
    operation: str
    problem: str
    searched: float | None
    final: float

    @property
    def beaten(self) -> bool:
        """Whether the library answers though something else ran."""
        return self.searched is not None and self.searched != self.final

    @classmethod
    def of(cls, record: Record) -> Gain | None:
        """None where no library ran, or not each that takes part: XLA alone is not what a vendor's is compared with."""
        libraries = _libraries(record)
        library = record.best(frozenset(libraries))
        vendors = libraries.keys() & record.versions.keys() - {record.library}
        if library is None or not all(record.best(frozenset({vendor})) for vendor in vendors):
            return None
        rival = next((entry for entry in record.entries if entry.backend not in libraries), None)
        library_s = library.measurement.median_s
        return cls(
            libraries[library.backend],
            record.key.operation,
            spelled(record.key.operation, record.key.problem),
            None if rival is None else library_s / rival.measurement.median_s,
            library_s / record.winner.measurement.median_s,
        )


def _libraries(record: Record) -> dict[str, str]:
    """By backend, what it is called: XLA's, and vendors', where the operation is here."""
    named = {record.library: "XLA"}
    try:
        kernels = load_known(record.key.operation).kernels
    except ValueError:
        return named
    return named | {kernel.backend: kernel.vendor for kernel in kernels if kernel.vendor}


def gains(records: Sequence[Record], *, dark: bool = False) -> Figure:
    """Of records of one chip, by operation, the least gain first; those in which no library ran are left out.

    Raises:
      NothingToDraw: none ran in any of them.
    """
    found = [gain for gain in map(Gain.of, records) if gain is not None]
    if not found:
        raise NothingToDraw("no record has a time of a library to compare with; tune a problem first")
    chips = dict.fromkeys(record.key.hardware.partition(" (")[0] for record in records)
    found.sort(key=lambda gain: (gain.operation, gain.final, gain.searched or 0.0))
    libraries = sorted({gain.library for gain in found}, reverse=True)
    whose, count = "The library" if libraries[1:] else libraries[0], f"{len(found)} problem{'s' * (len(found) > 1)}"
    title = f"{whose}'s time over ours, {' and '.join(chips)}: {count}"
    faster = f"{' or '.join(libraries)}, the faster; " if libraries[1:] else ""
    subtitle = f"{faster}bar: what answers a call; dot: the best searched schedule, where a library answers"
    estimated = sum(record.estimated for record in records)
    subtitle += f"; {estimated} of {len(records)} estimated by the compiler, not measured" if estimated else ""
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
    axes.set_xlabel("the library's time over ours (right of the line: ours is faster)")


def _by_rank(axes: Axes, found: Sequence[Gain], look: Theme) -> None:
    """Too many for names: columns in groups by operation, with the mean of each."""
    groups = {operation: list(of_it) for operation, of_it in itertools.groupby(found, lambda gain: gain.operation)}
    said = {operation: _summary(operation, group) for operation, group in groups.items()}
    top = max(1.05, max(gain.final for gain in found) ** 1.05)
    width = float(len(found))
    for _ in range(20):  # Until what stands above each group fits over it, wherever it needs more than its bars do.
        slots = {o: max(len(group), _LETTER * _longest(said[o]) * width) for o, group in groups.items()}
        gap = 0.02 * width
        width = sum(slots.values()) + gap * (len(slots) - 1)
    start = 0.0
    for operation, group in groups.items():
        first = start + (slots[operation] - len(group)) / 2
        axes.bar(
            first + np.arange(len(group)), [g.final - 1 for g in group], bottom=1, width=0.86, color=look.ours, lw=0
        )
        _beaten(axes, [(first + place, gain.searched) for place, gain in enumerate(group) if gain.beaten], look)
        axes.annotate(
            said[operation], (first + (len(group) - 1) / 2, top), (0, 4),
            textcoords="offset points", ha="center", va="bottom", color=look.ink, fontsize=9.5, annotation_clip=False,
        )  # fmt: skip
        start += slots[operation] + gap
    axes.axhline(1.0, color=look.xla, lw=1.6)
    libraries = "\n".join(sorted({gain.library for gain in found}, reverse=True))
    axes.annotate(
        libraries,
        (start - gap, 1.0),
        (6, 0),
        textcoords="offset points",
        color=look.xla,
        va="center",
        fontweight="bold",
    )
    axes.set_xlim(-1.5, start - gap + 0.5)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.set_ylim(_lowest(found), top)
    ratio_axis(axes, "y")
    axes.grid(axis="y")
    axes.set_ylabel("the library's time over ours")


def _summary(operation: str, group: Sequence[Gain]) -> str:
    """What stands above a group: a long name on two lines."""
    name = textwrap.fill(operation.replace("_", " "), 16).replace(" ", "_").replace("\n", "_\n")
    mean = statistics.geometric_mean([gain.final for gain in group])
    return f"{name}\n{len(group)} problem{'s' * (len(group) > 1)}\ngeomean {mean:.2f}x"


def _longest(text: str) -> int:
    return max(map(len, text.split("\n")))


def _beaten(axes: Axes, points: Sequence[tuple[float | None, float | None]], look: Theme) -> None:
    if points:
        axes.plot(*zip(*points, strict=True), "o", color=look.xla, ms=4.5, mew=0)


def _lowest(found: Sequence[Gain]) -> float:
    return min([0.97, *(gain.searched / 1.03 for gain in found if gain.beaten and gain.searched)])
