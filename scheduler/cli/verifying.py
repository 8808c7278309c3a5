"""The command `verify`: measures stored winners again."""

from __future__ import annotations

from typing import Annotated

import typer

from scheduler.cli.arguments import (
    AsJson,
    Chips,
    CompileTimeout,
    Device,
    RunTimeout,
    Seed,
    field_texts,
    finite,
    has_fields,
    records_of,
    usage_errors,
    user_store,
)
from scheduler.cli.terminal import console_here, output, print_json, say
from scheduler.core.errors import SchedulerError


def verify(
    fields: Annotated[list[str] | None, typer.Argument(help="Only problems with these fields, as name=value.")] = None,
    operation: Annotated[
        str | None, typer.Option(help="Only this operation: a name, package.module:NAME, or file.py:NAME.")
    ] = None,
    hardware: Chips = None,
    shipped: Annotated[bool, typer.Option("--shipped", help="Verify the records shipped with this package.")] = False,
    within: Annotated[
        float,
        typer.Option(min=0, callback=finite, help="Percent by which a winner may be slower than a rival."),
    ] = 3.0,
    update: Annotated[bool, typer.Option("--update", help="Store the new times and ranking.")] = False,
    device: Device = 0,
    compile_timeout: CompileTimeout = None,
    run_timeout: RunTimeout = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Time stored winners again against their rivals, and report those that are no longer valid, with exit status 1.

    Rivals are the other schedules of the record, including XLA's, and the model's choice. Only records of a chip of
    this host can be timed. The new times replace an imported record, which is then verified.
    """
    from scheduler.cli import search_report
    from scheduler.measure.runner import RunnerOptions
    from scheduler.search.reverify import reverify
    from scheduler.store.store import shipped as shipped_store
    from search_spaces import load

    with usage_errors():
        op = load(operation) if operation is not None else None
    options = RunnerOptions(device, None, compile_timeout, run_timeout)
    with usage_errors():
        wanted = field_texts(fields or [])
    user = user_store()
    store = shipped_store() if shipped else user
    stored = records_of(store, op.name if op else None, hardware) if store is not None else []
    records = [record for record in stored if has_fields(record, op, wanted)]
    if not records:
        raise SchedulerError(f"no such record is {'shipped' if shipped else f'in {user.location}'}")
    if update or any(record.imported for record in records):
        user.require_writable()
    verdicts, stored_count = [], 0
    for verdict in reverify(
        records,
        operation=op,
        options=options,
        within=within / 100,
        seed=seed,
    ):
        verdicts.append(verdict)
        say(f"{len(verdicts)}/{len(records)}: {verdict.record.key}: {verdict.state}")
        if verdict.refreshed is not None and (update or verdict.record.imported):
            user.put(verdict.refreshed)
            stored_count += 1
    verdicts.sort(key=lambda verdict: records.index(verdict.record))
    if as_json:
        print_json([search_report.reverified_json(verdict) for verdict in verdicts])
    else:
        output(*search_report.reverified(verdicts, console_here().width))
        if update or stored_count:
            output(f"{stored_count} records with today's times are stored in {user.location}")
    lost = sum(verdict.state in ("slower", "broken") for verdict in verdicts)
    if lost:
        raise SchedulerError(f"{lost} of {len(verdicts)} records are no longer valid; tune them again, or use --update")
    if all(verdict.state == "elsewhere" for verdict in verdicts):
        raise SchedulerError(f"none of {len(verdicts)} records could be timed: {verdicts[0].reason}")
