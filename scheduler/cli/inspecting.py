"""Commands that inspect one problem or the installation: `show`, `explain`, `doctor`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scheduler.cli.arguments import (
    AsJson,
    Chips,
    Device,
    Fields,
    HardwareName,
    OperationName,
    chip_of,
    hardware_here,
    problem_of,
    range_of,
    usage_errors,
    wanted_by,
)
from scheduler.cli.listing import print_goes_on
from scheduler.cli.stores import ask_stores
from scheduler.cli.terminal import console_here, output, print_command, print_json
from scheduler.core.errors import NothingToDraw, SchedulerError

if TYPE_CHECKING:
    from scheduler.core.records import Key, Record, Trial
    from scheduler.store.store import Store
    from search_spaces.operation import Operation
    from search_spaces.problem import Problem

# A note about calls that do not query the problem.
_NOT_EVERY_CALL = (
    "Whatever is stored, XLA answers calls that pose no such problem (other or mixed dtypes, empty arrays, another "
    'axis): the logger "scheduler" says why (DEBUG), and backends="pallas" makes it an error. On arrays divided over a '
    "mesh the problem is that of one device's part."
)


def show(operation: OperationName, fields: Fields, hardware: Chips = None, as_json: AsJson = False) -> None:
    """Show one problem's record on each chip, with its trials, and those of a search that was cut short; or a range."""
    from scheduler.cli import landscape_report, record_report
    from scheduler.core import hardware as chips
    from scheduler.core import hints
    from scheduler.core.identity import family_of
    from scheduler.inspect import provenance, verdict
    from scheduler.inspect.case import of_record
    from scheduler.inspect.landscape import landscape

    with usage_errors():
        if (ends := range_of(operation, fields)) is not None:
            _show_ranges(*ends, hardware, as_json)
            return
        op, problem = problem_of(operation, fields)
    canonical = problem.canonical()

    def ask(store: Store) -> list[tuple[Key, Record | None, list[Trial], list[Trial]]]:
        cut = store.unfinished(op.name, canonical)
        heads = store.heads(operation=op.name, problem=canonical)
        records = {record.key: record for record in store.read(head.key for head in heads)}
        keys = dict.fromkeys((*records, *cut))
        return [(key, records.get(key), store.last_trials(key), cut.get(key, [])) for key in keys]

    kept = [(where, *row) for where, rows in ask_stores(ask) for row in rows]
    wanted = wanted_by([key for _, key, *_ in kept], None, hardware)
    found = [row for row in kept if wanted(row[1])]
    if not found:
        on = f" on {hardware}" if hardware else ""
        for where, ranges in ask_stores(lambda store: store.ranges.all(operation=op.name)):
            for one in ranges:
                if canonical != one.problem and one.problem == family_of(problem, one.field):
                    output(f"{where} has {one} on {one.hardware}; explain says what that answers")
        chip = None
        with contextlib.suppress(ValueError):  # the name matches several chips, or none
            chip = chips.find(hardware) if hardware else None
        raise SchedulerError(f"nothing is stored for {op.name} {problem}{on}; run: {hints.tune(op, problem, chip)}")
    if as_json:
        print_json([record_report.kept_json(*row, problem, chip_of(row[1].hardware)) for row in found])
        return
    for where, key, record, trials, cut in found:
        if record is not None:
            output(f"{key}, {where}", *provenance.record_head(record, trials_kept=bool(trials)), "")
            output(
                *record_report.entries(record, problem, chip_of(key.hardware), console_here().width),
                "",
                *verdict.verdict(record),
            )
            if (case := of_record(record, trials, op)) is not None:
                with contextlib.suppress(NothingToDraw):
                    output("", *landscape_report.landscape(landscape(case)))
        if cut:
            output(*([""] * (record is not None)), f"{key}, {where}: {provenance.unfinished_text(cut)}")
            print_goes_on(key, hints.tune(op, problem, chip_of(key.hardware)))
        if trials:
            chip = chip_of(key.hardware)
            output("", *record_report.trials_table(key, trials, record, problem, chip, console_here().width))


def _show_ranges(
    op: Operation[Any], field: str, lowest: Problem, highest: Problem, hardware: str | None, as_json: bool
) -> None:
    """Prints the stored ranges of these problems that overlap this range, with the records at their points."""
    from scheduler.cli import range_report
    from scheduler.core.identity import family_of
    from scheduler.core.ranges import Range
    from scheduler.core.records import Key

    low, high = getattr(lowest, field), getattr(highest, field)

    def ask(store: Store) -> list[tuple[Range, list[Record | None]]]:
        of_these = [
            one
            for one in store.ranges.all(operation=op.name)
            if (one.field, one.problem) == (field, family_of(lowest, field)) and low <= one.high and one.low <= high
        ]
        return [(one, [store.get(range_report.key_at(one, op, value)) for value in one.points]) for one in of_these]

    kept = [(where, *row) for where, rows in ask_stores(ask) for row in rows]
    wanted = wanted_by([Key(one.operation, one.hardware, one.problem) for _, one, _ in kept], None, hardware)
    found = [row for row in kept if wanted(Key(row[1].operation, row[1].hardware, row[1].problem))]
    if not found:
        raise SchedulerError(f"no range of {op.name} is stored that shares a value with {field}={low}..{high}")
    if as_json:
        print_json([{"where": where, **range_report.range_json(one)} for where, one, _ in found])
        return
    for where, one, records in found:
        output(f"{one} on {one.hardware}, {where}", *range_report.summary(one), "")
        output(*range_report.points(one, records, console_here().width))


def explain(
    operation: OperationName,
    fields: Fields,
    hardware: HardwareName = None,
    device: Device = 0,
    top: Annotated[int, typer.Option(min=1, help="How many top predictions to show.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Account for every schedule, from the size of the space down to the winner."""
    from scheduler.cli import explain_report, record_report
    from scheduler.core import hardware as chips
    from scheduler.core import hints
    from scheduler.core.identity import key_of
    from scheduler.core.records import choice_text
    from scheduler.inspect import explain as accounts
    from scheduler.inspect import provenance, verdict
    from scheduler.measure.gpu import Gpu
    from scheduler.prediction import between, evidence, validation

    with usage_errors():
        op, problem = problem_of(operation, fields)
        chip = chips.find(hardware) if hardware is not None else None
    chip = chip or hardware_here(device)
    key = key_of(op, problem, chip)
    asked = list(ask_stores(lambda store: (store.get(key), store.trials(key))))
    found = [(where, record, tried) for where, (record, tried) in asked if record is not None]
    found.sort(key=lambda each: each[1].estimated)  # calls prefer measured records
    trials = [trial for _, (_, tried) in asked for trial in tried]
    # A local GPU is reserved for processes that measure.
    lowering = Gpu.wanted() is None
    explained = accounts.explain(op, problem, chip, trials, top=top, lowering=lowering)
    stored = evidence.merged(found for _, found in ask_stores(lambda store: evidence.read(store, op, problem, chip)))
    model = between.answer(op, problem, chip, records=stored.records, ranges=stored.ranges)
    record = found[0][1] if found else None
    held = validation.recheck(op, problem, chip, record) if record is not None else "nothing is stored"
    if as_json:
        print_json(explain_report.explanation_json(explained, model, record, held, problem, chip))
        return
    output(f"{op.name} {problem} on {chip.id}", "")
    kept = record is None or bool(trials)
    for account in explained:
        output(*explain_report.account_parts(account, console_here().width, trials_kept=kept), "")
    if isinstance(held, str) or record is None or model.source == "range":
        choice = choice_text(model.backend, model.schedule)
        why = "only an estimate is stored"  # a measured range has priority over an estimated record
        if isinstance(held, str):
            why = held if record is None else f"the stored schedule no longer holds ({held})"
        where = "From a range" if model.source == "range" else "Without measuring"
        output(f"{where}, a call gets {choice}: {model.reason}.")
        why = f"of the problem itself {why}" if model.source == "range" else why
        output(f"{why[0].upper()}{why[1:]}; run:")
        print_command(hints.tune(op, problem, chip))
    else:
        output(f"Winner, from {found[0][0]}:", *provenance.record_head(record, trials_kept=bool(found[0][2])), "")
        output(*record_report.entries(record, problem, chip, console_here().width), "", *verdict.verdict(record))
    output("", _NOT_EVERY_CALL)


def doctor(device: Device = 0, as_json: AsJson = False) -> None:
    """Say what is here: the chip, the backends, the caches, the versions, and what is missing.

    The status is 1 where something is broken, 3 where something is out of date (a warning), else 0.
    """
    from scheduler.cli import layout
    from scheduler.inspect import doctor as checks

    findings = list(checks.examine(lambda: hardware_here(device), device))
    if as_json:
        print_json([{"what": f.what, "state": f.state, "detail": f.detail} for f in findings])
    else:
        output(layout.labelled((finding.state, f"{finding.what}: {finding.detail}") for finding in findings))
        output("", checks.summary(findings))
    states = {finding.state for finding in findings}
    if status := 1 if "broken" in states else 3 if "warning" in states else 0:
        raise typer.Exit(status)
