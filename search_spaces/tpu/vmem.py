"""What arrays take of VMEM, and what a kernel may ask for."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from search_spaces.space import Column

# A register is 8 sublanes of 128 lanes of 32 bits; narrower types are packed along sublanes
# (docs.jax.dev/en/latest/pallas/tpu/details.html).
SUBLANES, LANES = 8, 128

# Allocations are in multiples of this (the compiler's reports).
ALLOCATION_BYTES = 1024

# What `vmem_limit_bytes` can be, in MiB: 0 leaves it at the compiler's default; the other is what the largest VMEM has,
# and a chip with less takes it for all it has.
VMEM_LIMITS_MIB = (0, 128)


def vmem_bytes(rows: Column | int, columns: Column | int, dtype: Any) -> npt.NDArray[np.int64]:
    """Bytes of a block of so many rows and columns in VMEM, whose last two axes are padded to whole tiles.

    A tile of a block has 8 rows, whatever the dtype, and of fewer rows the least power of two that holds them and that
    fills 32 bits (`getTilingFactor` in jaxlib/mosaic/dialect/tpu/transforms/infer_memref_layout.cc).
    """
    rows, itemsize = np.asarray(rows), jnp.dtype(dtype).itemsize
    least = 2 ** np.ceil(np.log2(np.maximum(rows, 1))).astype(np.int64)
    down = np.clip(least, 4 // itemsize, SUBLANES)
    padded = -(-rows // down) * down * (-(-np.asarray(columns) // LANES) * LANES)
    return np.asarray(padded * itemsize, dtype=np.int64)


def window_bytes(rows: Column | int, columns: Column | int, dtype: Any, buffers: Any = 1) -> npt.NDArray[np.int64]:
    """Bytes of an allocation in VMEM: so many buffers of a block, or scratch memory; see `ALLOCATION_BYTES`.

    An operand or result whose block is the same in all steps of the grid has one buffer, others two: the compiler's
    rule (libtpu 0.0.42 to 0.0.50, `xla_mosaic_deprecated_allow_implicit_single_buffering`).
    """
    return -(-vmem_bytes(rows, columns, dtype) * buffers // ALLOCATION_BYTES) * ALLOCATION_BYTES


def limit_bytes(limit_mib: Any) -> Any:
    """A schedule's limit in bytes: for `Footprint.onchip_limit_bytes`, where 0 is the default."""
    return limit_mib * 2**20


def limit_or_none(limit_mib: int) -> int | None:
    """The same for `pltpu.CompilerParams.vmem_limit_bytes`."""
    return limit_bytes(limit_mib) or None
