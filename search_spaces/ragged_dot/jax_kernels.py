"""JAX's own grouped product for Hopper as a candidate: `jax.experimental.pallas.ops.gpu.ragged_dot_mgpu`.

It takes the sizes of groups, of which the first starts at row 0, and leaves rows after the last group unwritten. Rows
before the first group are multiplied by the first matrix. A loop then sets all rows of no group to zero; without such
rows it takes no step.

JAX's gradient of the matrices (`transposed_ragged_dot_mgpu`) is no candidate: it multiplies the rows of other groups in
a block by zero, so NaN and infinities of one group reach the result of another.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from search_spaces import jax_compat
from search_spaces.footprint import Footprint, Operand, Phase
from search_spaces.hopper import BARRIER_BYTES, SMEM_ALIGNMENT, WARPGROUP, not_hopper
from search_spaces.kernel import INDICES_OF_32_BITS, Kernel
from search_spaces.matmul.hopper.footprint import OTHER_REGISTERS
from search_spaces.ragged_dot.problem import RaggedDotProblem, sizes_of
from search_spaces.space import Columns, Space, cdiv
from search_spaces.target import Target

# The least block of JAX's loop over configurations, in each direction.
LEAST_BLOCK = 64
# Rows of no group that are set to zero at a time.
ZEROED_ROWS = 128


@dataclasses.dataclass(frozen=True)
class JaxSchedule:
    """The arguments of JAX's kernel.

    Attributes:
      block_m, block_n: extents of a tile of the result.
      block_k: extent of k that one step loads and multiplies.
      max_concurrent_steps: steps that have room on chip for their operands.
      grid_block_n: tiles along n that follow each other before the next rows.
    """

    block_m: int
    block_n: int
    block_k: int
    max_concurrent_steps: int
    grid_block_n: int


class JaxRaggedDot(Kernel[RaggedDotProblem, JaxSchedule]):
    backend = "jax_mosaic_gpu"
    version = 1
    most_elements = INDICES_OF_32_BITS

    def supports(self, problem: RaggedDotProblem, target: Target) -> str | None:
        p = problem
        if reason := not_hopper(target):
            return reason
        if p.dtype == "float32" or p.out_dtype:
            return "multiplies 16-bit operands into a result of their dtype"
        if p.k % LEAST_BLOCK or p.n % LEAST_BLOCK:
            return f"needs k and n that are multiples of its least block, {LEAST_BLOCK}"
        return jax_compat.jax_gpu_kernels_missing("ragged_dot_mgpu")

    def space(self, problem: RaggedDotProblem, target: Target) -> Space[JaxSchedule]:
        p = problem
        return Space(
            JaxSchedule,
            choices={
                "block_m": (128, 64, 192),
                "block_n": (128, 64, 192),
                "block_k": (64,),
                "max_concurrent_steps": (4, 2, 5, 6),
                "grid_block_n": (1, 2, 4, 8, 16),
            },
            rules={
                "grid_block_n blocks divide n": lambda s: p.n % (s.grid_block_n * s.block_n) == 0,
                "no more stages than steps": lambda s: s.max_concurrent_steps * s.block_k <= p.k,
            },
        )

    def footprint(self, problem: RaggedDotProblem, schedules: Columns, target: Target) -> Footprint:
        p, s = problem, schedules
        itemsize = int(jnp.dtype(p.dtype).itemsize)
        rows = [np.asarray(boundaries, np.int64)[:, None] for boundaries in p.draws()]
        # Tiles start at multiples of `block_m`, so groups share tiles.
        shared = [_tiles_of(each[:-1], each[1:], s.block_m).sum(0) for each in rows]
        row_tiles = np.mean(shared, axis=0)
        loaded_m = np.minimum(s.block_m, p.rows)
        registers = s.block_m * s.block_n // WARPGROUP + OTHER_REGISTERS
        return Footprint(
            arithmetic=p.arithmetic,
            grid=(p.touched, row_tiles / p.touched, p.n // s.block_n),
            step=Phase(
                loads=(
                    Operand(loaded_m * s.block_k * itemsize, axes=(0, 1), name="lhs"),
                    Operand(s.block_k * s.block_n * itemsize, axes=(0, 2), name="rhs"),
                ),
                flops=2.0 * s.block_m * s.block_n * s.block_k,
            ),
            tile=Phase(bytes_written=p.rows / row_tiles * s.block_n * itemsize),
            # The result takes the memory of the operands.
            onchip_bytes=np.maximum(
                _whole(s.max_concurrent_steps * s.block_m * s.block_k * itemsize)
                + _whole(s.max_concurrent_steps * s.block_k * s.block_n * itemsize)
                + s.max_concurrent_steps * BARRIER_BYTES,
                _whole(s.block_m * s.block_n * itemsize),
            ),
            steps=p.k // s.block_k,
            minor=2,
            group=s.grid_block_n,
            stages=s.max_concurrent_steps,
            consumers=1,
            threads=WARPGROUP,
            registers=registers,
            registers_per_block=WARPGROUP * registers,
            persistent=True,
        )

    def run(
        self, problem: RaggedDotProblem, schedule: JaxSchedule, target: Target, /, *args: Any, **params: Any
    ) -> jax.Array:
        lhs, rhs, boundaries = args
        kernel = jax_compat.jax_gpu_kernel("ragged_dot_mgpu").ragged_dot
        out = kernel(lhs, rhs, group_sizes=sizes_of(boundaries), transpose_rhs=problem.transpose_rhs, **vars(schedule))
        return zero_rows_of_no_group(out, boundaries)


def zero_rows_of_no_group(out: jax.Array, boundaries: jax.Array) -> jax.Array:
    """Sets the rows before the first and after the last boundary to zero, in place."""
    rows = out.shape[0]
    each = min(ZEROED_ROWS, rows)
    first, end = boundaries[0], boundaries[-1]
    before = cdiv(first, each)

    def zero_some(number: jax.Array, out: jax.Array) -> jax.Array:
        start = jnp.where(number < before, number * each, end + (number - before) * each)
        start = jnp.minimum(start, rows - each)
        row = start + jnp.arange(each, dtype=jnp.int32)
        kept = (row >= first) & (row < end)
        some = jnp.where(kept[:, None], lax.dynamic_slice_in_dim(out, start, each), 0)
        return lax.dynamic_update_slice_in_dim(out, some, start, 0)

    zeroed: jax.Array = lax.fori_loop(0, before + cdiv(rows - end, each), zero_some, out)
    return zeroed


def _tiles_of(first: Any, end: Any, block: Any) -> Any:
    """Returns the number of tiles, which start at multiples of `block`, with rows from `first` to `end`."""
    return np.where(end > first, cdiv(end, block) - first // block, 0)


def _whole(nbytes: Any) -> Any:
    return cdiv(nbytes, SMEM_ALIGNMENT) * SMEM_ALIGNMENT
