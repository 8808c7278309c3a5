"""The tangent of SiLU-and-mul: ``SILU_AND_MUL_JVP``. XLA computes it; its transpose is the gradient, which is tuned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from search_spaces.operation import Operation
from search_spaces.rowwise import rules
from search_spaces.rowwise.xla import XlaRows
from search_spaces.silu_and_mul_backward import SILU_AND_MUL_BACKWARD, SiluAndMulBackwardProblem
from search_spaces.silu_and_mul_jvp.problem import SiluAndMulJvpProblem


def transpose(call: Callable[..., Any], p: SiluAndMulJvpProblem, cotangent: Any, args: Any) -> tuple[None, Any]:
    """Transposes the operation, which is linear in `dx` alone."""
    return None, call(SILU_AND_MUL_BACKWARD, SiluAndMulBackwardProblem(p.rows, p.columns, p.dtype), args[0], cotangent)


SILU_AND_MUL_JVP = Operation[SiluAndMulJvpProblem](
    name="silu_and_mul_jvp",
    problem=SiluAndMulJvpProblem,
    kernels=(XlaRows(),),
    transpose=transpose,
    batch=rules.batch,
    shard=rules.shard,
)

