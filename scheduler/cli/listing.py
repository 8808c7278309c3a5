"""The command that lists what is stored: list."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from scheduler.cli.arguments import AsJson, Chips, chip_of, wanted_by
from scheduler.cli.stores import SHIPPED, Here, ask_stores, elsewhere_text
from scheduler.cli.terminal import console_here, output, print_command, print_json

if TYPE_CHECKING:
    from scheduler.core.ranges import Range
    from scheduler.core.records import Key, Record, Trial
    from scheduler.store.rows import Head
    from scheduler.store.store import Store

# Nobody reads more of a terminal.
MOST = 100

Everything = Annotated[
    bool, typer.Option("--all", help="Also what is shipped for other chips than the one that is here.")
]


def list_(
    operation: Annotated[str | None, typer.Option(help="Only this operation.")] = None,
    hardware: Chips = None,
    everything: Everything = False,
    most: Annotated[int, typer.Option(min=0, help="Print at most so many records; 0 prints all.")] = MOST,
    as_json: AsJson = False,
) -> None:
    """List the stored schedules: the user's own, and those shipped for the chip that is here; searches cut short."""
    from scheduler.cli import range_report, record_report
    from scheduler.core.records import Key
    from scheduler.inspect import provenance

    def ask(store: Store) -> tuple[Store, list[Head], dict[Key, list[Trial]], list[Range]]:
        return store, store.heads(), store.unfinished(), store.ranges.all()

    kept = list(ask_stores(ask))
    keys = [key for _, (_, heads, cut, _) in kept for key in (*(head.key for head in heads), *cut)]
    meant, here = wanted_by(keys, operation, hardware), Here.now()
    everything = everything or hardware is not None
    found = [(where, head) for where, (_, heads, *_) in kept for head in heads if meant(head.key)]
    rows = [(where, head) for where, head in found if everything or here.shows(where, head.key)]
    rows.sort(key=lambda row: here.order(row[0], row[1].key, estimated=row[1].estimated))
    shown = rows if as_json or not most else rows[:most]
    records = _read(shown, {where: store for where, (store, *_) in kept})
    if as_json:
        print_json([{"where": where, **record_report.record_json(record)} for where, record in records])
        return
    if records:
        output(*record_report.records(records, console_here().width))
    if len(shown) < len(rows):
        output(
            "", f"{len(rows) - len(shown)} more are not printed: --most 0 prints all, --operation and --hardware some"
        )
    of_ranges = [
        (where, one)
        for where, (*_, ranges) in kept
        for one in ranges
        if meant(key := Key(one.operation, one.hardware, one.problem)) and (everything or here.shows(where, key))
    ]
    for where, one in of_ranges:
        output("", f"{one} on {one.hardware}, {where}", *range_report.summary(one))
    unfinished = [(where, key, trials) for where, (_, _, cut, _) in kept for key, trials in cut.items() if meant(key)]
    for where, key, trials in unfinished:
        output("", f"{key}, {where}: {provenance.unfinished_text(trials)}")
        print_goes_on(key)
    if not (rows or of_ranges or unfinished):
        _print_none([where for where, _ in kept if where != SHIPPED], operation)
    left_out = [head.key.hardware for where, head in found if not (everything or here.shows(where, head.key))]
    if left_out:
        output("", f"{elsewhere_text(left_out)}: --all lists them, too, or --hardware those of a chip")


def _read(rows: Sequence[tuple[str, Head]], stored: dict[str, Store]) -> list[tuple[str, Record]]:
    """The records of these rows, in their order; a malformed one is left out."""
    found: dict[tuple[str, Key], Record] = {}
    for where, store in stored.items():
        keys = [head.key for place, head in rows if place == where]
        found |= {(where, record.key): record for record in store.read(keys)}
    return [(where, found[where, head.key]) for where, head in rows if (where, head.key) in found]


def _print_none(places: Sequence[str], operation: str | None) -> None:
    """That nothing is stored, and how to begin."""
    from scheduler.core import hints
    from scheduler.inspect.example import example
    from search_spaces import OPERATIONS, load

    op = load(operation if operation in OPERATIONS else OPERATIONS[0])
    small = example(op, 256)
    assert small is not None, "of the operations here, all that has no default is an extent"
    of = f" of {operation}" if operation is not None else ""
    for place in places:  # none where it cannot be read, which was said
        output(f"No record{of} is in {place}, and none is shipped for this chip; to search a problem, for example:")
    print_command(hints.tune(op, small))


def print_goes_on(key: Key, command: str | None = None) -> None:
    """How an unfinished search goes on; where its operation is defined, only whoever began it knows."""
    from scheduler.core import hints
    from search_spaces import OPERATIONS, load

    if command is None and key.operation in OPERATIONS:
        op = load(key.operation)
        with contextlib.suppress(ValueError):  # a store may hold what is no problem of it today
            command = hints.tune(op, op.problem.from_canonical(key.problem), chip_of(key.hardware))
    if command is None:
        output("the command that began it goes on from there")
    else:
        if (chip := chip_of(key.hardware)) is not None and chip.abilities.interpreted:
            from scheduler.search.tuner import LONGEST_INTERPRETED_S

            command += f" --seconds {LONGEST_INTERPRETED_S:.0f}"  # one that takes longer may have been begun so only
        output("it goes on from there with:")
        print_command(command)
