"""Front end of softmax: rows along the last axis; JAX's own function along another axis."""

from __future__ import annotations

from typing import Any

import jax

from search_spaces.operation import Bound, Unbound
from search_spaces.rowwise import front_end
from search_spaces.softmax.problem import SoftmaxProblem


def bind(x: Any, *, axis: Any = -1) -> Bound[SoftmaxProblem] | Unbound:
    """Binds a call of `scheduler.tuned_softmax`, with the same arguments."""
    along = front_end.elsewhere(x, axis, lambda: jax.nn.softmax(x, axis))
    return along or front_end.bind(SoftmaxProblem, x)
