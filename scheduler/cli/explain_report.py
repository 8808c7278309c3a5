"""Account of all schedules of a problem, as JSON and as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table

from scheduler.cli.layout import Json, labelled, table, texts
from scheduler.cli.record_report import record_json
from scheduler.core.quantities import seconds_text
from scheduler.core.records import Entry, Record, schedule_text
from scheduler.inspect.provenance import failures
from scheduler.inspect.wording import compared

if TYPE_CHECKING:
    from scheduler.core.hardware import Hardware
    from scheduler.inspect.explain import Access, Account, Ranked
    from scheduler.prediction.predict import Answer
    from search_spaces.problem import Problem


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
    kernels = [
        {
            "backend": account.backend,
            "version": account.version,
            "refused": account.refused,
            "size": account.size,
            "dropped": dict(account.dropped),
            "footprint": account.footprint,
            "first": [dataclasses.asdict(ranked) for ranked in account.first],
            "fitted": account.fitted,
            "tried": len(account.tried),
            "failed": dict(failures(account.tried)),
            "untried": account.untried,
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
    title = f"{account.backend}, version {account.version}"
    if account.refused:
        yield f"{title}: {account.refused}"
        return
    yield f"{title}: {account.size} schedule{'' if account.size == 1 else 's'}"
    counts = Table.grid(padding=(0, 2))
    counts.add_column(justify="right", no_wrap=True)
    counts.add_column(overflow="fold")
    for reason, count in account.dropped.items():
        counts.add_row(*texts(f"-{count}", reason))
    counts.add_row(*texts(f"={account.untried + len(account.tried)}", "legal"))
    if trials_kept:
        counts.add_row(*texts(len(account.tried), "of them tried"))
        for reason, count in failures(account.tried).items():
            counts.add_row(*texts(count, f"of these failed: {reason}"))
        counts.add_row(*texts(account.untried, "not tried"))
    yield counts
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
        "No footprint is declared: nothing is pruned by it or predicted from it, and schedules are tried in the order "
        "of their choices until times tell more. What a lowered kernel asks for is checked before it is compiled."
    )
    known = [
        (ranked, ranked.refused or f"{ranked.onchip_bytes / 1024:.1f} KiB on chip")
        for ranked in first
        if ranked.refused or ranked.onchip_bytes
    ]
    if known:
        yield ""
        yield labelled((schedule_text(ranked.schedule), said) for ranked, said in known)


def _first_choices(backend: str, first: Sequence[Ranked], width: int) -> Iterator[RenderableType]:
    """Yields the top predictions, one column each, with the terms of their times; then their schedules."""
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
