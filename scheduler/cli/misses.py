"""The command `misses`, and the tasks of `tune --missed`."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from scheduler.cli.arguments import (
    AsJson,
    Chips,
    Own,
    chip_of,
    open_stores,
    problem_of,
    usage_errors,
    user_store,
    wanted_by,
)
from scheduler.cli.terminal import Json, Row, console_here, ledger, output, print_json, say
from scheduler.core import codec
from scheduler.core.records import choice_text
from scheduler.core.text import seconds_text
from search_spaces import format_problem

if TYPE_CHECKING:
    from scheduler.core.hardware import Hardware
    from scheduler.core.records import Key, Miss, Record
    from scheduler.search.missed import Missed
    from scheduler.search.task import Task
    from scheduler.store.store import Store
    from search_spaces.operation import Operation
    from search_spaces.problem import Problem


# Number of misses above which a progress message is printed, as each prediction takes some milliseconds.
MANY_MISSES = 500


def misses(
    operation: Annotated[
        str | None, typer.Argument(help="Only this operation: a name, package.module:NAME, or file.py:NAME.")
    ] = None,
    fields: Annotated[list[str] | None, typer.Argument(help="Only this problem, as name=value.")] = None,
    hardware: Chips = None,
    everything: Annotated[bool, typer.Option("--all", help="Include misses that a record covers now.")] = False,
    forget: Annotated[
        bool, typer.Option("--forget", help="Delete them, covered or not, and print nothing else.")
    ] = False,
    own: Own = None,
    as_json: AsJson = False,
) -> None:
    """List problems of calls that had no record, largest expected gain of a search first."""

    _load(own or ())
    problem = None
    if fields:
        with usage_errors():
            op, parsed = problem_of(str(operation), fields)
        operation, problem = op.name, parsed.canonical()
    store = user_store()
    kept = store.misses.all()
    wanted = wanted_by([miss.key for miss in kept], operation, hardware)
    kept = [miss for miss in kept if wanted(miss.key) and problem in (None, miss.key.problem)]
    if forget:
        say(f"forgot {store.misses.forget(miss.key for miss in kept)} misses")
        return
    weighed = _weighed(kept)
    shown = [one for one in weighed if everything or one.covered_by is None]
    if as_json:
        print_json([missed_json(one) for one in shown])
    elif shown:
        output(*misses_table(shown, console_here().width))
    else:
        output(_none_text(store, len(weighed)))


def tasks_missed(
    store: Store,
    local_chip: Hardware,
    search: Callable[[Operation[Any], Problem], Task],
    everything: bool,
    part: str | None,
    own: Sequence[str],
) -> list[Task]:
    """Returns the search tasks for cache misses on the chip `local_chip`, and reports the misses that are skipped."""
    from scheduler.search import jobs, missed

    _load(own)
    kept = store.misses.all()
    _report_other_chips([miss.key for miss in kept], local_chip)
    weighed = _weighed([miss for miss in kept if miss.key.hardware == local_chip.id], local_chip)
    unknown = collections.Counter((one.miss.key.operation, one.reason) for one in weighed if one.problem is None)
    for (name, reason), count in unknown.items():
        say(f"{count} problems of {name} are left out: {reason}")
    selected, skipped = missed.worth_tuning(weighed)
    if everything:
        selected, skipped = [*selected, *skipped], []
    if skipped:
        gain = f"their total expected gain is below {missed.MIN_GAIN:.1%}"
        say(f"{len(skipped)} problems are left out: {gain} (--all includes them)")
    with usage_errors():
        mine = jobs.part(selected, part or "1/1")
    tasks = [search(one.operation, one.problem) for one in mine if one.operation and one.problem]
    if not tasks:
        output(f"No call on {local_chip.id} missed a record that is worth a search.")
    return tasks


def _load(own: Sequence[str]) -> None:
    from search_spaces import load

    with usage_errors():
        for name in own:
            load(name)


def _weighed(kept: Sequence[Miss], local_chip: Hardware | None = None) -> list[Missed]:
    from scheduler.prediction.transfer import telling_records
    from scheduler.search import missed

    if len(kept) > MANY_MISSES:
        say(f"predicting the times of {len(kept)} problems")
    stores = open_stores()

    def stored(operation: Operation[Any], problem: Problem, chip: Hardware) -> list[Record]:
        return [found for store in stores for found in telling_records(store, operation, problem, chip)]

    return missed.weigh(
        kept,
        stored,
        lambda identity: local_chip if local_chip is not None and identity == local_chip.id else chip_of(identity),
    )


def _report_other_chips(keys: Sequence[Key], local_chip: Hardware) -> None:
    for chip, count in sorted(collections.Counter(key.hardware for key in keys).items()):
        if chip != local_chip.id:
            say(f"{count} problems on {chip} are left out: this chip is {local_chip.id}")


def _none_text(store: Store, count_covered: int) -> str:
    from scheduler.dispatch import stored as asked

    if count_covered:
        return f"Records cover all {count_covered} misses in {store.location}; --all lists them."
    off = "" if asked.logs_misses() else f": {asked.MISSES_ENVIRONMENT} turns logging off"
    return f"No misses are in {store.location}{off}."


# ------------------------------------------------------------------------------
# Cache misses as JSON and as a table: the problem, count, source line, and expected gain of a search.


def missed_json(one: Missed) -> Json:
    """Returns a miss as JSON, with times in seconds; null if they cannot be predicted."""
    miss = one.miss
    return {
        "operation": miss.key.operation,
        "problem": codec.problem_to_json(miss.key.problem),
        "hardware": miss.key.hardware,
        "lowered": miss.lowered,
        "first": miss.first,
        "last": miss.last,
        "line": miss.line,
        "place": miss.place,
        "settled": one.covered_by is not None,
        "library_s": one.library_s,
        "best_s": one.best_s,
        "gain_s": one.gain_s,
        "reason": one.reason,
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
        "share: gain over XLA's total time. `tile-scheduler tune --missed` searches the problems of the local chip, or "
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
