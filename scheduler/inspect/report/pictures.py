"""The pictures of a report: drawn beside each other in processes, and packed for a page that shows them when asked."""

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

# Of one record. Each takes a quarter of a second, which is most of the time that a report takes.
FEW = (plots.landscape, plots.best_so_far)
ALL = (*FEW, plots.time_breakdown, plots.tiles, plots.block_sizes)
# Those in which all that depends on the ground is of the theme's own colours, which the page exchanges for a dark one.
EXCHANGED = (*FEW, plots.gains, plots.roofline)
# So few are drawn before another process has imported what it needs; each of those takes some 300 MB.
_AT_ONCE = 4
_PROCESSES = 8


@dataclasses.dataclass(frozen=True)
class Picture:
    """A picture as a page holds it.

    Attributes:
      packed: an SVG image on a light ground, gzipped, in base64.
      label: what it shows, for those who do not see it.
      exchanged: whether a page in dark colours exchanges its own for dark ones; else it stays on its light ground.
    """

    packed: str
    label: str
    exchanged: bool


@dataclasses.dataclass(frozen=True)
class Pictures:
    """Those of each record, in their order, and those of all records of a chip; `missing` says why there are none."""

    of_record: Sequence[Sequence[Picture]]
    of_all: Sequence[Picture] = ()
    missing: str = ""


def none(records: Sequence[Told], why: str) -> Pictures:
    """No picture, for a reason."""
    return Pictures([()] * len(records), missing=why)


def drawn(
    records: Sequence[Told], count: Callable[[Iterable[Told]], Iterable[Told]], *, every: bool = False
) -> Pictures:
    """Those of each record, in their order, and then those of all.

    Those of a user's own operations are drawn in this process, which alone has them.

    Args:
      count: passes records on, and is asked for the next one when the one before is drawn.
      every: all that there are of a record, and not the few that tell most.

    Raises:
      MissingPackage: matplotlib is not installed.
    """
    away = [told for told in records if told.case is not None and told.record.key.operation in OPERATIONS]
    jobs = [(told.record, told.trials, every) for told in away]
    found: list[list[Picture]] = []
    with contextlib.ExitStack() as stack:
        mapped: Iterator[list[Picture]] = map(_of_record, jobs)
        if len(jobs) > _AT_ONCE and (workers := os.cpu_count() or 1) > 1:
            context = multiprocessing.get_context("spawn")  # JAX has threads, and a fork of it may hang
            # Ctrl-C reaches all of a terminal's processes: this one ends the others.
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
    """What a process does."""
    record, trials, every = job
    known = case.of_record(record, trials)
    return [] if known is None else list(_drawn(known, every=every))


def _drawn(known: Case, *, every: bool) -> Iterator[Picture]:
    for draw in ALL if every else FEW:
        with contextlib.suppress(NothingToDraw, DeclarationError):  # of what is not declared, the account says so
            yield _packed(draw, known)


def _of_all(records: Sequence[Told]) -> Iterator[Picture]:
    """How records stand against XLA, and under the roofline, of each chip that is no CPU."""
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
    """Each as an element, which is empty until the script unpacks it."""
    return [
        element(
            "figure",
            element("img", alt=one.label, data_svg=one.packed, data_exchanged=one.exchanged, width="720", height="405"),
        )
        for one in pictures
    ]


def colours() -> str:
    """JSON: each of the theme's colours on a light ground -> the same on a dark one.

    But for those of magnitudes, which are shades between several: a picture keeps them, as its scale does.
    """
    pairs: dict[str, str] = {}
    for name, light in vars(LIGHT).items():
        dark = getattr(DARK, name)
        if name != "magnitude":
            pairs |= dict(zip(light, dark, strict=True)) if isinstance(light, tuple) else {light: dark}
    return json.dumps(pairs)
