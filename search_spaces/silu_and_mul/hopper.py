"""SiLU-and-mul on Hopper."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from search_spaces.rowwise.hopper.halves import HopperHalves
from search_spaces.silu_and_mul.problem import SiluAndMulProblem


class HopperSiluAndMul(HopperHalves[SiluAndMulProblem]):
    version = 1
    verified_on = frozenset({"sm_90"})  # tests/device on an NVIDIA H200
    read, written = ((0, False), (0, True)), (False,)
    fp32_ops = 8

    def compute(self, *halves: jax.Array) -> tuple[jax.Array, ...]:
        gate, up = halves
        return (gate * (1 / (1 + jnp.exp(-gate))) * up,)
