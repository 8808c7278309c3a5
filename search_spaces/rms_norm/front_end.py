"""The root-mean-square norm as users call it, along the last axis."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from search_spaces.front_end import require_array
from search_spaces.operation import Bound, Unbound
from search_spaces.rms_norm.problem import EPS, RmsNormProblem
from search_spaces.rowwise import front_end


def bind(x: Any, weight: Any, *, eps: float = EPS) -> Bound[RmsNormProblem] | Unbound:
    """Binds a call of `scheduler.tuned_rms_norm`, with the same arguments."""
    require_weight(x, weight)
    return front_end.bind(RmsNormProblem, x, weight, eps=eps)


def require_weight(x: Any, weight: Any) -> None:
    """Raises a ValueError if `weight` is not as long as the rows of `x`, a TypeError if either is no array."""
    require_array("x", x)
    require_array("weight", weight)
    if jnp.ndim(x) == 0 or jnp.shape(weight) != jnp.shape(x)[-1:]:
        raise ValueError(f"weight has shape {jnp.shape(weight)}; x {jnp.shape(x)} needs one as long as its last axis")
    if jnp.iscomplexobj(weight) and not jnp.iscomplexobj(x):
        raise TypeError(f"weight is {jnp.result_type(weight)}, which a result of {jnp.result_type(x)} cannot hold")
