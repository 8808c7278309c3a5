"""Products of tiles in shared memory by warp-level MMA: fragments of them by ldmatrix, and where warps find theirs.

The four warps of a warpgroup lie over its part of a result in `m_warps` rows and ``4 / m_warps`` columns, and that
again and again: a warp has every `m_warps`-th 16 rows, and every ``4 / m_warps``-th 8 columns (`plgpu.Layout.MMA_ACC`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from search_spaces.hopper.limits import ACCESS_BYTES, WARP, WARPGROUP, WARPS
from search_spaces.jax_compat import mosaic_gpu_code, plgpu
from search_spaces.mma import lanes
from search_spaces.mma.cp_async import SmemTile

# Of one instruction, mma.m16n8 (PTX ISA): rows and columns of the result, and bytes of each operand along k.
MMA_ROWS, MMA_COLUMNS, MMA_K_BYTES = 16, 8, 32
MATRIX = 8  # rows of one of the matrices that ldmatrix loads, of 16 bytes each


@dataclasses.dataclass(frozen=True)
class WarpTiles:
    """What a warpgroup multiplies of a CTA's tiles.

    Attributes:
      m, n: extents of its part of the result.
      m_warps: warps along m; the others of four lie along n.
      along_m: whether the CTA's warpgroups lie along m; else along n.
      dtype: of the operands.
    """

    m: int
    n: int
    m_warps: int
    along_m: bool
    dtype: Any

    @property
    def n_warps(self) -> int:
        return WARPS // self.m_warps

    @property
    def k(self) -> int:
        """Of one instruction, in elements."""
        return int(MMA_K_BYTES // self.dtype.itemsize)

    @property
    def acc_dtype(self) -> Any:
        return jnp.dtype(jnp.int32 if jnp.issubdtype(self.dtype, jnp.integer) else jnp.float32)

    @property
    def layout(self) -> Any:
        """Of the accumulators."""
        return plgpu.Layout.MMA_ACC(self.dtype, m_warps=self.m_warps)


@dataclasses.dataclass(frozen=True)
class Operand:
    """`a` or `b` of a product in shared memory.

    Attributes:
      tile: of the whole CTA.
      k_major: k lies along its rows, as it does in fragments; else ldmatrix transposes, which it can do with 16 bits.
    """

    tile: SmemTile
    k_major: bool


def zeros(warps: WarpTiles) -> jax.Array:
    """Accumulators to start with."""
    zero = jnp.zeros((warps.m, warps.n), warps.acc_dtype)
    cast: jax.Array = plgpu.layout_cast(zero, warps.layout)
    return cast


def multiply(acc: jax.Array, a: Any, b: Any, of: tuple[Operand, Operand], warps: WarpTiles, wg: Any) -> jax.Array:
    """``acc + a b`` of one step.

    Args:
      acc: of this warpgroup.
      a, b: references to flat shared memory.
      of: what lies there.
      wg: the warpgroup's number in the CTA.
    """
    one, other = of
    steps = (one.tile.columns if one.k_major else one.tile.rows) // warps.k

    def meaning(acc: jax.Array, a: Any, b: Any, wg: Any) -> jax.Array:
        left = a[...].reshape(one.tile.rows, one.tile.columns)
        right = b[...].reshape(other.tile.rows, other.tile.columns)
        left, right = left if one.k_major else left.T, right.T if other.k_major else right
        first = wg * (warps.m if warps.along_m else warps.n)
        if warps.along_m:
            left = jax.lax.dynamic_slice_in_dim(left, first, warps.m, 0)
        else:
            right = jax.lax.dynamic_slice_in_dim(right, first, warps.n, 1)
        # In the accumulators' dtype: a CPU does not multiply every narrow one.
        return acc + jnp.dot(left.astype(acc.dtype), right.astype(acc.dtype))

    @mosaic_gpu_code(
        meaning,
        arg_types=(warps.layout, plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT),
        return_type=plgpu.ShapeDtypeStruct((warps.m, warps.n), warps.acc_dtype, layout=warps.layout),
    )
    def issue(_: Any, acc: Any, a: Any, b: Any, wg: Any) -> Any:
        wg = lanes.number(wg)
        lhs = _Loads(_lhs_lanes(one, warps, wg), lanes.smem_address(a), one)
        rhs = _Loads(_rhs_lanes(other, warps, wg), lanes.smem_address(b), other)
        ahead = _lhs(lhs, warps, 0), _rhs(rhs, warps, 0)
        # Fragments of the next k are on their way while those of this one are multiplied.
        for step in range(steps):
            now = ahead
            if step + 1 < steps:
                ahead = _lhs(lhs, warps, step + 1), _rhs(rhs, warps, step + 1)
            acc = mgpu.mma(acc, *now)
        return acc

    product: jax.Array = issue(acc, a, b, jnp.int32(wg))
    return product


@dataclasses.dataclass(frozen=True)
class _Lane:
    """Where a lane's row of a matrix lies that ldmatrix loads first: its row, and the run of 16 bytes in it."""

    row: Any
    run: Any


@dataclasses.dataclass(frozen=True)
class _Loads:
    """Loads of an operand's matrices.

    Attributes:
      lane: of the first.
      base: address of the tile.
      operand: what lies there.
    """

    lane: _Lane
    base: Any
    operand: Operand

    def four(self, row: int, run: int) -> list[Any]:
        """Four matrices, `row` rows and `run` runs after the first ones.

        `row` is a multiple of 16, and the bits of `run` are none of those of any lane's run, except whole multiples of
        the swizzle's runs: so what is added here needs no swizzle of its own.
        """
        tile = self.operand.tile
        high, low = divmod(run, tile.runs)
        within = (self.lane.run ^ tile.swizzle(self.lane.row)) * ACCESS_BYTES + self.lane.row * tile.row_bytes
        address = self.base + (within ^ (low * ACCESS_BYTES) if low else within)
        beyond = row * tile.row_bytes + high * tile.runs * ACCESS_BYTES
        words = llvm.StructType.get_literal([lanes.bits(32)] * 4)
        transposed = "" if self.operand.k_major else ".trans"
        loaded = lanes.instruct(
            f"ldmatrix.sync.aligned.m8n8.x4{transposed}.shared.b16 {{$0, $1, $2, $3}}, [$4+{beyond}];",
            "=r,=r,=r,=r,r",
            [lanes.register(address)],
            words,
        )
        return [llvm.extractvalue(lanes.bits(32), loaded, [at]) for at in range(4)]


def _place() -> tuple[Any, Any]:
    """The lane in its warp, and the warp in its warpgroup."""
    return lanes.thread() % WARP, lanes.thread() % WARPGROUP // WARP


def _lhs_lanes(a: Operand, warps: WarpTiles, wg: Any) -> _Lane:
    """Of the matrices of 16 rows of `a`, upper and lower, of the first and of the second half of k."""
    lane, warp = _place()
    warp_m = warp // warps.n_warps
    first = wg * warps.m if warps.along_m else wg * 0
    if a.k_major:
        return _Lane(first + warp_m * MMA_ROWS + lane % MMA_ROWS, lane // MMA_ROWS)
    run = first // MATRIX + warp_m * (MMA_ROWS // MATRIX) + lane // MATRIX % 2
    return _Lane(lane // MMA_ROWS * MATRIX + lane % MATRIX, run)


def _rhs_lanes(b: Operand, warps: WarpTiles, wg: Any) -> _Lane:
    """Of the matrices of a warp's first 8 columns of `b`, of the first and the second half of k, then of the next 8."""
    lane, warp = _place()
    first = wg * 0 if warps.along_m else wg * warps.n
    columns = lane // MMA_ROWS * warps.n_warps + warp % warps.n_warps  # in eights
    half = lane // MATRIX % 2
    if b.k_major:
        return _Lane(first + columns * MMA_COLUMNS + lane % MATRIX, half)
    return _Lane(half * MATRIX + lane % MATRIX, first // MATRIX + columns)


def _lhs(loads: _Loads, warps: WarpTiles, step: int) -> Any:
    each = warps.m_warps * MMA_ROWS
    found = []
    for first in range(0, warps.m, each):
        if loads.operand.k_major:
            found += loads.four(first, step * (MMA_K_BYTES // ACCESS_BYTES))
        else:
            found += loads.four(step * warps.k, first // MATRIX)
    return _fragment(found, (warps.m, warps.k), warps, plgpu.Layout.MMA_LHS)


def _rhs(loads: _Loads, warps: WarpTiles, step: int) -> Any:
    each = 2 * warps.n_warps * MMA_COLUMNS
    found = []
    for first in range(0, warps.n, each):
        if loads.operand.k_major:
            found += loads.four(first, step * (MMA_K_BYTES // ACCESS_BYTES))
        else:
            found += loads.four(step * warps.k, first // MATRIX)
    # Registers are numbered along k first.
    return _fragment(found, (warps.k, warps.n), warps, plgpu.Layout.MMA_RHS)


def _fragment(words: list[Any], shape: tuple[int, int], warps: WarpTiles, kind: Any) -> Any:
    layout = kind(warps.dtype, m_warps=warps.m_warps).to_mgpu()
    element = mgpu.utils.dtype_to_ir_type(warps.dtype)
    vector = ir.VectorType.get((4 // warps.dtype.itemsize,), element)
    registers = np.empty(len(words), dtype=object)
    registers[:] = [mgpu.utils.bitcast(word, vector) for word in words]
    signed = True if jnp.issubdtype(warps.dtype, jnp.integer) else None
    return mgpu.FragmentedArray(
        _registers=registers.reshape(layout.registers_shape(shape)), _layout=layout, _is_signed=signed
    )
