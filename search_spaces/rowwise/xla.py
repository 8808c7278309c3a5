"""A row-wise formula as XLA fuses it, in float32 and as users write it: the baseline, and a legal fallback."""

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
    """Returns the tolerance of a formula computed in the dtype of its operands.

    The exponent of a softmax of normally distributed values reaches 9 below the maximum, and is off by half an eps of
    that.
    """
    exact: tuple[Tolerance, ...] = as_tuple(problem.tolerance())
    return problem.pack([Tolerance(absolute=8 * each.absolute, relative=8 * each.relative) for each in exact])


class XlaRows(LibraryKernel[P], Generic[P]):
    """The formula in float32, and the program that users write.

    Attributes:
      plain: the program that users write, on operands of their dtype; None if that is the formula in float32, too.
    """

    version = 1

    def __init__(self, plain: Callable[..., jax.Array] | None = None) -> None:
        self.plain = plain

    def programs(self, problem: P) -> tuple[str, ...]:
        narrow = problem.dtype != "float32"
        return (Library.program, "plain") if narrow and self.plain is not None else (Library.program,)

    def tolerance(self, problem: P, schedule: Library) -> Any:
        """Returns the problem's tolerance; for "plain", one that allows rounding at each step, as users' code does."""
        return rounded_at_each_step(problem) if schedule.program == "plain" else problem.tolerance()

    def run(self, problem: P, schedule: Library, target: Target, /, *args: Any, **params: Any) -> Any:
        if schedule.program == "plain" and self.plain is not None:
            return self.plain(*args, **params)
        results = as_tuple(problem.compute_in(jnp.float32, *args, **params))
        return problem.pack([x.astype(s.dtype) for x, s in zip(results, problem.results(), strict=True)])
