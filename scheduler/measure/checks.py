"""What checks the answers to a problem: compiled programs, which compile processes prepare."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from scheduler.measure import buffers
from scheduler.measure.verification import Rows, compared_rows, comparisons
from search_spaces import reference_programs
from search_spaces.problem import Problem, as_tuple

Results = tuple[jax.Array, ...]
Compiled = Callable[..., Results]


class Checks(NamedTuple):
    """Compiled programs.

    Attributes:
      rows: of the results, the only ones that are compared where these are large; None for all.
      reference: the right results, of those rows.
      comparisons: what compares each result with its reference.
      poison: makes results in which nothing is right (`buffers.poisoning`).
    """

    rows: Rows | None
    reference: Compiled
    comparisons: tuple[Any, ...]
    poison: buffers.Poison


def compiled_checks(problem: Problem, seed: int) -> tuple[Checks, tuple[jax.Array, ...]]:
    """What checks answers to `problem`, and its operands."""
    rows = compared_rows(problem)
    reference, expected = _reference(problem, rows)
    checks = Checks(
        rows,
        reference_programs.compiled(reference, problem.operands()),
        comparisons(problem, expected, rows),
        buffers.poisoning(problem),
    )
    return checks, jax.block_until_ready(problem.inputs(seed))


# `prepare` compiles the programs in so many parts, each of which another process may compile.
PARTS = 3


def prepare(problem: Problem, device: jax.Device, part: int) -> None:
    """Compiles programs of `compiled_checks`, and those of special operands, for whoever shares the directory.

    Args:
      device: for which they are compiled; nothing runs.
      part: which of them: 0 to `PARTS` - 1.
    """
    with reference_programs.compiled_for(device):
        for compile_some in _part(problem, part):
            with contextlib.suppress(Exception):  # operands that are drawn by other code; whoever needs them meets it
                compile_some()


def _part(problem: Problem, part: int) -> Iterator[Callable[[], Any]]:
    if part < 2:
        rows = compared_rows(problem)
        reference, expected = _reference(problem, rows)
    if part == 0:
        yield lambda: reference_programs.compiled(reference, problem.operands())
    elif part == 1:
        yield lambda: buffers.poisoning(problem)
        yield lambda: comparisons(problem, expected, rows)
    else:
        yield lambda: buffers.copying(problem.inputs(0))
        for kind in problem.special():
            yield lambda kind=kind: problem.special_inputs(kind, 0)  # type: ignore[misc]


def _reference(problem: Problem, rows: Rows | None) -> tuple[Compiled, tuple[jax.ShapeDtypeStruct, ...]]:
    """The right results as a function of all operands, and their shapes: of those rows alone, where they are given."""
    part = None if rows is None else problem.at_rows(rows)

    def reference(*args: jax.Array) -> Results:
        if part is None:
            return as_tuple(problem.reference(*args))
        below, take = part
        return as_tuple(below.reference(*take(args)))

    return reference, jax.eval_shape(reference, *problem.operands())
