"""Derived sizes of a problem and a schedule: warpgroup tiles, tiles in shared memory, padded arrays."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from search_spaces.hopper.limits import ACCESS_BYTES, ACCUMULATOR_BYTES, WARPGROUP, WARPS
from search_spaces.matmul.problem import MatmulProblem
from search_spaces.mma.fragments import MMA_COLUMNS, MMA_ROWS
from search_spaces.mma.staging import MATRIX_ROWS, staging_pitch
from search_spaces.space import cdiv, round_up


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
