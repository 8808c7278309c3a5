"""Commands that inspect one problem or the installation: `show`, `explain`, `doctor`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType

from scheduler.cli import arguments
from scheduler.cli.listing import print_goes_on
from scheduler.cli.terminal import Json, console_here, labelled, output, print_command, print_json, table, texts
from scheduler.core.errors import NothingToDraw, SchedulerError
from scheduler.core.records import Entry, Record, schedule_text
from scheduler.core.text import seconds_text

if TYPE_CHECKING:
    from scheduler.core.hardware import Hardware
    from scheduler.core.records import Key, Record, Trial
    from scheduler.inspect.explain import Access, Account, Ranked
    from scheduler.prediction.predict import Answer
    from scheduler.store.store import Store
    from search_spaces.problem import Problem


# A note about calls that do not query the problem.
_NOT_EVERY_CALL = (
    "Calls outside the operation (other or mixed dtypes, empty arrays, another axis) always use XLA: the logger "
    '"scheduler" gives the reason (DEBUG), and backends="pallas" makes it an error. For sharded arrays, the problem is '
    "the one of a single device."
)


def show(
    operation: arguments.OperationName,
    fields: arguments.Fields,
    hardware: arguments.Chips = None,
    as_json: arguments.AsJson = False,
) -> None:
    """Show one problem's record and trials on each chip, including those of an unfinished search."""
    from scheduler.cli import plotting, record_report
    from scheduler.core import hardware as chips
    from scheduler.core import hints
    from scheduler.inspect import verdict
    from scheduler.inspect.case import of_record
    from scheduler.inspect.landscape import landscape
    from scheduler.inspect.provenance import record_head, unfinished_text

    with arguments.usage_errors():
        op, problem = arguments.problem_of(operation, fields)
    canonical = problem.canonical()

    def ask(store: Store) -> list[tuple[Key, Record | None, list[Trial], list[Trial]]]:
        cut = store.unfinished(op.name, canonical)
        heads = store.heads(operation=op.name, problem=canonical)
        records = {record.key: record for record in store.read(head.key for head in heads)}
        keys = dict.fromkeys((*records, *cut))
        return [(key, records.get(key), store.last_trials(key), cut.get(key, [])) for key in keys]

    kept = [(where, *row) for where, rows in arguments.ask_stores(ask) for row in rows]
    wanted = arguments.wanted_by([key for _, key, *_ in kept], None, hardware)
    found = [row for row in kept if wanted(row[1])]
    if not found:
        on = f" on {hardware}" if hardware else ""
        chip = None
        with contextlib.suppress(ValueError):  # the name matches several chips, or none
            chip = chips.find(hardware) if hardware else None
        raise SchedulerError(
            f"nothing is stored for {op.name} {problem}{on}; run: {hints.typed(operation, fields, chip)}"
        )
    if as_json:
        print_json([record_report.kept_json(*row, problem, arguments.chip_of(row[1].hardware)) for row in found])
        return
    for where, key, record, trials, cut in found:
        if record is not None:
            output(f"{key}, {where}", *record_head(record, trials_kept=bool(trials)), "")
            output(
                *record_report.entries(record, problem, arguments.chip_of(key.hardware), console_here().width),
                "",
                *verdict.verdict(record),
            )
            if (case := of_record(record, trials, op)) is not None:
                with contextlib.suppress(NothingToDraw):
                    output("", *plotting.landscape_lines(landscape(case)))
        if cut:
            output(*([""] * (record is not None)), f"{key}, {where}: {unfinished_text(cut)}")
            print_goes_on(key, hints.typed(operation, fields, arguments.chip_of(key.hardware)))
        if trials:
            output("", *record_report.trials_table(trials, record, console_here().width))


def explain(
    operation: arguments.OperationName,
    fields: arguments.Fields,
    hardware: arguments.HardwareName = None,
    device: arguments.Device = 0,
    top: Annotated[int, typer.Option(min=1, help="Number of top predictions to show.")] = 5,
    as_json: arguments.AsJson = False,
) -> None:
    """Account for every schedule, from the size of the space down to the winner."""
    from scheduler.cli import record_report
    from scheduler.core import hardware as chips
    from scheduler.core import hints
    from scheduler.core.records import choice_text, key_of
    from scheduler.inspect import explain as accounts
    from scheduler.inspect import verdict
    from scheduler.inspect.provenance import record_head
    from scheduler.measure.gpu import Gpu
    from scheduler.prediction import predict, transfer

    with arguments.usage_errors():
        op, problem = arguments.problem_of(operation, fields)
        chip = chips.find(hardware) if hardware is not None else None
    chip = chip or arguments.hardware_here(device)
    key = key_of(op, problem, chip)
    from_stores = list(arguments.ask_stores(lambda store: (store.get(key), store.trials(key))))
    found = [(where, record, tried) for where, (record, tried) in from_stores if record is not None]
    found.sort(key=lambda each: each[1].precedence)  # as calls do
    trials = [trial for _, (_, tried) in from_stores for trial in tried]
    # A local GPU is reserved for processes that measure.
    lowering = Gpu.wanted() is None
    explained = accounts.explain(op, problem, chip, trials, top=top, lowering=lowering)
    telling = arguments.ask_stores(lambda store: transfer.telling_records(store, op, problem, chip))
    model = predict.predict(op, problem, chip, records=[record for _, records in telling for record in records])
    record = found[0][1] if found else None
    held = transfer.recheck(op, problem, chip, record) if record is not None else "nothing is stored"
    if as_json:
        print_json(explanation_json(explained, model, record, held, problem, chip))
        return
    output(f"{op.name} {problem} on {chip.id}", "")
    kept = record is None or bool(trials)
    for account in explained:
        output(*account_parts(account, console_here().width, trials_kept=kept), "")
    if isinstance(held, str) or record is None:
        choice = choice_text(model.backend, model.schedule)
        output(f"Without a measurement, a call gets {choice}: {model.reason}.")
        why = "Nothing is stored" if record is None else f"The stored schedule is no longer valid ({held})"
        output(f"{why}; run:")
        print_command(hints.typed(operation, fields, chip))
    else:
        output(f"Winner, from {found[0][0]}:", *record_head(record, trials_kept=bool(found[0][2])), "")
        output(*record_report.entries(record, problem, chip, console_here().width), "", *verdict.verdict(record))
    output("", _NOT_EVERY_CALL)


def doctor(
    device: arguments.Device = 0,
    as_json: arguments.AsJson = False,
) -> None:
    """Check the installation: the chip, the backends, the caches, the versions, and missing parts.

    The exit status is 1 if something is broken, 3 if something is out of date (a warning), else 0.
    """
    from scheduler.inspect import doctor as checks

    findings = list(checks.examine(lambda: arguments.hardware_here(device), device))
    if as_json:
        print_json([dataclasses.asdict(finding) for finding in findings])
    else:
        output(labelled((finding.state, f"{finding.what}: {finding.detail}") for finding in findings))
        output("", checks.summary(findings))
    states = {finding.state for finding in findings}
    if status := 1 if "broken" in states else 3 if "warning" in states else 0:
        raise typer.Exit(status)


# ------------------------------------------------------------------------------
# Account of all schedules of a problem, as JSON and as text.


def explanation_json(
    accounts: Sequence[Account],
    answer: Answer,
    record: Record | None,
    held: Entry | str,
    problem: Problem,
    hardware: Hardware,
) -> Json:
    """Returns the account of all schedules as JSON.

    `held` is the entry that a call selects, or the reason why the record cannot be used.
    """
    from scheduler.cli.record_report import picked, record_json
    from scheduler.inspect.verdict import failures

    kernels = [
        {
            **picked(account, "backend", "version", "refused", "size", "footprint", "fitted", "untried"),
            "dropped": dict(account.dropped),
            "first": [dataclasses.asdict(ranked) for ranked in account.first],
            "tried": len(account.tried),
            "failed": dict(failures(account.tried)),
        }
        for account in accounts
    ]
    return {
        "hardware": hardware.id,
        "kernels": kernels,
        "model": dataclasses.asdict(answer),
        "record": record_json(record, problem, hardware) if record is not None else None,
        "holds": not isinstance(held, str),
        "reason": held if isinstance(held, str) else "",
    }


def account_parts(account: Account, width: int, *, trials_kept: bool = True) -> Iterator[RenderableType]:
    """Yields the counts of one kernel's schedules, from all to those tried, and the top predictions with their terms.

    Args:
      account: the account of the kernel.
      width: the width of the console.
      trials_kept: whether the store has the trials of the problem's record. Without them, the number of schedules tried
        is unknown.
    """
    from scheduler.inspect.verdict import failures

    title = f"{account.backend}, version {account.version}"
    if account.refused:
        yield f"{title}: {account.refused}"
        return
    yield f"{title}: {account.size} schedule{'' if account.size == 1 else 's'}"
    counts: list[tuple[object, str]] = [(f"-{count}", reason) for reason, count in account.dropped.items()]
    counts.append((f"={account.untried + len(account.tried)}", "legal"))
    if trials_kept:
        counts.append((len(account.tried), "of them tried"))
        counts += [(count, f"of these failed: {reason}") for reason, count in failures(account.tried).items()]
        counts.append((account.untried, "not tried"))
    yield labelled(counts, numbers=True)
    if any(ranked.terms for ranked in account.first):
        yield ""
        yield from _first_choices(account.backend, account.first, width)
    if not account.footprint:
        yield from _unranked(account.first)
    if account.fitted:
        yield account.fitted


def _unranked(first: Sequence[Ranked]) -> Iterator[RenderableType]:
    """Yields a note that the kernel declares no footprint, its consequences, and known facts of the first schedules."""
    yield (
        "The kernel declares no footprint: nothing is pruned or predicted, and schedules are tried in the order of "
        "their choices until times are known. The on-chip memory of a lowered kernel is checked before it is compiled."
    )
    known = [
        (ranked, ranked.refused or f"{ranked.onchip_bytes / 1024:.1f} KiB on chip")
        for ranked in first
        if ranked.refused or ranked.onchip_bytes
    ]
    if known:
        yield ""
        yield labelled((schedule_text(ranked.schedule), fact) for ranked, fact in known)


def _first_choices(backend: str, first: Sequence[Ranked], width: int) -> Iterator[RenderableType]:
    """Yields the top predictions, one column each, with the terms of their times; then their schedules."""
    from scheduler.inspect.verdict import compared

    rows: dict[str, Sequence[str]] = {
        "predicted": [seconds_text(ranked.predicted_s) for ranked in first],
        "on-chip": [f"{ranked.onchip_bytes / 1024:.1f} KiB" for ranked in first],
    }
    for name in dict.fromkeys(name for ranked in first for name, seconds in ranked.terms.items() if seconds):
        rows[name] = [seconds_text(ranked.terms[name]) for ranked in first]
    if any(ranked.access for ranked in first):
        accesses = [_access_texts(ranked.access) if ranked.access else ("", "", "") for ranked in first]
        rows |= dict(zip(("accesses", "wanted", "each"), zip(*accesses, strict=True), strict=True))
    title = "top predictions"
    widest = max(len(cell) for cells in rows.values() for cell in cells)
    fitting = max(1, (width - len(title)) // (widest + 3))
    for start in range(0, len(first), fitting):
        numbers = [str(number + 1) for number in range(start, min(start + fitting, len(first)))]
        made = table(title, *numbers, numbers=numbers)
        for name, cells in rows.items():
            made.add_row(*texts(name, *cells[start : start + fitting]))
        yield made
    choices = compared([(backend, ranked.schedule) for ranked in first])
    yield labelled((number + 1, text) for number, text in enumerate(choices.texts))
    yield from choices.note


def _access_texts(access: Access) -> tuple[str, str, str]:
    return f"{access.transactions:.3g}", f"{access.coalescing:.0%}", f"{access.bytes:.0f} B"
