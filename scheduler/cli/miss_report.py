"""Cache misses as JSON and as a table: the problem, count, source line, and expected gain of a search."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType

from scheduler.cli.layout import Json, Row, ledger
from scheduler.core import codec
from scheduler.core.quantities import seconds_text
from scheduler.core.records import choice_text
from search_spaces import spelled

if TYPE_CHECKING:
    from scheduler.search.missed import Missed


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
        "settled": one.settled is not None,
        "library_s": one.library_s,
        "best_s": one.best_s,
        "gain_s": one.gain_s,
        "reason": one.reason,
    }


def missed(of: Sequence[Missed], width: int) -> Iterator[RenderableType]:
    """Yields one row per miss, in groups by chip."""
    groups = []
    in_order = sorted(of, key=lambda one: one.miss.key.hardware)  # stable: keeps the order of misses within a chip
    for hardware, ones in itertools.groupby(in_order, lambda one: one.miss.key.hardware):
        group = list(ones)
        total_s = sum(one.library_total_s for one in group)
        groups.append(([hardware], [_row(one, total_s) for one in group]))
    columns = ("lowered", "last", "XLA", "best", "gain", "share")
    yield from ledger("problem, and the line that asked", columns, groups, width)
    yield ""
    yield (
        "XLA, best: predicted times of one call. gain: their difference for as many calls as were lowered, which says "
        "little of how often each ran; share: of what XLA takes for all of them. `tile-scheduler tune --missed` "
        "searches those of the chip that is here, or that --hardware names, in this order."
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
    if one.settled is not None:
        since = f"settled: {choice_text(one.settled.backend, one.settled.schedule)}"
    return Row(
        f"{miss.key.operation} {spelled(miss.key.operation, miss.key.problem)}", figures, [miss.line, since, one.reason]
    )
