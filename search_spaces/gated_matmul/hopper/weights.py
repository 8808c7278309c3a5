"""The layout of a gated matmul's weights and biases, and whether the kernel reads them in place."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from search_spaces.gated_matmul.problem import GatedMatmulProblem
from search_spaces.hopper.limits import TMA_GMEM_ALIGNMENT
from search_spaces.matmul.hopper.tiling import Tiling


def read_joined(p: GatedMatmulProblem, t: Tiling) -> Any:
    """Returns whether TMA reads both halves of joined weights in place, for each schedule of a tiling.

    This requires that neither half is padded. In the tiled layout, the second half must also begin at a tile of 8
    swizzled rows.
    """
    rows, columns = half_extents(p)
    as_is = np.equal(t.extents[1][0], rows) & np.equal(t.extents[1][1], columns)
    unit = 8 if p.transpose_w else t.swizzle // jnp.dtype(p.dtype).itemsize
    return as_is & (t.untiled | np.equal(p.n % unit, 0))


def reads_joined_bias(p: GatedMatmulProblem) -> bool:
    """Returns whether the second half of a joined bias begins at a multiple of 16 bytes, as bulk copies require."""
    return not p.pair and bool(p.bias) and p.n * jnp.dtype(p.bias).itemsize % TMA_GMEM_ALIGNMENT == 0


def half_extents(p: GatedMatmulProblem) -> tuple[int, int]:
    """Returns the extents of one factor's weights."""
    return (p.n, p.k) if p.transpose_w else (p.k, p.n)
