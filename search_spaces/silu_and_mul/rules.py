"""Derivative of SiLU-and-mul, by separate operations for the tangent and the gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from search_spaces.silu_and_mul.problem import SiluAndMulProblem
from search_spaces.silu_and_mul_jvp import SILU_AND_MUL_JVP, SiluAndMulJvpProblem


def jvp(
    call: Callable[..., Any], p: SiluAndMulProblem, primals: Any, tangents: Any
) -> tuple[jax.Array, jax.Array | None]:
    """Returns result and tangent. The tangent's transpose is tuned as the gradient; the backward pass saves `x`."""
    (x,), (dx,) = primals, tangents
    moving = SiluAndMulJvpProblem(p.rows, p.columns, p.dtype)
    return call(p, x), None if dx is None else call(SILU_AND_MUL_JVP, moving, x, dx)
