"""Output to standard output and standard error, and progress of searches."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

from scheduler.core.safe_text import printable as printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from scheduler.core.progress import Progress
    from scheduler.search.task import Task


T = TypeVar("T")

MOST_COLUMNS = 1000


def console_here() -> Console:
    """Returns the console of standard output.

    Its width is COLUMNS, up to `MOST_COLUMNS`, or the width of the terminal. Without either, it is 120.
    """
    asked = os.environ.get("COLUMNS", "")
    if asked.isdecimal() and int(asked) > 0:
        return Console(highlight=False, width=min(int(asked), MOST_COLUMNS))
    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def console_beside() -> Console:
    """Returns the console of standard error, for text output if standard output is written to a file."""
    return Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 120)


def output(*what: RenderableType) -> None:
    """Prints sentences and tables, folded between words to the width of the console."""
    console = console_here()
    for one in what:
        if isinstance(one, str):
            lines = textwrap.wrap(printable(one), console.width, break_long_words=False, break_on_hyphens=False) or [""]
            console.print("\n".join(lines), markup=False, soft_wrap=True)
        else:
            console.print(one, markup=False)


def print_command(command: str) -> None:
    """Prints a command on its own line, unfolded so that it can be copied."""
    print(f"  {printable(command)}")


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, allow_nan=False))


def say(message: str) -> None:
    print(printable(message), file=sys.stderr, flush=True)


def best_text(progress: Progress) -> str:
    """Formats the best result of a search so far."""
    from scheduler.core.quantities import seconds_text
    from scheduler.core.records import choice_text

    best = progress.best
    if best is None:
        return "building and checking the first" if progress.last is None else "nothing ran yet"
    time_s = getattr(best.outcome, "median_s", float("nan"))
    how = "estimated " if getattr(best.outcome, "estimated", False) else ""
    return f"best {how}{seconds_text(time_s)}: {choice_text(best.backend, best.schedule)}"


@contextlib.contextmanager
def shown_progress() -> Iterator[Callable[[Task, Progress], None]]:
    """Shows the progress of searches on standard error: a bar on a terminal, otherwise a line for each new best."""
    if not sys.stderr.isatty():
        shown: dict[Task, str] = {}

        def line(task: Task, progress: Progress) -> None:
            if progress.done == progress.budget or shown.get(task) != best_text(progress):
                shown[task] = best_text(progress)
                left = "" if progress.eta_s is None else f", {progress.eta_s:.0f} s left"
                say(f"{task}: {progress.done}/{progress.budget} trials{left}, {best_text(progress)}")

        yield line
        return

    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bars

    columns = [TextColumn("{task.fields[label]}", markup=False), BarColumn(bar_width=12), MofNCompleteColumn()]
    columns += [TextColumn("{task.fields[left]}"), TextColumn("{task.fields[best]}", markup=False)]
    with Bars(*columns, console=Console(stderr=True)) as bars:
        rows: dict[Task, Any] = {}

        def draw(task: Task, progress: Progress) -> None:
            if task not in rows:
                rows[task] = bars.add_task("", total=progress.budget, label=printable(str(task)), left="", best="")
            left = "" if progress.eta_s is None else f"{progress.eta_s:.0f} s left"
            short = printable(best_text(progress)).partition(":")[0]  # without the schedule, to fit in one line
            bars.update(rows[task], completed=progress.done, total=progress.budget, left=left, best=short)

        yield draw


# Number of progress lines in all if standard error is not a terminal.
_SHARE = 10


@contextlib.contextmanager
def shown_count(what: str, total: int) -> Iterator[Callable[[Iterable[T]], Iterator[T]]]:
    """Shows a count up to `total` on standard error: a bar on a terminal, otherwise a line for each tenth.

    Yields:
      A function that wraps an iterable and counts its items. An item counts as done when the next one is requested.
    """
    if not sys.stderr.isatty():

        def lines(things: Iterable[T]) -> Iterator[T]:
            said = 0
            for done, thing in enumerate(things):
                if (share := done * _SHARE // max(total, 1)) >= said:
                    say(f"{what}: {done} of {total} done")
                    said = share + 1
                yield thing

        yield lines
        return

    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = [TextColumn("{task.description}", markup=False), BarColumn(bar_width=12), MofNCompleteColumn()]
    with Bars(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bars:
        row = bars.add_task(what, total=total)

        def bar(things: Iterable[T]) -> Iterator[T]:
            for thing in things:
                yield thing
                bars.advance(row)

        yield bar
