"""Softmax as users call it: along the last axis by rows, along another one by JAX's own."""

from __future__ import annotations

from typing import Any

import jax

from search_spaces.operation import Bound, Unbound
from search_spaces.rowwise import front_end
from search_spaces.softmax.problem import SoftmaxProblem


def bind(x: Any, *, axis: Any = -1) -> Bound[SoftmaxProblem] | Unbound:
    """A call of `scheduler.tuned_softmax`, whose arguments these are."""
    along = front_end.elsewhere(x, axis, lambda: jax.nn.softmax(x, axis))
    return along or front_end.bind(SoftmaxProblem, x)
