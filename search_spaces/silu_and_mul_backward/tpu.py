"""The gradient of SiLU-and-mul on a TPU."""

from __future__ import annotations

from search_spaces.rowwise.tpu.footprint import ElementCosts
from search_spaces.rowwise.tpu.kernel import TpuHalves
from search_spaces.silu_and_mul_backward.formula import SiluAndMulBackward
from search_spaces.silu_and_mul_backward.problem import SiluAndMulBackwardProblem


class TpuSiluAndMulBackward(SiluAndMulBackward, TpuHalves[SiluAndMulBackwardProblem]):
    name = "silu_and_mul_backward_tpu"
    costs = ElementCosts(fp32_ops=15.0, mufu_ops=2.0)
