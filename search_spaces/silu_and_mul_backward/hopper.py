"""The gradient of SiLU-and-mul on Hopper: one pass, where XLA writes both halves apart and joins them in another."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from search_spaces.rowwise.hopper.halves import HopperHalves
from search_spaces.silu_and_mul_backward.problem import SiluAndMulBackwardProblem, slopes


class HopperSiluAndMulBackward(HopperHalves[SiluAndMulBackwardProblem]):
    version = 1
    read, written = ((0, False), (0, True), (1, False)), (False, True)
    fp32_ops = 13

    def compute(self, *halves: jax.Array) -> tuple[jax.Array, ...]:
        gate, up, d_out = halves
        sigmoid = 1 / (1 + jnp.exp(-gate))
        of_gate, of_up = slopes(gate, up, sigmoid)
        return d_out * of_gate, d_out * of_up
