"""Front end of softmax with the log-sum-exp: rows along the last axis; XLA along another axis."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from search_spaces.operation import Bound, Unbound
from search_spaces.rowwise import front_end
from search_spaces.softmax_with_lse.problem import SoftmaxWithLseProblem


def bind(x: Any, *, axis: Any = -1) -> Bound[SoftmaxWithLseProblem] | Unbound:
    """Binds a call of `scheduler.tuned_softmax` with ``return_lse=True``, with the same arguments."""

    def answer() -> tuple[jax.Array, jax.Array]:
        wide = x.astype(front_end.wide(x))
        p, lse = jax.nn.softmax(wide, axis), jax.nn.logsumexp(wide, axis)
        return p.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else p, lse

    return front_end.elsewhere(x, axis, answer) or front_end.bind(SoftmaxWithLseProblem, x)
