"""SiLU-and-mul on elements at the same position of both halves."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from search_spaces.rowwise.halves import HalvesFormula


class SiluAndMul(HalvesFormula):
    read, written = ((0, False), (0, True)), (False,)

    def compute(self, *halves: jax.Array) -> tuple[jax.Array, ...]:
        gate, up = halves
        return (gate * (1 / (1 + jnp.exp(-gate))) * up,)
