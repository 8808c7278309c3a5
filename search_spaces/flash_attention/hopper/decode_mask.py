"""Masks logits in registers by the first column and the end of the columns that each row sees.

A comparison with an array of column indices would need as many registers as the logits: LLVM keeps that array in
registers, because it is the same for all blocks. Here a column index is the first column of the thread plus a constant.
The first column is subtracted from the bounds, and the constant is an immediate of the compare instruction.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from search_spaces.jax_compat import mosaic_gpu_code, plgpu

# Layout of wgmma accumulators (PTX ISA, register fragments of wgmma.mma_async): a thread has two of every eight columns
# in two rows, and four threads share a row.
COLUMNS, EACH, HALVES = 8, 2, 2
SHARING = COLUMNS // EACH


def mask_columns(x: jax.Array, end: jax.Array, *first: jax.Array) -> jax.Array:
    """Returns `x` where ``first[row] <= column < end[row]``, and minus infinity elsewhere.

    Args:
      x: float32 ``[64, columns]`` in the layout of wgmma accumulators.
      end, first: int32 ``[64]`` in the layout of the rows of `x`. `first` is optional, and defaults to column 0.
    """
    layout = plgpu.Layout.WGMMA

    def meaning(x: jax.Array, end: jax.Array, *first: jax.Array) -> jax.Array:
        column = lax.broadcasted_iota(jnp.int32, x.shape, 1)
        seen = column < end[:, None]
        for one in first:
            seen &= column >= one[:, None]
        return jnp.where(seen, x, -jnp.inf)

    @mosaic_gpu_code(
        meaning,
        arg_types=(layout, *[layout.reduce(1)] * (1 + len(first))),
        return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=layout),
    )
    def mask(_: Any, x: Any, *limits: Any) -> Any:
        bits, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        own = arith.muli(arith.remui(mgpu.thread_idx(), mgpu.c(SHARING, bits)), mgpu.c(EACH, bits))
        end, *first = ([arith.subi(_scalar(limit), own) for limit in each.registers.flat] for each in limits)
        hidden = mgpu.c(float("-inf"), f32)
        registers = x.registers.copy()
        for number, pair in enumerate(x.registers.flat):
            block, half = divmod(number, HALVES)
            elements = []
            for position in range(EACH):
                column = mgpu.c(block * COLUMNS + position, bits)
                element = vector.extract(pair, [], [position])
                shown = arith.cmpi(arith.CmpIPredicate.slt, column, end[half])
                for one in first:
                    shown = arith.andi(shown, arith.cmpi(arith.CmpIPredicate.sge, column, one[half]))
                elements.append(arith.select(shown, element, hidden))
            registers.flat[number] = vector.from_elements(pair.type, elements)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    masked: jax.Array = mask(x, end, *first)
    return masked


def _scalar(register: Any) -> Any:
    return vector.extract(register, [], [0]) if isinstance(register.type, ir.VectorType) else register
