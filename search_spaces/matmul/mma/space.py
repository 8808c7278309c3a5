"""The search space of a matmul by warp-level MMA: the schedules worth considering, and rules for the others."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from search_spaces.footprint import Footprint, Operand, Phase
from search_spaces.hopper import ACCESS_BYTES, ACCUMULATOR_BYTES, SMEM_ALIGNMENT, WARP, WARPGROUP, WARPS
from search_spaces.hopper.smem_layout import padded_bytes
from search_spaces.matmul.epilogue import ACTIVATION_OPERATIONS, EXPONENTIALS
from search_spaces.matmul.problem import MatmulProblem
from search_spaces.matmul.tiles import rules
from search_spaces.mma.cp_async import SWIZZLE_RUNS
from search_spaces.mma.fragments import MMA_COLUMNS, MMA_ROWS
from search_spaces.mma.staging import MATRIX_ROWS, staging_pitch
from search_spaces.space import Columns, Space, cdiv, round_up

# ------------------------------------------------------------------------------
# The schedule of a matmul by warp-level MMA.


@dataclasses.dataclass(frozen=True)
class MmaSchedule:
    """Maps a matmul to CTAs, warps and pipeline steps.

    Attributes:
      tile_m, tile_n: extents of the output tile that one CTA computes.
      tile_k: extent of k that one pipeline stage holds.
      stages: number of pipeline stages; copies run ``stages - 1`` steps ahead.
      warps_m, warps_n: warps of the CTA along each axis of its tile: four or eight in all.
      grid_minor_dim: the axis, "m" or "n", along which consecutive tiles are adjacent (grouped, planar-snake
        rasterization).
      grid_tile_width: width of a group of the rasterization, in tiles.
      split_k: parts of k that different CTAs accumulate and leave in device memory; a reduction kernel adds them,
        always in the same order.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    stages: int
    warps_m: int
    warps_n: int
    grid_minor_dim: str
    grid_tile_width: int
    split_k: int = 1


# ------------------------------------------------------------------------------
# Derived sizes of a problem and a schedule: warpgroup tiles, tiles in shared memory, padded arrays.


class Tiling:
    """The derived sizes of one schedule, or of `Columns` of schedules.

    Attributes:
      warpgroups: of a CTA.
      along_m: whether the warpgroups lie along m; otherwise along n.
      m_warps, n_warps: warps of a warpgroup along each axis.
      wg_m, wg_n: extents of a warpgroup's part of a tile.
      grid_m, grid_n: tiles along each axis.
      products: independent products of a launch: one for each element of the batch, and for each split of k.
      steps: of one CTA's part of k.
      a_tile, b_tile: rows and columns of each operand's part of a stage, in its device memory layout.
      extents: of the last two axes of each operand in device memory, padded so that rows are whole accesses.
      out_itemsize: bytes of an element that a launch writes: of the result, or of an accumulator with split-K.
      vector: elements of a row that a thread stores at a time; rows of all results start at multiples of it.
      elements: per thread, of the rows that a warpgroup finishes at a time.
      pipeline_bytes: of all stages.
      staging_bytes: of a warpgroup's rows before they are stored to device memory; they reuse the space of the stages.
    """

    def __init__(self, p: MatmulProblem, s: Any) -> None:
        itemsize = jnp.dtype(p.dtype).itemsize
        self.warpgroups = s.warps_m * s.warps_n // WARPS
        self.along_m = (self.warpgroups > 1) & (s.warps_m > s.warps_n)
        self.m_warps = np.where(self.along_m, s.warps_m // self.warpgroups, s.warps_m)
        self.n_warps = WARPS // self.m_warps
        self.wg_m = s.tile_m // np.where(self.along_m, self.warpgroups, 1)
        self.wg_n = s.tile_n // np.where(self.along_m, 1, self.warpgroups)
        self.grid_m, self.grid_n = cdiv(p.m, s.tile_m), cdiv(p.n, s.tile_n)
        self.products = p.batch * s.split_k
        self.steps = cdiv(cdiv(p.k, s.tile_k), s.split_k)
        self.a_tile = (s.tile_k, s.tile_m) if p.transpose_a else (s.tile_m, s.tile_k)
        self.b_tile = (s.tile_n, s.tile_k) if p.transpose_b else (s.tile_k, s.tile_n)
        self.extents = [
            (rows, round_up(columns, ACCESS_BYTES // itemsize))
            for rows, columns in (array.shape[-2:] for array in p.operands()[:2])
        ]
        self.out_itemsize = np.where(s.split_k > 1, ACCUMULATOR_BYTES, p.whole.dtype.itemsize)
        rows = self.m_warps * MATRIX_ROWS
        self.elements = rows * self.wg_n // WARPGROUP
        # The width of a thread's loads and stores: at most 16 bytes of results, and a divisor of their columns.
        widest = np.gcd(np.where(s.split_k > 1, p.n, math.gcd(p.n, *p.columns)), ACCESS_BYTES // self.out_itemsize)
        self.vector = np.minimum(widest, self.elements)
        self.pipeline_bytes = s.stages * (s.tile_m + s.tile_n) * s.tile_k * itemsize
        self.staging_bytes = rows * staging_pitch(self.wg_n)

    @property
    def threads(self) -> Any:
        return self.warpgroups * WARPGROUP

    @property
    def fragments(self) -> Any:
        """Registers of a thread for the operands of one k of an instruction."""
        return self.wg_m // (self.m_warps * MMA_ROWS) * 4 + self.wg_n // (self.n_warps * MMA_COLUMNS) * 2


# A shorter split of k ends before its pipeline is full.
FEWEST_STEPS = 4
SPLITS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
MOST_ACCUMULATORS = 128  # per thread: half of its registers
_WARP_CHOICES = ((2, 2), (2, 4), (4, 2), (1, 4), (4, 1))
LINE_BYTES = SWIZZLE_RUNS * ACCESS_BYTES


def space(p: MatmulProblem, cores: int) -> Space[MmaSchedule]:
    """Returns the schedules for `p` on a chip with `cores` SMs."""
    itemsize = jnp.dtype(p.dtype).itemsize

    def tiles(tile_m: Any, tile_n: Any) -> Any:
        return p.batch * cdiv(p.m, tile_m) * cdiv(p.n, tile_n)

    def work_tiles(s: Any) -> Any:
        return tiles(s.tile_m, s.tile_n) * s.split_k

    def tiling(s: Any) -> Tiling:
        return Tiling(p, s)

    def order_matters(s: Any) -> Any:
        t = tiling(s)
        return (work_tiles(s) > cores) & (t.grid_m > 1) & (t.grid_n > 1)

    def copied_whole(s: Any, tile: tuple[Any, Any]) -> Any:
        """Returns whether all threads copy equally much of each 128 bytes of rows, the unit of a swizzle."""
        rows, row_bytes = tile[0], tile[1] * itemsize
        runs = np.minimum(SWIZZLE_RUNS, row_bytes // ACCESS_BYTES)
        at_once = s.warps_m * s.warps_n * WARP // np.maximum(runs, 1)
        return (rows % at_once == 0) & ((row_bytes % LINE_BYTES == 0) | (LINE_BYTES % row_bytes == 0))

    def starts_a_line(wg: Any, tile: Any) -> Any:
        """Returns whether a warpgroup's part of rows begins at one of these 128-byte units, or is the whole row."""
        return (wg == tile) | (wg * itemsize % LINE_BYTES == 0)

    most_splits = min(2 * cores // tiles(128, 128), cdiv(p.k, 64 // itemsize) // FEWEST_STEPS)
    splits_of_k = (1, *(splits for splits in SPLITS if splits <= most_splits))
    return Space(
        MmaSchedule,
        choices={
            "tile_m": _up_to(p.m, (128, 64, 256, 192, 96, 32, 16), 16),
            "tile_n": _up_to(p.n, (128, 64, 256, 32), 64),
            "tile_k": (64 // itemsize, 128 // itemsize),
            "stages": (3, 4, 2, 5, 6, 8),
            "warps_m": (2, 4, 1),
            "warps_n": (2, 4, 1),
            "split_k": splits_of_k,
            "grid_minor_dim": ("m", "n"),
            "grid_tile_width": (8, 4, 16, 1),
        },
        rules={
            "a CTA has four warps, or eight in rows of two or four": lambda s: np.any(
                [(s.warps_m == m) & (s.warps_n == n) for m, n in _WARP_CHOICES], axis=0
            ),
            "each warp multiplies whole instructions, two of 8 columns at a time": lambda s: (
                (s.tile_m % (MMA_ROWS * s.warps_m) == 0) & (s.tile_n % (2 * MMA_COLUMNS * s.warps_n) == 0)
            ),
            "a thread has half of its registers for accumulators at most": lambda s: (
                s.tile_m * s.tile_n <= MOST_ACCUMULATORS * s.warps_m * s.warps_n * WARP
            ),
            "eight warps compute 32 accumulators a thread, or more": lambda s: (
                (s.warps_m * s.warps_n == 4) | (s.tile_m * s.tile_n >= 32 * 8 * WARP)
            ),
            "threads copy equally many runs of 16 bytes, and rows are whole runs of 128 or fit into these": lambda s: (
                copied_whole(s, tiling(s).a_tile) & copied_whole(s, tiling(s).b_tile)
            ),
            "where rows of a stage lie along m or n, a warpgroup's part of them starts at 128 bytes": lambda s: (
                (starts_a_line(tiling(s).wg_m, s.tile_m) | (not p.transpose_a))
                & (starts_a_line(tiling(s).wg_n, s.tile_n) | p.transpose_b)
            ),
            "warps multiply parts of a tile as wide as high, or up to four times that": lambda s: (
                (s.tile_m * s.warps_n <= 4 * s.tile_n * s.warps_m) & (s.tile_n * s.warps_m <= 4 * s.tile_m * s.warps_n)
            ),
            "the rows that warpgroups finish at a time fit where the stages were": lambda s: (
                tiling(s).warpgroups * tiling(s).staging_bytes <= tiling(s).pipeline_bytes
            ),
            "more stages than steps stay empty": lambda s: (s.stages == 2) | (s.stages <= tiling(s).steps + 1),
            "with under 16 KiB in flight the tensor cores wait for memory": lambda s: (
                ((s.stages - 1) * (s.tile_m + s.tile_n) * s.tile_k * itemsize >= 16 * 1024)
                | (s.stages >= tiling(s).steps)
                | (s.stages >= 6)
            ),
            "split-K gives work to idle SMs, in splits of 4 steps or more": lambda s: (
                (s.split_k == 1) | (work_tiles(s) <= 2 * cores) & (tiling(s).steps >= FEWEST_STEPS)
            ),
            "no split of k is empty": lambda s: (s.split_k - 1) * tiling(s).steps * s.tile_k < p.k,
            **rules(order_matters, lambda s: (tiling(s).grid_m, tiling(s).grid_n)),
        },
    )


def _up_to(extent: int, tiles: tuple[int, ...], always: int) -> tuple[int, ...]:
    """Returns the tiles that `extent` fills by more than half, and always those up to `always`."""
    return tuple(tile for tile in tiles if tile <= always or tile < 2 * extent)


# ------------------------------------------------------------------------------
# The footprint of a matmul launch by warp-level MMA.

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
