"""SiLU-and-mul on a TPU."""

from __future__ import annotations

from search_spaces.rowwise.tpu.footprint import ElementCosts
from search_spaces.rowwise.tpu.kernel import TpuHalves
from search_spaces.silu_and_mul.formula import SiluAndMul
from search_spaces.silu_and_mul.problem import SiluAndMulProblem


class TpuSiluAndMul(SiluAndMul, TpuHalves[SiluAndMulProblem]):
    name = "silu_and_mul_tpu"
    costs = ElementCosts(fp32_ops=9.0, mufu_ops=2.0)
