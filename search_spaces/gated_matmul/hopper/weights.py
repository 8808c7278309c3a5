"""Where the weights and biases of a gated product lie, and whether the kernel reads them there."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from search_spaces.gated_matmul.problem import GatedMatmulProblem
from search_spaces.hopper.limits import TMA_GMEM_ALIGNMENT
from search_spaces.matmul.hopper.tiling import Tiling


def read_joined(p: GatedMatmulProblem, t: Tiling) -> Any:
    """Whether TMA reads both halves of joined weights where they lie, for each schedule of a tiling.

    Neither is padded, and in the tiled layout the second one begins where a tile of 8 swizzled rows does.
    """
    rows, columns = half_extents(p)
    as_is = np.equal(t.extents[1][0], rows) & np.equal(t.extents[1][1], columns)
    unit = 8 if p.transpose_w else t.swizzle // jnp.dtype(p.dtype).itemsize
    return as_is & (t.untiled | np.equal(p.n % unit, 0))


def reads_joined_bias(p: GatedMatmulProblem) -> bool:
    """Whether the second half of a joined bias begins at a multiple of 16 bytes, as bulk copies demand."""
    return not p.pair and bool(p.bias) and p.n * jnp.dtype(p.bias).itemsize % TMA_GMEM_ALIGNMENT == 0


def half_extents(p: GatedMatmulProblem) -> tuple[int, int]:
    """Of the weights of one factor."""
    return (p.n, p.k) if p.transpose_w else (p.k, p.n)
