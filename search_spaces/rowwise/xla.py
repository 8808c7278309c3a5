"""A row-wise formula as XLA fuses it: the answer to beat, and a legal one."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp

from search_spaces.kernel import Library, LibraryKernel, Target
from search_spaces.rowwise.problem import RowProblem

P = TypeVar("P", bound=RowProblem)


class XlaRows(LibraryKernel[P], Generic[P]):
    version = 1

    def run(self, problem: P, schedule: Library, target: Target, /, *args: Any, **params: Any) -> jax.Array:
        result = problem.compute(*(x.astype(jnp.float32) for x in args), **params)
        return result.astype(problem.result().dtype)
