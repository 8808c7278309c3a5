"""The command `misses`, and the tasks of `tune --missed`."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scheduler.cli.arguments import AsJson, Chips, Own, chip_of, problem_of, usage_errors, wanted_by
from scheduler.cli.stores import open_stores, user_store
from scheduler.cli.terminal import console_here, output, print_json, say

if TYPE_CHECKING:
    from scheduler.core.hardware import Hardware
    from scheduler.core.records import Key, Miss
    from scheduler.prediction.evidence import Evidence
    from scheduler.search.missed import Missed
    from scheduler.search.task import Task
    from scheduler.store.store import Store
    from search_spaces.operation import Operation
    from search_spaces.problem import Problem

# Number of misses above which a progress message is printed, as each prediction takes some milliseconds.
SOON = 500


def misses(
    operation: Annotated[
        str | None, typer.Argument(help="Only of this: a name, package.module:NAME, or file.py:NAME.")
    ] = None,
    fields: Annotated[list[str] | None, typer.Argument(help="Only this problem, as name=value.")] = None,
    hardware: Chips = None,
    everything: Annotated[bool, typer.Option("--all", help="Also those that a record has settled since.")] = False,
    forget: Annotated[
        bool, typer.Option("--forget", help="Delete them, settled or not, and print nothing else.")
    ] = False,
    own: Own = None,
    as_json: AsJson = False,
) -> None:
    """List what calls asked for and no record answered, those first that a search is expected to gain most of."""
    from scheduler.cli import miss_report

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
    shown = [one for one in weighed if everything or one.settled is None]
    if as_json:
        print_json([miss_report.missed_json(one) for one in shown])
    elif shown:
        output(*miss_report.missed(shown, console_here().width))
    else:
        output(_nothing(store, len(weighed)))


def tasks_missed(
    store: Store,
    here: Hardware,
    search: Callable[[Operation[Any], Problem], Task],
    everything: bool,
    part: str | None,
    own: Sequence[str],
) -> list[Task]:
    """Returns the search tasks for cache misses on the chip `here`, and reports the misses that are skipped."""
    from scheduler.search import jobs, missed

    _load(own)
    kept = store.misses.all()
    _say_elsewhere([miss.key for miss in kept], here)
    weighed = _weighed([miss for miss in kept if miss.key.hardware == here.id], here)
    unknown = collections.Counter((one.miss.key.operation, one.reason) for one in weighed if one.problem is None)
    for (name, reason), count in unknown.items():
        say(f"{count} of {name} are left out: {reason}")
    worth, little = missed.worth_tuning(weighed)
    if everything:
        worth, little = [*worth, *little], []
    if little:
        say(f"{len(little)} problems are left out, which together promise less than {missed.LEAST:.1%}: --all")
    with usage_errors():
        mine = jobs.part(worth, part or "1/1")
    tasks = [search(one.operation, one.problem) for one in mine if one.operation and one.problem]
    if not tasks:
        output(f"No call on {here.id} missed anything that is worth a search.")
    return tasks


def _load(own: Sequence[str]) -> None:
    from search_spaces import load

    with usage_errors():
        for name in own:
            load(name)


def _weighed(kept: Sequence[Miss], here: Hardware | None = None) -> list[Missed]:
    from scheduler.prediction import evidence
    from scheduler.search import missed

    if len(kept) > SOON:
        say(f"predicting the times of {len(kept)} problems")
    stores = open_stores()

    def stored(operation: Operation[Any], problem: Problem, chip: Hardware) -> Evidence:
        return evidence.merged(evidence.read(store, operation, problem, chip) for store in stores)

    return missed.weigh(
        kept, stored, lambda identity: here if here is not None and identity == here.id else chip_of(identity)
    )


def _say_elsewhere(keys: Sequence[Key], here: Hardware) -> None:
    for chip, count in sorted(collections.Counter(key.hardware for key in keys).items()):
        if chip != here.id:
            say(f"{count} of {chip} are left out: this is {here.id}")


def _nothing(store: Store, settled: int) -> str:
    from scheduler.dispatch import missed as asked

    if settled:
        return f"Records have settled all {settled} misses in {store.location}; --all lists them."
    off = "" if asked.noted() else f": {asked.ENVIRONMENT} turns the noting of them off"
    return f"No misses are in {store.location}{off}."
