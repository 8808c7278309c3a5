"""The compiled programs that check the results of a problem; compile processes prepare them."""

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
    """Compiled programs that check results.

    Attributes:
      rows: the rows that are compared if the results are large; None compares all.
      reference: computes the expected results, of those rows.
      comparisons: the programs that compare each result with its reference.
      poison: creates result buffers with wrong values (`buffers.poisoning`).
    """

    rows: Rows | None
    reference: Compiled
    comparisons: tuple[Any, ...]
    poison: buffers.Poison


def compiled_checks(problem: Problem, seed: int) -> tuple[Checks, tuple[jax.Array, ...]]:
    """Returns the programs that check the results of `problem`, and its operands."""
    rows = compared_rows(problem)
    reference, expected = _reference(problem, rows)
    checks = Checks(
        rows,
        reference_programs.compiled(reference, problem.operands()),
        comparisons(problem, expected, rows),
        buffers.poisoning(problem),
    )
    return checks, jax.block_until_ready(problem.inputs(seed))


# `prepare` compiles the programs in this many parts, so that processes can compile them in parallel.
PARTS = 3


def prepare(problem: Problem, device: jax.Device, part: int) -> None:
    """Compiles programs of `compiled_checks` and of special operands, for processes that share the directory.

    Args:
      device: the device to compile for; nothing runs on it.
      part: the part to compile, from 0 to `PARTS` - 1.
    """
    with reference_programs.compiled_for(device):
        for compile_some in _part(problem, part):
            with contextlib.suppress(Exception):  # custom drawing code failed: its user reports the error
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
    """Returns the reference as a function of all operands, and the shapes of its results.

    With `rows`, the function computes those rows only.
    """
    part = None if rows is None else problem.at_rows(rows)

    def reference(*args: jax.Array) -> Results:
        if part is None:
            return as_tuple(problem.reference(*args))
        below, take = part
        return as_tuple(below.reference(*take(args)))

    return reference, jax.eval_shape(reference, *problem.operands())
