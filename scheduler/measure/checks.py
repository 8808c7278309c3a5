"""What checks the answers to a problem: programs that the processes which come to it compile, each another one."""

from __future__ import annotations

from collections.abc import Callable
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
    """What checks answers to `problem`, and its operands, whose programs other processes may be at as well."""
    rows = compared_rows(problem)
    traced = jax.jit(_reference(problem, rows)).trace(*problem.operands())
    expected = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in traced.out_info]
    programs, inputs = reference_programs.together(
        (
            lambda: reference_programs.compiled(traced.lower()),
            lambda: comparisons(problem, expected, rows),
            lambda: buffers.poisoning(problem),
        ),
        lambda: jax.block_until_ready(problem.inputs(seed)),
    )
    return Checks(rows, *programs), inputs


def _reference(problem: Problem, rows: Rows | None) -> Compiled:
    """The right results as a function of all operands: of those rows alone, where they are given."""
    part = None if rows is None else problem.at_rows(rows)
    if part is None:
        return lambda *args: as_tuple(problem.reference(*args))
    below, take = part
    return lambda *args: as_tuple(below.reference(*take(args)))
