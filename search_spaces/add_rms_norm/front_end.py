"""The root-mean-square norm of a sum as users call it, along the last axis."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from search_spaces.add_rms_norm.problem import AddRmsNormProblem
from search_spaces.front_end import require_array
from search_spaces.operation import Bound, Unbound
from search_spaces.rms_norm.front_end import require_weight
from search_spaces.rms_norm.problem import EPS
from search_spaces.rowwise import front_end


def bind(x: Any, residual: Any, weight: Any, *, eps: float = EPS) -> Bound[AddRmsNormProblem] | Unbound:
    """Binds a call of `scheduler.tuned_rms_norm` with a residual."""
    require_weight(x, weight)
    require_array("residual", residual)
    if jnp.shape(residual) != jnp.shape(x):
        raise ValueError(f"residual has shape {jnp.shape(residual)}; x {jnp.shape(x)} needs one of its own shape")
    if jnp.iscomplexobj(residual) and not jnp.iscomplexobj(x):
        raise TypeError(f"residual is {jnp.result_type(residual)}, which a result of {jnp.result_type(x)} cannot hold")
    jnp.result_type(x, residual)  # raises if `jax.numpy_dtype_promotion` forbids their sum
    return front_end.bind(AddRmsNormProblem, x, residual, weight, eps=eps)
