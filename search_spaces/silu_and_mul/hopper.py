"""SiLU-and-mul on Hopper."""

from __future__ import annotations

from search_spaces.rowwise.hopper.halves import HopperHalves
from search_spaces.silu_and_mul.formula import SiluAndMul
from search_spaces.silu_and_mul.problem import SiluAndMulProblem


class HopperSiluAndMul(SiluAndMul, HopperHalves[SiluAndMulProblem]):
    version = 1
    verified_on = frozenset({"sm_90"})  # tests/device on an NVIDIA H200
    fp32_ops = 8
