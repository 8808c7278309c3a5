"""Building blocks shared by the TPU kernels."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from search_spaces.space import Column

# ------------------------------------------------------------------------------
# VMEM sizes of arrays, and VMEM limits of kernels.

# A register is 8 sublanes of 128 lanes of 32 bits; narrower types are packed along sublanes
# (docs.jax.dev/en/latest/pallas/tpu/details.html).
SUBLANES, LANES = 8, 128

# Allocations are multiples of this (from the compiler's reports).
ALLOCATION_BYTES = 1024

# Values of `vmem_limit_bytes`, in MiB: 0 means the compiler's default; 128 is the largest VMEM of any chip, and a chip
# with less treats it as all of its VMEM.
VMEM_LIMITS_MIB = (0, 128)


def vmem_bytes(rows: Column | int, columns: Column | int, dtype: Any) -> npt.NDArray[np.int64]:
    """Returns the bytes of a block in VMEM, with the last two axes padded to whole tiles.

    A tile of a block has 8 rows, for every dtype. For fewer rows, it has the least power of two that holds them and
    that fills 32 bits (`getTilingFactor` in jaxlib/mosaic/dialect/tpu/transforms/infer_memref_layout.cc).
    """
    rows, itemsize = np.asarray(rows), jnp.dtype(dtype).itemsize
    least = 2 ** np.ceil(np.log2(np.maximum(rows, 1))).astype(np.int64)
    down = np.clip(least, 4 // itemsize, SUBLANES)
    padded = -(-rows // down) * down * (-(-np.asarray(columns) // LANES) * LANES)
    return np.asarray(padded * itemsize, dtype=np.int64)


def window_bytes(rows: Column | int, columns: Column | int, dtype: Any, buffers: Any = 1) -> npt.NDArray[np.int64]:
    """Returns the bytes of a VMEM allocation: `buffers` buffers of a block, or scratch memory (see `ALLOCATION_BYTES`).

    An operand or result with the same block in all steps of the grid has one buffer, others have two. This is the
    compiler's rule (libtpu 0.0.42 to 0.0.50, `xla_mosaic_deprecated_allow_implicit_single_buffering`).
    """
    return -(-vmem_bytes(rows, columns, dtype) * buffers // ALLOCATION_BYTES) * ALLOCATION_BYTES


def limit_bytes(limit_mib: Any) -> Any:
    """Converts a schedule's limit to bytes for `Footprint.onchip_limit_bytes`, where 0 means the default."""
    return limit_mib * 2**20


def limit_or_none(limit_mib: int) -> int | None:
    """Converts a schedule's limit for `pltpu.CompilerParams.vmem_limit_bytes`, where None means the default."""
    return limit_bytes(limit_mib) or None
