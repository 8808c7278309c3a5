"""Writes a function's problems as an offline job, in the format that `jobs.parse` reads."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from scheduler.core import hints
from scheduler.functions.wording import places
from search_spaces import OPERATIONS, locate

if TYPE_CHECKING:
    from scheduler.functions.counted import Counted


def written(rows: Sequence[Counted], of: str) -> str:
    """Returns the text of the job: a table for each problem, with its count.

    An operation that no other process can load is left out, with a comment.

    Args:
      of: A description of the problems.
    """
    lines = [f"# {of}; on the chip that is to run it:"]
    lines.append(f"#   tile-scheduler tune --job {shlex.join(['job.toml', *_own(rows)])}")
    for row in rows:
        lines += ["", *_table(row)]
    return "\n".join(lines) + "\n"


def _own(rows: Iterable[Counted]) -> Iterator[str]:
    """Yields the command line options that allow a job to load the user's code."""
    names = (
        hints.name(row.operation) for row in rows if row.operation.name not in OPERATIONS and locate(row.operation)
    )
    for name in dict.fromkeys(names):
        yield from ("--own", name)


def _table(row: Counted) -> Iterator[str]:
    if locate(row.operation) is None:
        yield f"# left out: {row.operation.name} {row.problem}; no module holds its operation, so no search can load it"
        return
    told = row.problem.told() | ({"dtype": dtype} if (dtype := getattr(row.problem, "dtype", None)) else {})
    fields = [field.name for field in dataclasses.fields(row.problem)]
    yield "[[problem]]" + (f"  # {places(row.lines)}" if row.lines else "")
    yield f"operation = {json.dumps(hints.name(row.operation))}"
    if "count" not in fields:
        yield f"count = {row.count}"
    yield from (f"{name} = {json.dumps(told[name])}" for name in fields if name in told)
