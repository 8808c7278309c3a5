"""The gradient of SiLU-and-mul on Hopper in one pass; XLA writes both halves separately and joins them in another."""

from __future__ import annotations

from search_spaces.rowwise.hopper.halves import HopperHalves
from search_spaces.silu_and_mul_backward.formula import SiluAndMulBackward
from search_spaces.silu_and_mul_backward.problem import SiluAndMulBackwardProblem


class HopperSiluAndMulBackward(SiluAndMulBackward, HopperHalves[SiluAndMulBackwardProblem]):
    version = 1
    verified_on = frozenset({"sm_90"})  # tests/device on an NVIDIA H200
    fp32_ops = 13
