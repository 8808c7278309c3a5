"""Zeros rows of a tile in shared memory beyond a sequence's end, before a product reads them.

Their probabilities are 0, but 0 times NaN is NaN, and the rows may hold anything. (TMA only fills with zeros beyond an
array's edge.) A warpgroup zeros all rows that its own products read; other warpgroups may write the same zeros.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

from search_spaces.hopper.dsmem import ptx
from search_spaces.hopper.limits import WARPGROUP
from search_spaces.hopper.smem_layout import SmemTile, Untiled
from search_spaces.jax_compat import mosaic_gpu_code, plgpu

_for: Any = scf.ForOp  # Its annotations are those of another class.
CHUNK = 16  # bytes that a thread stores at once
CORE_ROWS = 8  # A tiled array in shared memory is stored in groups of 8 rows of all swizzled columns.


def zero_rows_from(first: Any, tile: SmemTile, smem: Any) -> None:
    """Zeros the tile's rows from `first` on, if any, for the calling warpgroup's products and for later copies.

    Args:
      first: int32; all rows are zeroed if it is 0 or less.
      smem: the tile, which has arrived.
    """

    def meaning(ref: Any, first: Any) -> None:
        row = lax.broadcasted_iota(jnp.int32, tile.shape, len(tile.shape) - 2)
        ref[...] = jnp.where(row < first, ref[...], jnp.zeros((), tile.dtype))

    @mosaic_gpu_code(meaning, arg_types=(plgpu.RefType(tile.transforms), plgpu.Layout.WG_SPLAT))
    def store(_: Any, ref: Any, first: Any) -> None:
        bits = ir.IntegerType.get_signless(32)
        address = llvm.ptrtoint(bits, mgpu.utils.memref_ptr(ref))
        own = arith.remui(mgpu.thread_idx(), mgpu.c(WARPGROUP, bits))
        count = tile.rows * tile.columns * tile.dtype.itemsize // CHUNK
        zero, rows = mgpu.c(0, bits), first.registers.item()
        loop: Any = _for(own, mgpu.c(count, bits), mgpu.c(WARPGROUP, bits))
        with ir.InsertionPoint(loop.body):
            chunk = loop.induction_variable
            there = arith.cmpi(arith.CmpIPredicate.sge, _row(tile, chunk), rows)
            place = arith.addi(address, arith.muli(chunk, mgpu.c(CHUNK, bits)))
            ptx("@$0 st.shared.v4.b32 [$1], {$2, $2, $2, $2};", [there, place, zero], "b,r,r")
            scf.yield_([])

    @pl.when(first < tile.rows)
    def zero() -> None:
        store(smem, first)
        plgpu.commit_smem()


def _row(tile: SmemTile, chunk: Any) -> Any:
    """Returns the row of the tile that holds a chunk; swizzling only moves chunks within their row."""
    bits = ir.IntegerType.get_signless(32)
    row = arith.divui(chunk, mgpu.c(tile.swizzle // CHUNK, bits))  # rows are counted over consecutive swizzled columns
    if isinstance(tile, Untiled):
        return arith.remui(row, mgpu.c(tile.rows, bits))
    boxes = tile.columns * tile.dtype.itemsize // tile.swizzle
    core = arith.muli(arith.divui(row, mgpu.c(CORE_ROWS * boxes, bits)), mgpu.c(CORE_ROWS, bits))
    return arith.addi(core, arith.remui(row, mgpu.c(CORE_ROWS, bits)))
