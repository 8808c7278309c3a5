"""What follows from a problem and a schedule: shares of warpgroups, pieces, swizzles, padded extents."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from search_spaces.jax_compat import HAS_UNTILED_SWIZZLE
from search_spaces.matmul.problem import MatmulProblem

THREADS = 128  # of a warpgroup
# wgmma multiplies 64 rows at a time (PTX ISA, wgmma.mma_async).
ATOM_M = 64
SUM_BYTES = 4  # of a float32, an int32
# Rows start at multiples of so many bytes, or no copy reaches them (CUDA driver API, cuTensorMapEncodeTiled).
COPY_BYTES = 16


class Geometry:
    """Of one schedule, or of `Columns` of schedules.

    Attributes:
      warpgroups: those that compute.
      readers: those of them that compute the same tile.
      wg_m, wg_n: what one of them computes of a tile.
      wg_rows, wg_columns: the same as wgmma sees it: rows in atoms of 64, and columns.
      pair_m, pair_n: tiles of a cluster along each axis.
      pair_k: blocks that share a tile, each with its part of k.
      own_m, own_n: what one computing warpgroup finishes of a tile.
      rows, columns: clusters along each axis.
      parts: independent sums of a tile: one for each element of the batch and each part of k that a launch leaves.
      steps: of one block's part of k.
      piece_m, piece_n: extents of a piece of the epilogue.
      pieces: into which a warpgroup's result falls.
      slots: pieces that a warpgroup has room for.
      piece_itemsize: bytes of an element of a piece: of the result, or of a sum where parts are still to be added.
      exact: parts of arrays lie on chip in groups, for which copies reach any extents; otherwise in tiles (parts.py).
      swizzle, out_swizzle: bytes of a swizzled row of the operands, and of the pieces: 16 is no swizzle.
      extents, c_extents: of the last axes of each operand in device memory, in their order, and of those of the
        result, padded as far as copies demand it.
      written: threads write the result to device memory, as no copy reaches its rows.
      bias_width: where there is a bias, the columns of it that a warpgroup copies: its own, up to whole 128 bytes.
      residual_swizzle: where there is a residual, bytes of a swizzled row of its pieces.
    """

    def __init__(self, p: MatmulProblem, s: Any) -> None:
        itemsize, out_itemsize = jnp.dtype(p.dtype).itemsize, p.result().dtype.itemsize
        self.warpgroups = 2 - (s.consumers == "one")
        self.readers = 1 + (s.consumers == "cooperative_m") + (s.consumers == "cooperative_n")
        self.wg_m, self.wg_n = (
            s.tile_m // (1 + (s.consumers == "cooperative_m")),
            s.tile_n // (1 + (s.consumers == "cooperative_n")),
        )
        self.wg_rows, self.wg_columns = (
            np.where(s.swap_ab, self.wg_n, self.wg_m),
            np.where(s.swap_ab, self.wg_m, self.wg_n),
        )
        self.pair_m, self.pair_n = 1 + (s.cluster == "m"), 1 + (s.cluster == "n")
        self.pair_k = 1 + (s.cluster == "split_k")
        self.rows, self.columns = cdiv(p.m, s.tile_m * self.pair_m), cdiv(p.n, s.tile_n * self.pair_n)
        self.parts = p.batch * s.split_k
        self.steps = cdiv(cdiv(p.k, s.tile_k), s.split_k * self.pair_k)

        self.own_m = self.wg_m // np.where(s.swap_ab, self.pair_k, 1)
        self.own_n = self.wg_n // np.where(s.swap_ab, 1, self.pair_k)
        self.piece_m, self.piece_n = np.where(s.swap_ab, self.own_m, ATOM_M), s.epi_tile_n
        self.pieces = (self.own_m // self.piece_m) * (self.own_n // self.piece_n)
        self.slots = np.minimum(2, self.pieces)
        self.piece_itemsize = np.where(s.split_k > 1, SUM_BYTES, out_itemsize)

        self.exact = in_groups(p)
        a, b = ((p.k, p.m) if p.transpose_a else (p.m, p.k)), ((p.n, p.k) if p.transpose_b else (p.k, p.n))
        # A wgmma wants both operands swizzled alike, and a warpgroup's half must end where a swizzled row ends.
        a_row, b_row = (self.wg_m if p.transpose_a else s.tile_k), (s.tile_k if p.transpose_b else self.wg_n)
        limits, c_limits = ((), ()) if self.exact else ((a[1], b[1]), (p.n,))
        self.swizzle = swizzled_bytes(np.gcd(a_row, b_row), itemsize, limits)
        self.extents: list[tuple[Any, ...]] = [self._extents(array, self.swizzle, itemsize) for array in (a, b)]
        least = np.where(s.swap_ab, 16, 32)
        self.out_swizzle = np.where(
            s.split_k > 1,
            swizzled_bytes(self.piece_n, SUM_BYTES),  # an array of our own, as wide as it takes
            swizzled_bytes(self.piece_n, out_itemsize, c_limits, least),
        )
        # Sums of parts lie in an array of our own, whose rows copies reach.
        self.written = self.exact and p.n * out_itemsize % COPY_BYTES > 0 and np.equal(s.split_k, 1)
        c_rows, c_columns = self._extents((p.m, p.n), self.out_swizzle, self.piece_itemsize)
        self.c_extents: tuple[Any, Any] = c_rows, np.where(self.written, p.n, c_columns)

        if p.bias:
            bias_itemsize = jnp.dtype(p.bias).itemsize
            # A copy arrives at a multiple of 128 bytes, and leaves rows at multiples of 16 (CUDA programming guide,
            # tensor memory access).
            self.bias_width = round_up(self.own_n, 128 // bias_itemsize)
            self.extents.append((p.n if p.batch == 1 else round_up(p.n, 16 // bias_itemsize),))
        if p.residual:
            residual_itemsize = jnp.dtype(p.residual).itemsize
            self.residual_swizzle = swizzled_bytes(self.piece_n, residual_itemsize, c_limits, least)
            self.extents.append(self._extents((p.m, p.n), self.residual_swizzle, residual_itemsize))

    def _extents(self, array: tuple[int, int], swizzle: Any, itemsize: Any) -> tuple[Any, Any]:
        if self.exact:
            return array[0], round_up(array[1], COPY_BYTES // itemsize)
        return _legal_extents(array, swizzle, itemsize)


def padded_bytes(shape: tuple[int, ...], extents: tuple[Any, ...], itemsize: int) -> Any:
    """Bytes read and written to get from one of an array and its padded twin to the other; 0 where they are alike.

    `extents` are those of the padded array's last axes.
    """
    lead, last = shape[: -len(extents)], shape[-len(extents) :]
    size, padded = math.prod(last), math.prod(extents)
    return np.where(padded > size, size + padded, 0) * math.prod(lead) * itemsize


def cdiv(a: Any, b: Any) -> Any:
    return -(-a // b)


def round_up(a: Any, b: Any) -> Any:
    return cdiv(a, b) * b


def swizzled_bytes(row: Any, itemsize: int, extents: tuple[int, ...] = (), least: Any = 32) -> Any:
    """Bytes of the widest swizzled row that divides `row` elements, and the arrays' `extents` where one does.

    It is 32, 64 or 128; or 16, which is no swizzle, where `least` allows that.
    """
    widest = np.gcd(row * itemsize, 128)
    for extent in extents:
        dividing = math.gcd(extent * itemsize, 128)
        widest = np.where((extent * itemsize > 128) & (dividing >= least), np.minimum(widest, dividing), widest)
    return widest


def in_groups(p: MatmulProblem) -> bool:
    """Whether tiles of 8 rows, of 32 bytes at least, do not divide the operands or the result: groups do (parts.py)."""
    if not HAS_UNTILED_SWIZZLE:
        return False
    itemsize = jnp.dtype(p.dtype).itemsize
    a, b = ((p.k, p.m) if p.transpose_a else (p.m, p.k)), ((p.n, p.k) if p.transpose_b else (p.k, p.n))
    c_sizes = [jnp.dtype(dtype).itemsize for dtype in (p.result().dtype, p.residual) if dtype]
    sizes = ((a, itemsize), (b, itemsize), *(((p.m, p.n), size) for size in c_sizes))
    return any(
        (rows > 8 and rows % 8 > 0) or (columns * size > 128 and columns * size % 32 > 0)
        for (rows, columns), size in sizes
    )


def _legal_extents(extents: tuple[int, int], swizzle: Any, itemsize: Any) -> tuple[Any, Any]:
    """The least extents of an array that copies reach: whole tiles of 8 swizzled rows or under one, 16-byte strides.

    Within them no edge needs a mask: copies fill what lies beyond with zeros and write nothing there.
    """
    rows, columns = extents
    swizzled = swizzle // itemsize
    whole = np.where(columns <= swizzled, round_up(columns, 16 // itemsize), round_up(columns, swizzled))
    return rows if rows <= 8 else round_up(rows, 8), whole
