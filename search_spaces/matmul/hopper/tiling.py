"""Derived sizes of a problem and a schedule: extents of warpgroup tiles, subtiles, swizzles, padded arrays."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from search_spaces.hopper.limits import ACCUMULATOR_BYTES, TMA_GMEM_ALIGNMENT, TMA_SMEM_ALIGNMENT, WGMMA_ROWS
from search_spaces.hopper.smem_layout import needs_untiled, swizzled_bytes, tma_extents
from search_spaces.matmul.hopper.schedule import PING_PONG
from search_spaces.matmul.problem import MatmulProblem
from search_spaces.space import cdiv, round_up


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
        # The accumulators of a split are an internal array, whose rows TMA can address.
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
    itemsize, (a, b) = jnp.dtype(p.dtype).itemsize, operand_extents(p)
    c_sizes = [jnp.dtype(dtype).itemsize for dtype in (p.whole.dtype, p.residual) if dtype]
    sizes = ((a, itemsize), (b, itemsize), *(((p.m, p.n), size) for size in c_sizes))
    return any(needs_untiled(extents, size) for extents, size in sizes)
