"""The command `misses`, and the tasks of `tune-missed`."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from scheduler.cli import arguments
from scheduler.cli.record_report import key_json, picked
from scheduler.cli.terminal import Json, Row, console_here, ledger, output, print_json, say
from scheduler.core.records import choice_text
from scheduler.core.text import seconds_text
from search_spaces import format_problem

if TYPE_CHECKING:
    from scheduler.core.hardware import Hardware
    from scheduler.core.records import Miss, Record
    from scheduler.search.missed import Missed
    from scheduler.search.task import SearchOptions, Task
    from scheduler.store.store import Store
    from search_spaces.operation import Operation
    from search_spaces.problem import Problem


# Number of misses above which a progress message is printed, as each prediction takes some milliseconds.
MANY_MISSES = 500


def misses(
    operation: arguments.OptionalOperation = None,
    fields: arguments.OptionalFields = None,
    hardware: arguments.Chips = None,
    everything: Annotated[bool, typer.Option("--all", help="Include misses that a record covers now.")] = False,
    forget: Annotated[
        bool, typer.Option("--forget", help="Delete them, covered or not, and print nothing else.")
    ] = False,
    own: arguments.Own = None,
    as_json: arguments.AsJson = False,
) -> None:
    """List problems of calls that had no record, largest expected gain of a search first."""
    from scheduler.dispatch import stored

    store = arguments.user_store()
    kept = store.misses.all()
    wanted = arguments.wanted_by([miss.key for miss in kept], operation, hardware, fields)
    kept = [miss for miss in kept if wanted(miss.key)]
    if forget:
        say(f"forgot {store.misses.forget(miss.key for miss in kept)} misses")
        return
    weighed = _weighed(kept)
    shown = [one for one in weighed if everything or one.covered_by is None]
    if as_json:
        print_json([missed_json(one) for one in shown])
    elif shown:
        output(*misses_table(shown, console_here().width))
    elif weighed:
        output(f"Records cover all {len(weighed)} misses in {store.location}; --all lists them.")
    else:
        off = "" if stored.logs_misses() else f": {stored.MISSES_ENVIRONMENT} turns logging off"
        output(f"No misses are in {store.location}{off}.")


def tasks_missed(
    store: Store, local_chip: Hardware, search: SearchOptions, *, everything: bool, part: str
) -> list[Task]:
    """Returns the search tasks for cache misses on the chip `local_chip`, and reports the misses that are skipped."""
    from scheduler.search import jobs, missed
    from scheduler.search.task import Task

    kept = store.misses.all()
    for chip, count in sorted(collections.Counter(miss.key.hardware for miss in kept).items()):
        if chip != local_chip.id:
            say(f"{count} problems on {chip} are left out: this chip is {local_chip.id}")
    weighed = _weighed([miss for miss in kept if miss.key.hardware == local_chip.id], lambda _: local_chip)
    unknown = collections.Counter((one.miss.key.operation, one.reason) for one in weighed if one.problem is None)
    for (name, reason), count in unknown.items():
        say(f"{count} problems of {name} are left out: {reason}")
    selected, skipped = missed.worth_tuning(weighed)
    if everything:
        selected, skipped = [*selected, *skipped], []
    if skipped:
        gain = f"their total expected gain is below {missed.MIN_GAIN:.1%}"
        say(f"{len(skipped)} problems are left out: {gain} (--all includes them)")
    with arguments.usage_errors():
        mine = jobs.part(selected, part)
    tasks = [Task(one.operation, one.problem, search) for one in mine if one.operation and one.problem]
    if not tasks:
        output(f"No call on {local_chip.id} missed a record that is worth a search.")
    return tasks


def _weighed(kept: Sequence[Miss], chip: Callable[[str], Hardware | None] = arguments.chip_of) -> list[Missed]:
    from scheduler.prediction.transfer import telling_records
    from scheduler.search import missed

    if len(kept) > MANY_MISSES:
        say(f"predicting the times of {len(kept)} problems")
    stores = arguments.open_stores()

    def stored(operation: Operation[Any], problem: Problem, chip: Hardware) -> list[Record]:
        return [found for store in stores for found in telling_records(store, operation, problem, chip)]

    return missed.weigh(kept, stored, chip)


# ------------------------------------------------------------------------------
# Cache misses as JSON and as a table: the problem, count, source line, and expected gain of a search.


def missed_json(one: Missed) -> Json:
    """Returns a miss as JSON, with times in seconds; null if they cannot be predicted."""
    return {
        **key_json(one.miss.key),
        **picked(one.miss, "lowered", "first", "last", "line", "place"),
        "settled": one.covered_by is not None,
        **picked(one, "library_s", "best_s", "gain_s", "reason"),
    }


def misses_table(of: Sequence[Missed], width: int) -> Iterator[RenderableType]:
    """Yields one row per miss, in groups by chip."""
    groups = []
    in_order = sorted(of, key=lambda one: one.miss.key.hardware)  # stable: keeps the order of misses within a chip
    for hardware, ones in itertools.groupby(in_order, lambda one: one.miss.key.hardware):
        group = list(ones)
        total_s = sum(one.library_total_s for one in group)
        groups.append(([hardware], [_row(one, total_s) for one in group]))
    columns = ("lowered", "last", "XLA", "best", "gain", "share")
    yield from ledger("problem, and the calling line", columns, groups, width)
    yield ""
    yield (
        "XLA, best: predicted times of one call. gain: their difference times the lowered calls (not runs). "
        "share: gain over XLA's total time. `tile-scheduler tune-missed` searches the problems of the local chip, or "
        "of --hardware, in this order."
    )


def _row(one: Missed, total_s: float) -> Row:
    miss, gain_s = one.miss, one.gain_s
    figures = [
        str(miss.lowered),
        miss.last[:10],
        "" if one.library_s is None else seconds_text(one.library_s),
        "" if one.library_s is None or one.best_s is None else seconds_text(one.best_s),
        "" if gain_s is None else "none" if gain_s == 0 else seconds_text(gain_s),
        "" if not gain_s or not total_s else f"{gain_s / total_s:.1%}",
    ]
    since = ""
    if one.covered_by is not None:
        since = f"covered: {choice_text(one.covered_by.backend, one.covered_by.schedule)}"
    return Row(
        f"{miss.key.operation} {format_problem(miss.key.operation, miss.key.problem)}",
        figures,
        [miss.line, since, one.reason],
    )
