"""Front end of SiLU-and-mul: SiLU of the first half of the last axis times the other half."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from search_spaces.front_end import require_array
from search_spaces.operation import Bound, Unbound
from search_spaces.rowwise import front_end
from search_spaces.silu_and_mul.problem import SiluAndMulProblem


def bind(x: Any) -> Bound[SiluAndMulProblem] | Unbound:
    """Binds a call of `scheduler.tuned_silu_and_mul`, with the same argument."""
    require_array("x", x)
    if jnp.ndim(x) == 0 or jnp.shape(x)[-1] % 2:
        raise ValueError(f"x has shape {jnp.shape(x)}; its last axis is two halves, so its length is even")
    if not jnp.issubdtype(dtype := jnp.result_type(x), jnp.inexact):
        raise TypeError(f"x holds {dtype}, of which there is no SiLU: use .astype")
    return front_end.bind(SiluAndMulProblem, x)
