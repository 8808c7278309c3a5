"""Writes a function's problems as text: for a person, and as an offline job."""

from __future__ import annotations

import dataclasses
import json
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scheduler.core import hints
from scheduler.core.frames import Call
from scheduler.core.text import seconds_text
from search_spaces import OPERATIONS, locate

if TYPE_CHECKING:
    from scheduler.functions.equations import ProblemCount
    from scheduler.functions.problems import Problems


# ------------------------------------------------------------------------------
# Formats a function's problems as text, 100 columns wide.

WIDTH = 100


def place(line: Call) -> str:
    """Returns ``model.py:41``, with the relative path if the file is below the current directory."""
    file = Path(line.file)
    try:
        name = str(file.relative_to(Path.cwd()))
    except (ValueError, OSError):
        name = file.name
    return f"{name}:{line.line}" if name.isprintable() else f"{name!r}:{line.line}"


def problem_lines(lines: Iterable[Call]) -> str:
    return ", ".join(map(place, lines))


def describe_problems(row: ProblemCount) -> str:
    return f"{row.operation.name} {row.problem.brief()}"


def times(row: ProblemCount) -> str:
    return f"{row.count} times" if row.count > 1 else "once"


def _notes(found: Problems) -> Iterator[str]:
    """Yields notes on the counts and the times."""
    if found.tuned or found.untuned:
        yield f"Times are roofline lower bounds for {found.hardware.kind}."
    if found.mesh:
        yield f"Problems are those of one device; XLA partitions the function over {found.mesh}."
    for each in found.left:
        yield f"XLA is used for {describe_problems(each.row)}, {times(each.row)}: {each.reason}."
    for kind, note in (
        ("while", "all iterations of a while loop count as one"),
        ("cond", "all branches of a cond count"),
    ):
        loops = [loop for loop in found.loops if loop.kind == kind]
        if loops:
            yield ": ".join(filter(None, (problem_lines(loop.line for loop in loops if loop.line), f"{note}.")))


def problems_text(found: Problems) -> str:
    """Returns the full text: for each problem its figures, and below them the lines of the user's code."""
    total = sum(row.least_s for row in (*found.tuned, *found.untuned))
    lines = list(_table_lines(found.tuned, total))
    if not found.tuned and not found.left:
        lines.append("The function makes no tuned call.")
    if found.untuned:
        lines.append("Not tuned; scheduler.optimize replaces these where kernels are faster:")
        lines += _table_lines(found.untuned, total)
    return "\n".join(lines + [line for note in _notes(found) for line in _folded(note)])


def _table_lines(rows: Sequence[ProblemCount], total: float) -> Iterator[str]:
    """Yields a table with the count, the minimum time of all runs, and its share of `total`, for each problem."""
    cells = [("count", "at least", "share")] if rows else []
    cells += [(str(row.count), seconds_text(row.least_s), f"{100 * row.least_s / total:.1f} %") for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    heads = ["".join(f"{cell:>{width}}  " for cell, width in zip(row, widths, strict=True)) for row in cells]
    yield from (f"{head}problem" for head in heads[:1])
    for head, row in zip(heads[1:], rows, strict=True):
        below = " " * len(head)
        yield from _folded(describe_problems(row), head, below)
        yield from _folded(problem_lines(row.lines), below, below)


def _folded(text: str, first: str = "", others: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)


# ------------------------------------------------------------------------------
# Writes a function's problems as an offline job, in the format that `jobs.parse` reads.


def job_text(rows: Sequence[ProblemCount], of: str) -> str:
    """Returns the text of the job: a table for each problem, with its count.

    An operation that no other process can load is left out, with a comment.

    Args:
      of: A description of the problems.
    """
    lines = [f"# {of}; on the chip that is to run it:"]
    lines.append(f"#   tile-scheduler tune-job {shlex.join(['job.toml', *_own(rows)])}")
    for row in rows:
        lines += ["", *_table(row)]
    return "\n".join(lines) + "\n"


def _own(rows: Iterable[ProblemCount]) -> Iterator[str]:
    """Yields the command line options that allow a job to load the user's code."""
    names = (
        hints.name(row.operation) for row in rows if row.operation.name not in OPERATIONS and locate(row.operation)
    )
    for name in dict.fromkeys(names):
        yield from ("--own", name)


def _table(row: ProblemCount) -> Iterator[str]:
    if locate(row.operation) is None:
        yield f"# left out: {row.operation.name} {row.problem}; its operation is no global of a module"
        return
    values = row.problem.non_default_fields() | (
        {"dtype": dtype} if (dtype := getattr(row.problem, "dtype", None)) else {}
    )
    fields = [field.name for field in dataclasses.fields(row.problem)]
    yield "[[problem]]" + (f"  # {problem_lines(row.lines)}" if row.lines else "")
    yield f"operation = {json.dumps(hints.name(row.operation))}"
    if "count" not in fields:
        yield f"count = {row.count}"
    yield from (f"{name} = {json.dumps(values[name])}" for name in fields if name in values)
