"""Products of a matrix in registers, such as probabilities, with one in shared memory, 16 rows at a time.

Mosaic GPU's own `wgmma` requires these rows in whole swizzled widths, which are 64 for rows of 128 bytes of 16-bit
elements. One instruction takes 16 rows (PTX ISA, wgmma.mma_async). Here blocks of keys may have any multiple of 16.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from search_spaces.hopper import untiled_swizzled
from search_spaces.jax_compat import issue_wgmma_of_registers, mosaic_gpu_code, plgpu


def start(acc: jax.Array, a: jax.Array, b: Any, swizzle: int) -> jax.Array:
    """Starts ``acc + a b``; the result must not be used before `finish`.

    Args:
      acc: ``float32[64, n]`` in the layout of wgmma's accumulators.
      a: ``[64, k]`` of 16 bits in the same layout.
      b: ``[k, n]`` in shared memory, in tiles of 8 rows, or untiled, with three axes (smem_layout.py).
      swizzle: bytes of a swizzled row.
    """
    untiled = len(b.shape) == 3
    tiling = () if untiled else (plgpu.TilingTransform((8, swizzle // 2)),)
    transforms = (*tiling, plgpu.SwizzleTransform(swizzle))

    def meaning(acc: jax.Array, a: jax.Array, b: Any) -> jax.Array:
        b = untiled_swizzled.matrix(b[...]) if untiled else b[...]
        plgpu.commit_smem()  # Threads, unlike wgmma, read this: later copies must be ordered after the reads.
        return acc + jnp.dot(a, b, preferred_element_type=jnp.float32)

    @mosaic_gpu_code(
        meaning,
        arg_types=(plgpu.Layout.WGMMA, plgpu.Layout.WGMMA, plgpu.RefType(transforms)),
        return_type=plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def issue(_: Any, acc: Any, a: Any, b: Any) -> Any:
        b = untiled_swizzled.core_matrices(b) if untiled else b
        started = issue_wgmma_of_registers(acc, a, b, swizzle)
        _ptx("wgmma.commit_group.sync.aligned;")
        return started

    started: jax.Array = issue(acc, a, b)
    return started


def finish(acc: jax.Array) -> jax.Array:
    """Waits for all products that this warpgroup has started."""

    @mosaic_gpu_code(
        lambda acc: acc,
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def wait(_: Any, acc: Any) -> Any:
        _ptx("wgmma.wait_group.sync.aligned 0;")
        return mgpu.optimization_barrier(acc)

    finished: jax.Array = wait(acc)
    return finished


def _ptx(text: str) -> None:
    llvm.inline_asm(ir.Type.parse("!llvm.void"), [], text, "", has_side_effects=True)
