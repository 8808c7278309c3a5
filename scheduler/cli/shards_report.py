"""Output of `shards`: for each sharding of a problem, the problem of one device, the sums, and the gathered arrays."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from scheduler.cli.layout import Json
from scheduler.core import codec, hints
from scheduler.functions import job_text
from scheduler.functions.counted import Counted
from scheduler.inspect import shards

if TYPE_CHECKING:
    from scheduler.inspect.shards import Way
    from search_spaces.operation import Operation


def lines(operation: Operation[Any], ways: Sequence[Way], width: int) -> Iterator[str]:
    """Yields the lines of each sharding, folded to `width`. Commands are not folded, so that they can be copied."""
    for way in ways:
        operands, results = (", ".join(specs) for specs in _specs(way))
        yield from textwrap.wrap(f"{way.said}: {operands} -> {results}", width, subsequent_indent="  ")
        for told in _told(way):
            yield from textwrap.wrap(told, width, initial_indent="  ", subsequent_indent="    ")
        yield f"  {hints.tune(operation, way.divided.problem)}"
        yield ""


def _told(way: Way) -> Iterator[str]:
    divided = way.divided
    yield f"each device: {divided.problem}"
    if axes := _summed(way):
        rest = "" if divided.problem == divided.local else "; what the problem does with them is a pass after that"
        scattered = " and scattered" if divided.scatters else ""
        yield f"results are summed over {', '.join(axes)}{scattered}{rest}"
    yield from (f"gathered: {each}" for each in divided.gathered)


def _specs(way: Way) -> tuple[list[str], list[str]]:
    return [*map(shards.spec_text, way.divided.operands)], [*map(shards.spec_text, way.divided.results)]


def to_json(operation: Operation[Any], ways: Sequence[Way]) -> list[Json]:
    return [
        {
            "divided": way.said,
            "operands": _specs(way)[0],
            "results": _specs(way)[1],
            "problem": codec.problem_to_json(way.divided.problem.canonical()),
            "sums": _summed(way),
            "gathered": list(way.divided.gathered),
            "command": hints.tune(operation, way.divided.problem),
        }
        for way in ways
    ]


def job(operation: Operation[Any], ways: Sequence[Way], of: str) -> str:
    """Returns the distinct problems of one device as a job."""
    problems = dict.fromkeys(way.divided.problem for way in ways)
    return job_text.written([Counted(operation, problem, 1, (), 0.0) for problem in problems], of)


def _summed(way: Way) -> list[str]:
    """Returns the mesh axes over which results are summed."""
    return list(dict.fromkeys(axis for axes in way.divided.sums for axis in axes))
