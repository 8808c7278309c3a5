"""The schedule of a matmul on Hopper: its fields, and the mirrored problem and schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from search_spaces.hopper import ACCUMULATOR_BYTES, TMA_GMEM_ALIGNMENT, TMA_SMEM_ALIGNMENT, WGMMA_ROWS
from search_spaces.hopper.smem_layout import needs_untiled, swizzled_bytes, tma_extents
from search_spaces.matmul.problem import MatmulProblem
from search_spaces.space import cdiv, round_up


@dataclasses.dataclass(frozen=True)
class HopperSchedule:
    """Maps a matmul to CTAs, warpgroups and pipeline steps.

    Attributes:
      tile_m, tile_n: extents of the output tile that one CTA computes at a time.
      tile_k: extent of k that one pipeline stage holds.
      stages: number of pipeline stages. Loads run this many steps ahead, and continue into the next tile.
      consumers: the consumer warpgroups: "one"; two that are "cooperative_m" or "cooperative_n" and halve each tile
        along that axis; or two that take whole tiles in turn, so that the epilogue of one overlaps the main loop of the
        other. With "ordered_ping_pong" one consumer issues all wgmmas of its tile before the other begins (CUTLASS's
        ping-pong, by its OrderedSequenceBarrier). With "ping_pong" both issue wgmmas as stages arrive.
      cluster: how two CTAs pair up, or "none". Along "m" or "n" they compute adjacent tiles, and each multicasts half
        of the operand that both need. With "split_k" they share a tile, and each accumulates half of k. After the
        reduction through DSMEM, each finishes half of wgmma's columns.
      grid_minor_dim: the axis, "m" or "n", along which consecutive tiles are adjacent (grouped, planar-snake
        rasterization).
      grid_tile_width: width of a group of the rasterization, in tiles (in clusters, if clusters lie along that axis).
      epi_tile_n: columns of an epilogue subtile. A subtile has 64 rows, or, with `swap_ab`, all rows of the warpgroup.
      swap_ab: the tile is computed as ``c^T = b^T a^T``: n takes the 64 rows that wgmma multiplies at a time, and m its
        columns, which come in multiples of 8. A small m is then not padded to 64, and most of the pipeline holds `b`. A
        large m can use tile sizes that give whole waves, or that fit one ordered consumer.
      split_k: parts of k that different CTAs accumulate and leave in device memory; a reduction kernel adds them,
        always in the same order.
      delay_release: number of steps (0 or 1) with wgmmas still in flight when the next step's start: their stages are
        released one step later.
      tail_split_k: parts of k of the tiles of the last wave, which different CTAs accumulate to shorten the wave
        (tile_scheduler.py). They leave their accumulators in device memory for the CTA that has the last part.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    stages: int
    consumers: str
    cluster: str
    grid_minor_dim: str
    grid_tile_width: int
    epi_tile_n: int
    swap_ab: bool = False
    split_k: int = 1
    delay_release: int = 0
    tail_split_k: int = 1


# Consumers that take whole tiles in turn.
PING_PONG = ("ordered_ping_pong", "ping_pong")

_OTHER = {"m": "n", "n": "m", "cooperative_m": "cooperative_n", "cooperative_n": "cooperative_m"}


def mirrored(p: MatmulProblem, s: HopperSchedule) -> tuple[MatmulProblem, HopperSchedule]:
    """Mirrors a matmul and its schedule as ``c^T = b^T a^T``: m and n, and `a` and `b`, are swapped.

    Several results become one.
    """
    return (
        dataclasses.replace(p.joined, m=p.n, n=p.m, transpose_a=not p.transpose_b, transpose_b=not p.transpose_a),
        dataclasses.replace(
            s,
            tile_m=s.tile_n,
            tile_n=s.tile_m,
            consumers=_OTHER.get(s.consumers, s.consumers),
            cluster=_OTHER.get(s.cluster, s.cluster),
            grid_minor_dim=_OTHER[s.grid_minor_dim],
        ),
    )


# ------------------------------------------------------------------------------
# The products that a launch computes with one `a` and multiplies: one, or the two of a gated matmul.
#
# For ``activation(a @ b + bias) * (a @ up + up_bias)``, each step multiplies its stage of `a` by a stage of both
# weights. `a` is loaded once, and accumulators stay in registers until the epilogue combines them.


@dataclasses.dataclass(frozen=True)
class Gate:
    """Makes a matmul the gate of another one, of the same shapes and dtypes and without activation.

    Attributes:
      joined: both read their columns from one array, ``[batch, k, 2 n]``, the gate first; otherwise from one array
        each.
      bias_joined: the same for the biases, ``[batch, 2 n]``.
    """

    joined: bool
    bias_joined: bool


class Source(NamedTuple):
    """An operand in device memory.

    Attributes:
      array: the array that contains it.
      first: its offset within the array along each of its last axes; () is no offset.
      batched: whether the array has a batch axis.
    """

    array: Any
    first: tuple[int, ...] = ()
    batched: bool = False

    def at(self, *corner: Any) -> tuple[Any, ...]:
        """Converts coordinates within the operand to coordinates of the array."""
        return tuple(x + by if by else x for x, by in zip(corner, self.first or (0,) * len(corner), strict=True))


class Sources(NamedTuple):
    """The operands of a launch, with one `b` and one bias per factor; `bias` is empty and `residual` None if absent."""

    a: Source
    b: tuple[Source, ...]
    bias: tuple[Source, ...]
    residual: Any


def factors(problem: MatmulProblem, gate: Gate | None) -> tuple[MatmulProblem, ...]:
    """Returns the matmuls that are multiplied, `problem` first."""
    return (problem,) if gate is None else (problem, dataclasses.replace(problem, activation=""))


def sources(problem: MatmulProblem, gate: Gate | None, arrays: Sequence[Any]) -> tuple[Sources, list[Any]]:
    """Returns a launch's operands, and the arrays that follow them."""
    count = len(problem.operands())
    a_batched, b_batched = problem.batched
    if gate is None:
        a, b, bias, residual = problem.named(arrays[:count])
        biases: tuple[Source, ...] = () if bias is None else (Source(bias),)
        weights: tuple[Source, ...] = (Source(b, batched=b_batched),)
        return Sources(Source(a, batched=a_batched), weights, biases, residual), list(arrays[count:])
    a, *left = arrays
    a, n = Source(a, batched=a_batched), problem.n
    along = (n, 0) if problem.transpose_b else (0, n)
    others = (left[0], left[0]) if gate.joined else (left[0], left[1])
    weights = Source(others[0], (), b_batched), Source(others[1], along if gate.joined else (), b_batched)
    left = left[1 if gate.joined else 2 :]
    if not problem.bias:
        return Sources(a, weights, (), None), left
    biases = (Source(left[0]), Source(left[0], (n,))) if gate.bias_joined else (Source(left[0]), Source(left[1]))
    return Sources(a, weights, biases, None), left[1 if gate.bias_joined else 2 :]


# ------------------------------------------------------------------------------
# Derived sizes of a problem and a schedule: extents of warpgroup tiles, subtiles, swizzles, padded arrays.


class Tiling:
    """The derived sizes of one schedule, or of `Columns` of schedules.

    Attributes:
      consumers: number of consumer warpgroups.
      cooperating: number of consumers that compute the same tile.
      wg_m, wg_n: extents of one consumer's part of a tile.
      wg_rows, wg_columns: the same as wgmma sees it: rows in multiples of 64, and columns.
      cluster_m, cluster_n: tiles of a cluster along each axis.
      cluster_k: CTAs of a cluster that share a tile, each with its part of k.
      out_m, out_n: extents of the part of a tile that one consumer finishes.
      grid_m, grid_n: clusters along each axis.
      tiles: work tiles of all clusters, of which some may be split.
      products: independent products of a launch: one for each element of the batch, and for each split of k.
      steps: of one CTA's part of k.
      epi_m, epi_n: extents of an epilogue subtile.
      subtiles: number of subtiles of a consumer's result.
      epi_stages: number of subtiles that a consumer has in shared memory.
      out_itemsize: bytes of an element of a subtile: of the result, or of an accumulator with split-K.
      untiled: whether tiles have the untiled swizzled layout, for which TMA accepts any extents (smem_layout.py).
      swizzle, out_swizzle: bytes of a swizzled row of the operands, and of the subtiles; 16 means no swizzle.
      extents, c_extents: of the last axes of each operand in device memory, in order, and of those of each result,
        padded as TMA requires.
      stored_by_threads: whether threads store the results to device memory, because TMA cannot address their rows.
      bias_width: with a bias, the columns of it that a consumer copies: its own, rounded up to 128 bytes.
      residual_swizzle: with a residual, bytes of a swizzled row of its subtiles.
    """

    def __init__(self, p: MatmulProblem, s: Any) -> None:
        itemsize, out_itemsize = jnp.dtype(p.dtype).itemsize, p.whole.dtype.itemsize
        self.consumers = 2 - (s.consumers == "one")
        self.cooperating = 1 + (s.consumers == "cooperative_m") + (s.consumers == "cooperative_n")
        self.wg_m, self.wg_n = wg_tile(s)
        self.wg_rows, self.wg_columns = as_wgmma(s, self.wg_m, self.wg_n)
        self.cluster_m, self.cluster_n = 1 + (s.cluster == "m"), 1 + (s.cluster == "n")
        self.cluster_k = 1 + (s.cluster == "split_k")
        self.grid_m, self.grid_n = clusters(p, s, "m"), clusters(p, s, "n")
        self.products = p.batch * s.split_k
        self.tiles = self.products * self.grid_m * self.grid_n
        self.steps = k_steps(p, s)

        self.out_m = self.wg_m // np.where(s.swap_ab, self.cluster_k, 1)
        self.out_n = self.wg_n // np.where(s.swap_ab, 1, self.cluster_k)
        self.epi_m, self.epi_n = np.where(s.swap_ab, self.out_m, WGMMA_ROWS), s.epi_tile_n
        self.subtiles = (self.out_m // self.epi_m) * (self.out_n // self.epi_n)
        # In ping-pong a second subtile is worth less than a stage, because the other consumer multiplies meanwhile. But
        # a residual's subtile would arrive late: on an H200, 8192 x 3072 x 768 takes 62.9 us instead of 56.2, and
        # without a residual 50.6 instead of 51.1. With `swap_ab` a subtile has all of a consumer's columns.
        one = np.isin(s.consumers, PING_PONG) & (s.swap_ab | (not p.residual))
        self.epi_stages = np.where(one, 1, np.minimum(2, self.subtiles))
        self.out_itemsize = np.where(s.split_k > 1, ACCUMULATOR_BYTES, out_itemsize)

        self.untiled = untiled(p)
        a, b = operand_extents(p)
        # A wgmma requires the same swizzle for both operands, and a warpgroup's half must end at the end of a swizzled
        # row.
        a_row, b_row = (self.wg_m if p.transpose_a else s.tile_k), (s.tile_k if p.transpose_b else self.wg_n)
        limits, c_limits = ((), ()) if self.untiled else ((a[1], b[1]), p.columns)
        self.swizzle = swizzled_bytes(np.gcd(a_row, b_row), itemsize, limits)
        self.extents: list[tuple[Any, ...]] = [
            tma_extents(array, self.swizzle, itemsize, untiled=self.untiled) for array in (a, b)
        ]
        least = np.where(s.swap_ab, 16, 32)
        self.out_swizzle = np.where(
            s.split_k > 1,
            swizzled_bytes(self.epi_n, ACCUMULATOR_BYTES),  # an internal array, of any width
            swizzled_bytes(self.epi_n, out_itemsize, c_limits, least),
        )
        # The accumulators of a split are an internal array: TMA can address its rows.
        unaligned = any(n * out_itemsize % TMA_GMEM_ALIGNMENT for n in p.columns)
        self.stored_by_threads = self.untiled and unaligned and np.equal(s.split_k, 1)
        self.c_extents: list[tuple[Any, Any]] = []
        for n in p.columns:
            c_rows, c_columns = tma_extents((p.m, n), self.out_swizzle, self.out_itemsize, untiled=self.untiled)
            self.c_extents.append((c_rows, np.where(self.stored_by_threads, n, c_columns)))

        if p.bias:
            bias_itemsize = jnp.dtype(p.bias).itemsize
            self.bias_width = round_up(self.out_n, TMA_SMEM_ALIGNMENT // bias_itemsize)
            self.extents.append((p.n if p.batch == 1 else round_up(p.n, TMA_GMEM_ALIGNMENT // bias_itemsize),))
        if p.residual:
            residual_itemsize = jnp.dtype(p.residual).itemsize
            self.residual_swizzle = swizzled_bytes(self.epi_n, residual_itemsize, c_limits, least)
            self.extents.append(tma_extents((p.m, p.n), self.residual_swizzle, residual_itemsize, untiled=self.untiled))


# A space calls the functions below before all fields of a schedule are chosen, so each uses as few fields as possible.


def wg_tile(s: Any) -> tuple[Any, Any]:
    """Returns the extents of one consumer warpgroup's part of a tile, along m and n."""
    return s.tile_m // (1 + (s.consumers == "cooperative_m")), s.tile_n // (1 + (s.consumers == "cooperative_n"))


def as_wgmma(s: Any, m: Any, n: Any) -> tuple[Any, Any]:
    """Converts extents `m` and `n` of the result to rows and columns as wgmma sees them."""
    return np.where(s.swap_ab, n, m), np.where(s.swap_ab, m, n)


def clusters(p: MatmulProblem, s: Any, axis: str) -> Any:
    """Returns the number of clusters along an axis of the result, "m" or "n"; of CTAs if no cluster lies along it."""
    extent, tile = (p.m, s.tile_m) if axis == "m" else (p.n, s.tile_n)
    return cdiv(extent, tile * (1 + (s.cluster == axis)))


def k_splits(s: Any) -> Any:
    """Returns the number of parts of k over CTAs, for both kinds of split-K."""
    return s.split_k * (1 + (s.cluster == "split_k"))


def k_steps(p: MatmulProblem, s: Any) -> Any:
    """Returns the steps of one CTA's part of k."""
    return cdiv(cdiv(p.k, s.tile_k), k_splits(s))


def operand_extents(p: MatmulProblem) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns the last two axes of `a` and of `b` as stored in device memory."""
    return ((p.k, p.m) if p.transpose_a else (p.m, p.k)), ((p.n, p.k) if p.transpose_b else (p.k, p.n))


def untiled(p: MatmulProblem) -> bool:
    """Returns whether an operand or the result needs the untiled swizzled layout; all of them then use it."""
    if p.starts_at_any_row:
        return True
    itemsize, (a, b) = jnp.dtype(p.dtype).itemsize, operand_extents(p)
    c_sizes = [jnp.dtype(dtype).itemsize for dtype in (p.whole.dtype, p.residual) if dtype]
    sizes = ((a, itemsize), (b, itemsize), *(((p.m, p.n), size) for size in c_sizes))
    return any(needs_untiled(extents, size) for extents, size in sizes)
