"""How the rows of an array are aligned in memory, which decides how fast a GPU loads them."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

# TMA and vector loads need rows that begin at multiples of these bytes (CUDA driver API, cuTensorMapEncodeTiled).
ROW_BYTES = 16


def row_alignment(array: Any) -> int:
    """Returns the largest power of two, up to `ROW_BYTES`, that divides the bytes of a row of an array or its shape."""
    return math.gcd(array.shape[-1] * jnp.dtype(array.dtype).itemsize, ROW_BYTES) if len(array.shape) > 1 else ROW_BYTES
