"""JAX's own products for Blackwell as candidates: matmul and grouped product.

They are modules of `jax.experimental.pallas.ops.gpu`: `blackwell_matmul_mgpu` and `blackwell_ragged_dot_mgpu`. The
tensor cores accumulate in tensor memory (TMEM). One warp copies, one issues products, and a second warpgroup stores the
previous tile meanwhile.

In the grouped product two CTAs multiply together. The one that issues their products waits for its own stores alone
(jax 0.12), so it may overwrite accumulators that the other has not stored yet. In JAX's matmul it waits for both.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from search_spaces import jax_compat
from search_spaces.footprint import Footprint, Operand, Phase
from search_spaces.hopper import ACCUMULATOR_BYTES, BARRIER_BYTES, SMEM_ALIGNMENT, WARPGROUP
from search_spaces.kernel import INDICES_OF_32_BITS, Kernel
from search_spaces.matmul.problem import MatmulProblem
from search_spaces.ragged_dot.jax_kernels import zero_rows_of_no_group
from search_spaces.ragged_dot.problem import RaggedDotProblem, sizes_of
from search_spaces.space import Column, Columns, Space
from search_spaces.target import Target

# Rows of a tile: Mosaic GPU infers no layout for 64 (jax 0.12).
TILE_M = 128
LEAST_TILE_N = LEAST_TILE_K = 64  # columns of b in one swizzled row of 128 bytes, and elements of k
LEAST_STEPS = 2
# Accumulators of the tile that is computed and of the tile that is stored.
ACCUMULATORS = 2
# Tensor memory (PTX ISA, tcgen05.alloc): a power of two of columns of 128 lanes of 4 bytes.
TMEM_COLUMN_BYTES = 128 * ACCUMULATOR_BYTES
TMEM_HANDLE_BYTES = 4


@dataclasses.dataclass(frozen=True)
class BlackwellSchedule:
    """The fields of `TuningConfig` of JAX's kernels for Blackwell.

    Attributes:
      tile_m, tile_n: rows of a and columns of b that one CTA loads.
      tile_k: extent of k that one step loads and multiplies.
      max_concurrent_steps: steps whose operands have room on chip.
      collective: two CTAs multiply together, each its rows with the columns of both.
      epilogue_tile_n: columns of the result that pass through shared memory at once.
      grid_minor_dim, grid_tile_width: the axis, "M" or "N", along which tiles follow each other, and how many of them
        before the other axis advances.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    max_concurrent_steps: int
    collective: bool
    epilogue_tile_n: int
    grid_minor_dim: str
    grid_tile_width: int

    def config(self, module: Any) -> Any:
        """Returns the schedule as the `TuningConfig` of one of JAX's modules."""
        dimension = jax_compat.jax_gpu_kernel("blackwell_matmul_mgpu").MatmulDimension
        return module.TuningConfig(**{**vars(self), "grid_minor_dim": dimension[self.grid_minor_dim]})


def not_blackwell(target: Target, module: str) -> str | None:
    """Returns why JAX's kernel of this module for Blackwell does not run on `target`, or None."""
    if target.platform != "cuda" or target.architecture != "sm_100":
        return f"is written for NVIDIA Blackwell (sm_100), not for {target.kind} ({target.architecture})"
    return jax_compat.jax_gpu_kernels_missing(module)


def blackwell_space(m: int, n: int, k: int, stored: int = 1, **limited: Any) -> Space[BlackwellSchedule]:
    """Returns the schedules whose tiles divide all extents.

    Args:
      stored: number of `tile_n` columns that parts of the epilogue divide.
      limited: choices to replace.
    """
    choices: dict[str, tuple[Any, ...]] = {
        "tile_m": (TILE_M,),
        "tile_n": (128, 256, 64, 192),
        "tile_k": (64, 128),
        "max_concurrent_steps": (4, 6, 3, 5, 2, 8),
        "collective": (True, False),
        "epilogue_tile_n": (64, 32, 128),
        "grid_minor_dim": ("N", "M"),
        "grid_tile_width": (8, 1, 4, 12, 16),
    }
    return Space(
        BlackwellSchedule,
        choices=choices | limited,
        rules={
            "the tiles of all CTAs that multiply together divide m": lambda s: m % (s.tile_m * ctas(s)) == 0,
            "the tiles of all CTAs that multiply together divide n": lambda s: n % (s.tile_n * ctas(s)) == 0,
            "tile_k divides k": lambda s: k % s.tile_k == 0,
            "epilogue_tile_n divides the columns": lambda s: stored * s.tile_n % s.epilogue_tile_n == 0,
            "no more stages than steps": lambda s: s.max_concurrent_steps * s.tile_k <= k,
        },
    )


def undivided(m: int, n: int, k: int, ctas: int = 1) -> str | None:
    """Returns why the least tiles of `ctas` CTAs do not divide a product, or None."""
    rows, columns = ctas * TILE_M, ctas * LEAST_TILE_N
    if m % rows == n % columns == k % LEAST_TILE_K == 0 and k >= LEAST_STEPS * LEAST_TILE_K:
        return None
    return (
        f"needs multiples of its least tile, {rows} rows, {columns} columns and {LEAST_TILE_K} along k, and "
        f"{LEAST_STEPS} steps along k"
    )


def ctas(s: Any) -> Column:
    """Returns the number of CTAs that multiply together."""
    return np.where(s.collective, 2, 1)


def tmem_bytes(s: Any) -> Column:
    columns = ACCUMULATORS * s.tile_n * ctas(s)
    return TMEM_COLUMN_BYTES * 2 ** np.ceil(np.log2(columns)).astype(int)


def blackwell_footprint(
    p: Any,
    s: Columns,
    grid: Sequence[Any],
    epilogue_slots: int,
    barriers: Any,
    bytes_written: Any,
    other_bytes: int = 0,
) -> Footprint:
    """Returns the demands of one CTA.

    Args:
      p: the problem, with `k`, `dtype` and `arithmetic`.
      grid: tiles of CTAs along each axis: (groups,) rows, columns.
      epilogue_slots: parts of the result that shared memory has room for.
      barriers: the number of barriers.
      bytes_written: bytes of the result that one CTA stores, in the mean.
      other_bytes: other shared memory.
    """
    itemsize, both, columns = int(jnp.dtype(p.dtype).itemsize), ctas(s), len(grid) - 1
    lhs, rhs = s.tile_m * s.tile_k * itemsize, s.tile_k * s.tile_n * itemsize
    return Footprint(
        arithmetic=p.arithmetic,
        grid=tuple(grid),
        step=Phase(
            loads=(
                Operand(lhs, axes=tuple(range(columns)), name="lhs"),
                # Each CTA loads its part of the columns, and multiplies by all.
                Operand(both * rhs, axes=(*range(columns - 1), columns), multicast=both, filled_bytes=rhs, name="rhs"),
            ),
            flops=2.0 * s.tile_m * both * s.tile_n * s.tile_k,
            onchip_bytes_read=lhs + rhs,
        ),
        tile=Phase(bytes_written=bytes_written),
        onchip_bytes=s.max_concurrent_steps * (lhs + rhs)
        + epilogue_slots * s.tile_m * s.epilogue_tile_n * itemsize
        + barriers * BARRIER_BYTES
        + TMEM_HANDLE_BYTES
        + other_bytes,
        tmem_bytes=tmem_bytes(s),
        steps=p.k // s.tile_k,
        minor=np.where(s.grid_minor_dim == "M", columns - 1, columns),
        group=s.grid_tile_width * np.where(s.grid_minor_dim == "M", both, 1),
        snake=True,
        stages=s.max_concurrent_steps,
        ping_pong=True,
        threads=2 * WARPGROUP,
        cluster=both,
        persistent=True,
    )


class JaxBlackwellMatmul(Kernel[MatmulProblem, BlackwellSchedule]):
    backend = "jax_blackwell"
    version = 1
    most_elements = INDICES_OF_32_BITS

    def supports(self, problem: MatmulProblem, target: Target) -> str | None:
        p = problem
        if reason := not_blackwell(target, "blackwell_matmul_mgpu"):
            return reason
        if p.dtype not in ("bfloat16", "float16"):
            return "multiplies bfloat16 and float16"
        if p != MatmulProblem(p.m, p.n, p.k, dtype=p.dtype):
            return "multiplies one [m, k] by one [k, n] into a result of their dtype, without an epilogue"
        return undivided(p.m, p.n, p.k)

    def space(self, problem: MatmulProblem, target: Target) -> Space[BlackwellSchedule]:
        return blackwell_space(problem.m, problem.n, problem.k)

    def footprint(self, problem: MatmulProblem, schedules: Columns, target: Target) -> Footprint:
        p, s = problem, schedules
        # The next tile comes by cluster launch control, with two results of 16 bytes in an array of their own.
        grid = p.m // s.tile_m, p.n // (s.tile_n * ctas(s))
        written = s.tile_m * s.tile_n * ctas(s) * jnp.dtype(p.dtype).itemsize
        barriers = 2 * s.max_concurrent_steps + 4 * ACCUMULATORS
        return blackwell_footprint(p, s, grid, 2, barriers, written, other_bytes=SMEM_ALIGNMENT)

    def run(
        self, problem: MatmulProblem, schedule: BlackwellSchedule, target: Target, /, *args: Any, **params: Any
    ) -> jax.Array:
        module = jax_compat.jax_gpu_kernel("blackwell_matmul_mgpu")
        with jax.enable_x64(False):
            product: jax.Array = module.matmul_kernel(*args, schedule.config(module))
        return product


class JaxBlackwellRaggedDot(Kernel[RaggedDotProblem, BlackwellSchedule]):
    backend = "jax_blackwell"
    version = 1
    most_elements = INDICES_OF_32_BITS

    def supports(self, problem: RaggedDotProblem, target: Target) -> str | None:
        p = problem
        if reason := not_blackwell(target, "blackwell_ragged_dot_mgpu"):
            return reason
        if p.dtype not in ("bfloat16", "float16") or p.out_dtype:
            return "multiplies 16-bit operands into a result of their dtype"
        if p.transpose_rhs:
            return "reads no matrices transposed"
        return undivided(p.rows, p.n, p.k, ctas=2)

    def space(self, problem: RaggedDotProblem, target: Target) -> Space[BlackwellSchedule]:
        p = problem
        # It is written for two CTAs alone. TMA stores any rows of the epilogue's part, and each must start at a
        # multiple of 128 bytes (CUDA C++ Programming Guide, tensor memory access).
        return blackwell_space(p.rows, p.n, p.k, stored=2, collective=(True,), epilogue_tile_n=(64, 128))

    def footprint(self, problem: RaggedDotProblem, schedules: Columns, target: Target) -> Footprint:
        p, s = problem, schedules
        # Groups share tiles, and the grid has a tile for each time that they may.
        visits = 2 * (p.rows // (2 * s.tile_m) + p.groups - 1)
        grid = p.touched, visits / p.touched, p.n // (2 * s.tile_n)
        written = p.rows / visits * 2 * s.tile_n * p.result().dtype.itemsize
        return blackwell_footprint(p, s, grid, 1, 3 * s.max_concurrent_steps + 2 * ACCUMULATORS, written)

    def run(
        self, problem: RaggedDotProblem, schedule: BlackwellSchedule, target: Target, /, *args: Any, **params: Any
    ) -> jax.Array:
        lhs, rhs, boundaries = args
        module = jax_compat.jax_gpu_kernel("blackwell_ragged_dot_mgpu")
        kernel = _with_core_count(module.ragged_dot_kernel, target.cores)
        with jax.enable_x64(False):
            out: jax.Array = kernel(lhs, rhs, sizes_of(boundaries), schedule.config(module))
        return zero_rows_of_no_group(out, boundaries)


def _with_core_count(kernel: Callable[..., Any], cores: int) -> Callable[..., Any]:
    """Returns a copy of one of JAX's functions that sees `cores` cores on the default device.

    The default device may be another chip than the one that the kernel is lowered for.
    """
    seen = types.ModuleType(jax.__name__)
    vars(seen).update(vars(jax), local_devices=lambda: [types.SimpleNamespace(core_count=cores)])
    function: Any = kernel
    return types.FunctionType(function.__code__, {**function.__globals__, "jax": seen}, function.__name__)
