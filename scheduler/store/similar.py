"""Index lookup of problems that may be similar to a given one, by the numbers in their texts."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from scheduler.core.similar import Near
from scheduler.store.database import Select
from scheduler.store.schema import SCHEDULES, SUM_COLUMNS

# Number of problems in a first query; a second query without a limit follows if they do not suffice.
CANDIDATES = 64


def similar(
    select: Select, near: Near, within: float, kinds: Sequence[int], most: int
) -> tuple[list[tuple[float, str]], float]:
    """Returns problems that may be near enough with lower bounds on their distances, and the distance covered
    completely.

    Args:
      kinds: values of `estimated`.
      most: maximum number of rows per spelling and kind; a negative number means no limit, as in SQLite.
    """
    texts: list[tuple[float, str]] = []
    reach = within
    for (place, left), kind in itertools.product(near.places(within), kinds):
        beyond = within - left
        rows_found = select(
            _SIMILAR if most >= 0 else _ALL_SIMILAR,
            {
                "operation_": near.operation,
                "hardware_": near.hardware,
                "pattern_": place.pattern,
                "estimated_": kind,
                "lowest": place.size - left,
                "highest": place.size + left,
                "left": left,
                **{f"{name}_": value for name, value in zip(SUM_COLUMNS, place.sums, strict=True)},
            },
        )
        texts += [(beyond + least, text) for text, least in rows_found if isinstance(text, str)]
        if len(rows_found) == most:
            reach = min(reach, beyond + rows_found[-1][1])
    return texts, reach


def _statement() -> sa.Select[Any]:
    """Returns the query for problems of one pattern that may be near enough, with lower bounds on their distances."""
    columns, given = SCHEDULES.c, sa.bindparam
    apart = (sa.func.abs(columns[name] - given(f"{name}_", type_=sa.Double)) for name in SUM_COLUMNS)
    least = functools.reduce(operator.add, apart)
    return sa.select(columns.problem, least.label("doublings")).where(
        *(columns[name] == given(f"{name}_") for name in ("operation", "hardware", "pattern", "estimated")),
        columns.size.between(given("lowest"), given("highest")),
        least <= given("left"),
    )


# Constructed once, because construction takes longer than execution.
_ALL_SIMILAR = _statement()
_SIMILAR = _ALL_SIMILAR.order_by(sa.literal_column("doublings")).limit(CANDIDATES)
