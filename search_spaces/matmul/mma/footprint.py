"""The footprint of a matmul launch by warp-level MMA."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from search_spaces.footprint import Footprint, Operand, Phase
from search_spaces.hopper.limits import ACCUMULATOR_BYTES, SMEM_ALIGNMENT
from search_spaces.hopper.smem_layout import padded_bytes
from search_spaces.matmul.epilogue import ACTIVATION_OPERATIONS, EXPONENTIALS
from search_spaces.matmul.mma.tiling import Tiling
from search_spaces.matmul.problem import MatmulProblem
from search_spaces.space import Columns, round_up

# Instructions of a thread per element of a result: through shared memory, rounding, store.
STORE_OPERATIONS = 3
# Registers of a thread besides accumulators and fragments, and, in the epilogue, besides accumulators and the rows that
# it finishes (ptxas).
OTHER_REGISTERS = 40
RESIDUAL_REGISTERS = 8  # if the epilogue loads a residual: its addresses are live from the start
EPILOGUE_REGISTERS = 56


def footprint(p: MatmulProblem, s: Columns) -> Footprint:
    """Returns the footprint; a block is a tile, and copied bytes cover copies before the kernel and split-K."""
    t = Tiling(p, s)
    itemsize, result = jnp.dtype(p.dtype).itemsize, p.whole
    row_bytes = p.k / (t.steps * s.split_k) * itemsize
    # The epilogue is applied to complete accumulators: in the kernel, or in the split-K reduction.
    whole = s.split_k == 1
    epilogue_bytes = sum(array.size * array.dtype.itemsize for array in p.operands()[2:])
    before = [
        padded_bytes(array.shape, extents, array.dtype.itemsize)
        for array, extents in zip(p.operands()[:2], t.extents, strict=True)
    ]
    elements = np.prod(result.shape, dtype=np.int64)
    # The reduction reads the accumulators of all splits and the epilogue's operands, and writes the results.
    reduced = elements * (s.split_k * ACCUMULATOR_BYTES + result.dtype.itemsize) + epilogue_bytes
    after = np.where(whole, 0, reduced)
    exponentials = whole * s.tile_m * s.tile_n * EXPONENTIALS[p.activation]
    rows, columns = p.m / t.grid_m, p.n / t.grid_n
    return Footprint(
        arithmetic=p.arithmetic,
        grid=(t.products, t.grid_m, t.grid_n),
        step=Phase(
            loads=(
                Operand(bytes=rows * row_bytes, axes=(0, 1), name="a", filled_bytes=s.tile_m * s.tile_k * itemsize),
                Operand(bytes=columns * row_bytes, axes=(0, 2), name="b", filled_bytes=s.tile_k * s.tile_n * itemsize),
            ),
            flops=2.0 * s.tile_m * s.tile_n * s.tile_k,
            # Each warp reads its rows of `a` and its columns of `b`.
            onchip_bytes_read=(s.warps_n * s.tile_m + s.warps_m * s.tile_n) * s.tile_k * itemsize,
        ),
        tile=Phase(
            loads=_epilogue(p, whole, rows, columns),
            fp32_ops=ACTIVATION_OPERATIONS * exponentials + STORE_OPERATIONS * s.tile_m * s.tile_n,
            mufu_ops=exponentials,
            bytes_written=rows * columns * t.out_itemsize,
        ),
        onchip_bytes=round_up(t.pipeline_bytes, SMEM_ALIGNMENT),
        steps=t.steps,
        minor=np.where(s.grid_minor_dim == "m", 1, 2),
        group=s.grid_tile_width,
        snake=True,
        axes=("batch", "m", "n"),
        stages=s.stages - 1,
        threads=t.threads,
        registers=registers(p, s, t),
        copied_bytes=sum(before) + after,
        launches=1 + sum(copy > 0 for copy in before) + (after > 0),
    )


def registers(p: MatmulProblem, s: Any, t: Tiling) -> Any:
    """Returns the registers of a thread: the maximum of the main loop (fragments of two k) and the epilogue."""
    residual = (p.residual != "") & (s.split_k == 1)
    product = 2 * t.fragments + OTHER_REGISTERS + RESIDUAL_REGISTERS * residual
    other = np.maximum(product, t.elements * (1 + residual) + EPILOGUE_REGISTERS)
    return s.tile_m * s.tile_n // t.threads + other


def _epilogue(p: MatmulProblem, whole: Any, rows: Any, columns: Any) -> tuple[Operand, ...]:
    """Returns a block's loads of the bias and the residual; zero with split-K, where the reduction counts them."""
    loads = []
    if p.bias:
        each = jnp.dtype(p.bias).itemsize
        loads.append(Operand(bytes=whole * columns * each, axes=(0, 2), name="bias"))
    if p.residual:
        each = jnp.dtype(p.residual).itemsize
        loads.append(Operand(bytes=whole * rows * columns * each, axes=(0, 1, 2), name="residual"))
    return tuple(loads)
