"""A row-wise formula as XLA fuses it, in float32 and as users write it: the answer to beat, and a legal one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp

from search_spaces.kernel import Library, LibraryKernel, Target
from search_spaces.problem import Tolerance, as_tuple
from search_spaces.rowwise.problem import RowProblem

P = TypeVar("P", bound=RowProblem)


def rounded_at_each_step(problem: RowProblem) -> Any:
    """Of a formula in the dtype of its operands.

    The exponent of a softmax, of up to 9 below the largest of normal numbers, is off by half of eps of that.
    """
    exact: tuple[Tolerance, ...] = as_tuple(problem.tolerance())
    return problem.pack([Tolerance(absolute=8 * each.absolute, relative=8 * each.relative) for each in exact])


class XlaRows(LibraryKernel[P], Generic[P]):
    """The formula in float32, and what users write.

    Attributes:
      plain: what users write, of operands of their dtype; None where that is the formula in float32, too.
    """

    version = 1

    def __init__(self, plain: Callable[..., jax.Array] | None = None) -> None:
        self.plain = plain

    def programs(self, problem: P) -> tuple[str, ...]:
        narrow = problem.dtype != "float32"
        return (Library.program, "plain") if narrow and self.plain is not None else (Library.program,)

    def tolerance(self, problem: P, schedule: Library) -> Any:
        """Of what users write, that of a program which rounds at each step: it is what they would have without us."""
        return rounded_at_each_step(problem) if schedule.program == "plain" else problem.tolerance()

    def run(self, problem: P, schedule: Library, target: Target, /, *args: Any, **params: Any) -> Any:
        if schedule.program == "plain" and self.plain is not None:
            return self.plain(*args, **params)
        results = as_tuple(problem.compute_in(jnp.float32, *args, **params))
        return problem.pack([x.astype(s.dtype) for x, s in zip(results, problem.results(), strict=True)])
