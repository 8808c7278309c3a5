"""Collects the records of a report and draws their plots; builds HTML as a tree, so that no text becomes markup."""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import dataclasses
import gzip
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from xml.etree.ElementTree import Element, tostring

from scheduler.core import hardware as chips
from scheduler.core import hints
from scheduler.core.errors import NothingToDraw
from scheduler.core.records import Entry, Record, Trial, point_of
from scheduler.core.text import printable
from scheduler.inspect import case, plots
from scheduler.inspect.case import Case
from scheduler.inspect.explain import Account, explain
from scheduler.model.cost import CostModel
from scheduler.prediction.transfer import recheck
from search_spaces import OPERATIONS, format_problem, load
from search_spaces.operation import Operation
from search_spaces.space import DeclarationError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Child = Element | str | None


def element(tag: str, /, *children: Child, **attributes: str | bool | None) -> Element:
    """Returns an element with these children. None is left out.

    Args:
      attributes: `class_` becomes class, and `data_x` becomes data-x. True is an attribute without a value. None and
        False are omitted.
    """
    made = Element(tag)
    for key, value in attributes.items():
        if value is not None and value is not False:
            made.set(key.rstrip("_").replace("_", "-"), "" if value is True else printable(value))
    extend(made, children)
    return made


def extend(parent: Element, children: Iterable[Child]) -> None:
    """Appends children to `parent`."""
    last = parent[-1] if len(parent) else None
    for child in children:
        if isinstance(child, Element):
            parent.append(child)
            last = child
        elif child is not None and last is None:
            parent.text = (parent.text or "") + printable(child)
        elif child is not None and last is not None:
            last.tail = (last.tail or "") + printable(child)


def written(root: Element) -> str:
    """Returns the document as UTF-8 text. Characters that cannot be encoded become escapes."""
    text = tostring(root, encoding="unicode", method="html")
    return "<!DOCTYPE html>\n" + text.encode("utf-8", "backslashreplace").decode() + "\n"


def table(caption: str | None, columns: Iterable[str], rows: Iterable[Iterable[Child]], *, numbers: int) -> Element:
    """Returns a table with its last `numbers` columns right-aligned. It scrolls horizontally if it is too wide."""
    columns = list(columns)

    def cell(name: str, index: int, child: Child) -> Element:
        figure = "figure" if index >= len(columns) - numbers else None
        return element(name, child, class_=figure, scope="col" if name == "th" else None)

    head = element("tr", *(cell("th", index, column) for index, column in enumerate(columns)))
    body = (element("tr", *(cell("td", index, child) for index, child in enumerate(row))) for row in rows)
    made = element(
        "table", element("caption", caption) if caption else None, element("thead", head), element("tbody", *body)
    )
    return element("div", made, class_="scrolls")


# ------------------------------------------------------------------------------
# Collects the data of a report on each record: its schedules, whether it is valid, and how to tune it again.


@dataclasses.dataclass(frozen=True)
class RecordDetails:
    """One record with all information available here.

    Attributes:
      where: The store that contains it.
      trials: The trials of its search; empty if they are not stored.
      case: None if its operation, problem or chip is unknown here.
      accounts: One account of the schedules per kernel; empty if `unexplained` gives a reason.
      held: The entry that a call uses, or why it uses none of this record.
      command: The command that tunes it again; None if unknown, for a user's own operation.
    """

    where: str
    record: Record
    trials: tuple[Trial, ...] = ()
    case: Case | None = None
    accounts: tuple[Account, ...] = ()
    unexplained: str = ""
    held: Entry | str = ""
    command: str | None = None

    @property
    def problem_text(self) -> str:
        """The problem in command line syntax."""
        return format_problem(self.record.key.operation, self.record.key.problem)

    @property
    def dtype(self) -> str:
        """The dtype of the operands; "" if the problem has none."""
        text = self.problem_text if self.case is None else str(self.case.problem)
        return next((word.partition("=")[2] for word in text.split() if word.startswith("dtype=")), "")

    @property
    def roofline_s(self) -> float | None:
        """Lower bound by arithmetic and compulsory traffic, in seconds; None on a CPU.

        One row of the table stands for all CPUs, so it gives no bound.
        """
        if self.case is None or self.case.hardware.abilities.interpreted:
            return None
        return CostModel(self.case.hardware).lower_bound(self.case.problem)

    @property
    def bound(self) -> str:
        """The roof that applies: "compute" or "memory", or "" if there is none."""
        roofline_s = self.roofline_s
        if self.case is None or roofline_s is None:
            return ""
        memory_s = self.case.problem.bytes_moved / self.case.hardware.hbm_bytes_per_s
        return "memory" if memory_s >= roofline_s else "compute"

    @property
    def rank(self) -> tuple[int, int] | None:
        """The winner's rank in the model's order of its kernel's legal schedules, from 1, and their number."""
        winner = self.record.winner
        account = next((account for account in self.accounts if account.backend == winner.backend), None)
        rank = None if account is None else account.rank(winner.schedule)
        return None if account is None or rank is None else (rank, len(account.ranks))


def gather(
    kept: Iterable[tuple[str, Record, Iterable[Trial]]], own: Iterable[Operation[Any]] = (), *, top: int = 3
) -> Iterator[RecordDetails]:
    """Yields each record with its accounts, in order.

    Args:
      kept: The store's name, the record, and its trials.
      own: Additional operations, besides the package's own, to explain records of.
      top: Number of top predictions to include.
    """
    operations = {operation.name: operation for operation in own}
    for where, record, trials in kept:
        name = record.key.operation
        if name not in operations and name in OPERATIONS:
            operations[name] = load(name)
        yield _details(RecordDetails(where, record, tuple(trials)), operations.get(name), top)


def _details(details: RecordDetails, operation: Operation[Any] | None, top: int) -> RecordDetails:
    def unexplained(reason: str) -> RecordDetails:
        return dataclasses.replace(details, unexplained=reason, held=reason)

    key = details.record.key
    if operation is None:
        return unexplained(
            f"{key.operation} is not in this package: give --operation package.module:NAME or file.py:NAME"
        )
    try:
        problem = operation.problem.from_canonical(key.problem)
    except ValueError as error:  # from another version of the operation
        return unexplained(f"the problem is no longer valid for {key.operation}: {error}")
    details = dataclasses.replace(details, command=f"{hints.tune(operation, problem)} --force")
    chip = chips.identified(key.hardware)
    if chip is None:
        return unexplained("the chip (name, cores and memory) is not in the table of chips")
    details = dataclasses.replace(details, case=Case(operation, problem, chip, details.record, details.trials))
    try:
        won = point_of(details.record.winner.backend, details.record.winner.schedule)
        accounts = tuple(explain(operation, problem, chip, details.trials, top=top, about=[won]))
        return dataclasses.replace(details, accounts=accounts, held=recheck(operation, problem, chip, details.record))
    except DeclarationError as error:
        return unexplained(str(error))


# ------------------------------------------------------------------------------
# Draws the plots of a report in parallel processes, and packs them for a page that unpacks them on demand.

# Plots of one record. Each takes a quarter of a second, most of the time of a report.
FEW = (plots.landscape, plots.best_so_far)
ALL = (*FEW, plots.time_breakdown, plots.tiles, plots.block_sizes)
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
    """

    packed: str
    label: str


@dataclasses.dataclass(frozen=True)
class Pictures:
    """The plots of each record, in order, and of all records of a chip. `missing` explains why there are none."""

    of_record: Sequence[Sequence[Picture]]
    of_all: Sequence[Picture] = ()
    missing: str = ""


def no_pictures(records: Sequence[RecordDetails], why: str) -> Pictures:
    """Returns no plots, with the reason."""
    return Pictures([()] * len(records), missing=why)


def drawn_pictures(
    records: Sequence[RecordDetails],
    count: Callable[[Iterable[RecordDetails]], Iterable[RecordDetails]],
    *,
    every: bool = False,
) -> Pictures:
    """Draws the plots of each record, in order, and the plots of all records.

    Records of a user's own operations are drawn in this process, because other processes do not have these operations.

    Args:
      count: Iterates over the records. It is advanced once the previous record is drawn.
      every: Whether to draw all plots of a record instead of the most informative ones.

    Raises:
      MissingPackage: matplotlib is not installed.
    """
    built_in = [
        details for details in records if details.case is not None and details.record.key.operation in OPERATIONS
    ]
    jobs = [(details.record, details.trials, every) for details in built_in]
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
        for details in count(records):
            if details.case is None:
                found.append([])
            elif details.record.key.operation in OPERATIONS:
                found.append(next(mapped))
            else:
                found.append(list(_drawn(details.case, every=every)))
    return Pictures(found, list(_of_all(records)))


def _of_record(job: tuple[Record, tuple[Trial, ...], bool]) -> list[Picture]:
    """Draws the plots of one record in a worker process."""
    record, trials, every = job
    known = case.of_record(record, trials)
    return [] if known is None else list(_drawn(known, every=every))


def _drawn(case: Case, *, every: bool) -> Iterator[Picture]:
    for draw in ALL if every else FEW:
        with contextlib.suppress(NothingToDraw, DeclarationError):  # reported in the account
            yield _packed(draw, case)


def _of_all(records: Sequence[RecordDetails]) -> Iterator[Picture]:
    """Yields the roofline plot of each chip that is not a CPU."""
    chips: dict[str, list[Case]] = {}
    for details in records:
        if details.case is not None and details.roofline_s is not None:
            chips.setdefault(details.case.hardware.id, []).append(details.case)
    for cases in chips.values():
        with contextlib.suppress(NothingToDraw):
            yield _packed(plots.roofline, cases)


def _packed(draw: Callable[..., Figure], subject: object) -> Picture:
    figure = draw(subject)
    packed = gzip.compress(plots.svg(figure).encode(), mtime=0)
    return Picture(base64.b64encode(packed).decode(), str(figure.get_label()))


def shown(pictures: Iterable[Picture]) -> list[Element]:
    """Returns an element for each plot. It is empty until the script unpacks the plot."""
    return [
        element("figure", element("img", alt=one.label, data_svg=one.packed, width="720", height="405"))
        for one in pictures
    ]
