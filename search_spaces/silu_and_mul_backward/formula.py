"""The gradient of SiLU-and-mul on elements at the same position of all halves."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from search_spaces.rowwise.halves import HalvesFormula
from search_spaces.silu_and_mul_backward.problem import slopes


class SiluAndMulBackward(HalvesFormula):
    read, written = ((0, False), (0, True), (1, False)), (False, True)

    def compute(self, *halves: jax.Array) -> tuple[jax.Array, ...]:
        gate, up, d_out = halves
        sigmoid = 1 / (1 + jnp.exp(-gate))
        of_gate, of_up = slopes(gate, up, sigmoid)
        return d_out * of_gate, d_out * of_up
