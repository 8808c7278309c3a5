"""Draws the plots of a report in parallel processes, and packs them for a page that unpacks them on demand."""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import dataclasses
import gzip
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element

from scheduler.core.errors import NothingToDraw
from scheduler.core.records import Record, Trial
from scheduler.inspect import case, plots
from scheduler.inspect.case import Case
from scheduler.inspect.plots.style import DARK, LIGHT
from scheduler.inspect.report.elements import element
from scheduler.inspect.report.gather import Told
from search_spaces import OPERATIONS
from search_spaces.errors import DeclarationError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Plots of one record. Each takes a quarter of a second, most of the time of a report.
FEW = (plots.landscape, plots.best_so_far)
ALL = (*FEW, plots.time_breakdown, plots.tiles, plots.block_sizes)
# Plots with only theme colours in all parts that depend on the background. The page can replace these by dark ones.
EXCHANGED = (*FEW, plots.gains, plots.roofline)
# Up to this many records are drawn in this process, faster than another process imports its modules. Each process takes
# about 300 MB.
_AT_ONCE = 4
_PROCESSES = 8


@dataclasses.dataclass(frozen=True)
class Picture:
    """A plot as stored in the page.

    Attributes:
      packed: An SVG image on a light background, gzipped, in base64.
      label: The alternative text.
      exchanged: Whether a dark page replaces its colours by dark ones; otherwise it keeps its light background.
    """

    packed: str
    label: str
    exchanged: bool


@dataclasses.dataclass(frozen=True)
class Pictures:
    """The plots of each record, in order, and of all records of a chip. `missing` explains why there are none."""

    of_record: Sequence[Sequence[Picture]]
    of_all: Sequence[Picture] = ()
    missing: str = ""


def none(records: Sequence[Told], why: str) -> Pictures:
    """Returns no plots, with the reason."""
    return Pictures([()] * len(records), missing=why)


def drawn(
    records: Sequence[Told], count: Callable[[Iterable[Told]], Iterable[Told]], *, every: bool = False
) -> Pictures:
    """Draws the plots of each record, in order, and the plots of all records.

    Records of a user's own operations are drawn in this process, because other processes do not have these operations.

    Args:
      count: Iterates over the records. It is advanced once the previous record is drawn.
      every: Whether to draw all plots of a record instead of the most informative ones.

    Raises:
      MissingPackage: matplotlib is not installed.
    """
    away = [told for told in records if told.case is not None and told.record.key.operation in OPERATIONS]
    jobs = [(told.record, told.trials, every) for told in away]
    found: list[list[Picture]] = []
    with contextlib.ExitStack() as stack:
        mapped: Iterator[list[Picture]] = map(_of_record, jobs)
        if len(jobs) > _AT_ONCE and (workers := os.cpu_count() or 1) > 1:
            context = multiprocessing.get_context("spawn")  # JAX uses threads, so a fork may hang
            # Ctrl-C reaches all processes of a terminal. The workers ignore it, and this process stops them.
            pool = concurrent.futures.ProcessPoolExecutor(
                min(workers, _PROCESSES), context, signal.signal, (signal.SIGINT, signal.SIG_IGN)
            )
            stack.callback(pool.shutdown, cancel_futures=True)
            mapped = pool.map(_of_record, jobs, chunksize=4)
        for told in count(records):
            if told.case is None:
                found.append([])
            elif told.record.key.operation in OPERATIONS:
                found.append(next(mapped))
            else:
                found.append(list(_drawn(told.case, every=every)))
    return Pictures(found, list(_of_all(records)))


def _of_record(job: tuple[Record, tuple[Trial, ...], bool]) -> list[Picture]:
    """Draws the plots of one record in a worker process."""
    record, trials, every = job
    known = case.of_record(record, trials)
    return [] if known is None else list(_drawn(known, every=every))


def _drawn(known: Case, *, every: bool) -> Iterator[Picture]:
    for draw in ALL if every else FEW:
        with contextlib.suppress(NothingToDraw, DeclarationError):  # reported in the account
            yield _packed(draw, known)


def _of_all(records: Sequence[Told]) -> Iterator[Picture]:
    """Yields the gains over XLA and the roofline plot of each chip that is not a CPU."""
    chips: dict[str, list[Case]] = {}
    for told in records:
        if told.case is not None and told.roofline_s is not None:
            chips.setdefault(told.case.hardware.id, []).append(told.case)
    for cases in chips.values():
        with contextlib.suppress(NothingToDraw):
            yield _packed(plots.gains, [one.record for one in cases if one.record is not None])
        with contextlib.suppress(NothingToDraw):
            yield _packed(plots.roofline, cases)


def _packed(draw: Callable[..., Figure], what: object) -> Picture:
    figure = draw(what)
    packed = gzip.compress(plots.svg(figure).encode(), mtime=0)
    return Picture(base64.b64encode(packed).decode(), str(figure.get_label()), draw in EXCHANGED)


def shown(pictures: Iterable[Picture]) -> list[Element]:
    """Returns an element for each plot. It is empty until the script unpacks the plot."""
    return [
        element(
            "figure",
            element("img", alt=one.label, data_svg=one.packed, data_exchanged=one.exchanged, width="720", height="405"),
        )
        for one in pictures
    ]


def colours() -> str:
    """Returns JSON that maps each colour of the light theme to the same colour of the dark theme.

    Colours of magnitudes are left out: a plot mixes shades of them, and keeps them like its scale.
    """
    pairs: dict[str, str] = {}
    for name, light in vars(LIGHT).items():
        dark = getattr(DARK, name)
        if name != "magnitude":
            pairs |= dict(zip(light, dark, strict=True)) if isinstance(light, tuple) else {light: dark}
    return json.dumps(pairs)
