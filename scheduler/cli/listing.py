"""The command `list`: lists stored schedules."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from scheduler.cli.arguments import AsJson, Chips, Everything, chip_of
from scheduler.cli.stored import MOST, chosen
from scheduler.cli.stores import SHIPPED
from scheduler.cli.terminal import console_here, output, print_command, print_json

if TYPE_CHECKING:
    from scheduler.core.records import Key


def list_(
    operation: Annotated[str | None, typer.Option(help="Only this operation.")] = None,
    hardware: Chips = None,
    everything: Everything = False,
    most: Annotated[int, typer.Option(min=0, help="Print at most so many records; 0 prints all.")] = MOST,
    as_json: AsJson = False,
) -> None:
    """List the stored schedules: the user's own, and those shipped for the chip that is here; searches cut short."""
    from scheduler.cli import range_report, record_report
    from scheduler.inspect import provenance

    stored = chosen(operation, hardware, everything=everything, most=0 if as_json else most, fields=not as_json)
    if as_json:
        print_json([{"where": where, **record_report.record_json(record)} for where, record in stored.records])
        return
    if stored.records:
        output(*record_report.records(stored.records, console_here().width))
    for where, one in stored.ranges:
        output("", f"{one} on {one.hardware}, {where}", *range_report.summary(one))
    for where, key, trials in stored.unfinished:
        output("", f"{key}, {where}: {provenance.unfinished_text(trials)}")
        print_goes_on(key)
    if not (stored.records or stored.ranges or stored.unfinished):
        _print_none([where for where in stored.stores if where != SHIPPED], operation)
    for left in stored.left_out_texts():
        output("", left)


def _print_none(places: Sequence[str], operation: str | None) -> None:
    """Prints that nothing is stored, with an example command to start a search."""
    from scheduler.core import hints
    from scheduler.inspect.example import example
    from search_spaces import OPERATIONS, load

    op = load(operation if operation in OPERATIONS else OPERATIONS[0])
    small = example(op, 256)
    assert small is not None, "of the operations here, all that has no default is an extent"
    of = f" of {operation}" if operation is not None else ""
    for place in places:  # unreadable stores are excluded, and were reported before
        output(f"No record{of} is in {place}, and none is shipped for this chip; to search a problem, for example:")
    print_command(hints.tune(op, small))


def print_goes_on(key: Key, command: str | None = None) -> None:
    """Prints the command that resumes an unfinished search.

    For user operations, only the caller knows the defining file, so `command` must be given to be printed.
    """
    from scheduler.core import hints
    from search_spaces import OPERATIONS, load

    if command is None and key.operation in OPERATIONS:
        op = load(key.operation)
        with contextlib.suppress(ValueError):  # the stored problem may be invalid in the current version
            command = hints.tune(op, op.problem.from_canonical(key.problem), chip_of(key.hardware))
    if command is None:
        output("the command that began it goes on from there")
    else:
        if (chip := chip_of(key.hardware)) is not None and chip.abilities.interpreted:
            from scheduler.search.tuner import LONGEST_INTERPRETED_S

            # An interpreted search that takes longer than this can only have been started with --seconds.
            command += f" --seconds {LONGEST_INTERPRETED_S:.0f}"
        output("it goes on from there with:")
        print_command(command)
