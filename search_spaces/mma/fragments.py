"""Products of tiles in shared memory by warp-level MMA: fragments loaded by ldmatrix, and their assignment to warps.

The four warps of a warpgroup form `m_warps` rows and ``4 / m_warps`` columns, which repeat over its part of a result: a
warp has every `m_warps`-th group of 16 rows, and every ``4 / m_warps``-th group of 8 columns (`plgpu.Layout.MMA_ACC`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from search_spaces.hopper import ACCESS_BYTES, WARP, WARPGROUP, WARPS
from search_spaces.jax_compat import HAS_MMA, NEEDS_JAX, mosaic_gpu_code, plgpu
from search_spaces.mma import lanes
from search_spaces.mma.cp_async import SmemTile
from search_spaces.target import Target

# One instruction, mma.m16n8 (PTX ISA): rows and columns of the result, and bytes of each operand along k.
MMA_ROWS, MMA_COLUMNS, MMA_K_BYTES = 16, 8, 32
MATRIX = 8  # rows of one of the matrices that ldmatrix loads, 16 bytes each


@dataclasses.dataclass(frozen=True)
class WarpTiles:
    """A warpgroup's part of a CTA's tiles.

    Attributes:
      m, n: extents of its part of the result.
      m_warps: warps along m; the remaining factor of four lies along n.
      along_m: whether the CTA's warpgroups lie along m; otherwise along n.
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
        """Extent of k of one instruction, in elements."""
        return int(MMA_K_BYTES // self.dtype.itemsize)

    @property
    def acc_dtype(self) -> Any:
        return jnp.dtype(jnp.int32 if jnp.issubdtype(self.dtype, jnp.integer) else jnp.float32)

    @property
    def layout(self) -> Any:
        """Layout of the accumulators."""
        return plgpu.Layout.MMA_ACC(self.dtype, m_warps=self.m_warps)

    @property
    def lhs_layout(self) -> Any:
        return plgpu.Layout.MMA_LHS(self.dtype, m_warps=self.m_warps)

    @property
    def rhs_layout(self) -> Any:
        return plgpu.Layout.MMA_RHS(self.dtype, m_warps=self.m_warps)


@dataclasses.dataclass(frozen=True)
class Operand:
    """`a` or `b` of a product, in shared memory.

    Attributes:
      tile: of the whole CTA.
      k_major: whether k lies along its rows, as in fragments; otherwise ldmatrix transposes, which requires 16-bit
        elements.
    """

    tile: SmemTile
    k_major: bool

    @property
    def k(self) -> int:
        return self.tile.columns if self.k_major else self.tile.rows

    def k_last(self, flat: jax.Array) -> jax.Array:
        """Returns the tile as an array ``[m or n, k]``."""
        rows = flat.reshape(self.tile.rows, self.tile.columns)
        return rows if self.k_major else rows.T


def zeros(warps: WarpTiles) -> jax.Array:
    """Returns zero accumulators."""
    zero = jnp.zeros((warps.m, warps.n), warps.acc_dtype)
    cast: jax.Array = plgpu.layout_cast(zero, warps.layout)
    return cast


def multiply(acc: jax.Array, a: jax.Array, b: jax.Array, warps: WarpTiles) -> jax.Array:
    """Computes ``acc + a b`` of a warpgroup, for the k of one instruction."""

    def meaning(acc: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        # In the accumulators' dtype, because CPUs do not multiply every narrow dtype.
        return acc + jnp.dot(a.astype(acc.dtype), b.astype(acc.dtype))

    @mosaic_gpu_code(
        meaning,
        arg_types=(warps.layout, warps.lhs_layout, warps.rhs_layout),
        return_type=plgpu.ShapeDtypeStruct((warps.m, warps.n), warps.acc_dtype, layout=warps.layout),
    )
    def issue(_: Any, acc: Any, a: Any, b: Any) -> Any:
        return mgpu.mma(acc, a, b)

    product: jax.Array = issue(acc, a, b)
    return product


def lhs(a: Any, of: Operand, warps: WarpTiles, wg: Any, number: int) -> jax.Array:
    """Loads fragments of `a`, ``[m, k]``, for the k of instruction `number`.

    Args:
      a: reference to flat shared memory.
      of: the operand stored there.
      wg: index of the warpgroup in the CTA.
    """

    def meaning(a: Any, wg: Any) -> jax.Array:
        every = of.k_last(a[...])[:, number * warps.k :][:, : warps.k]
        return jax.lax.dynamic_slice_in_dim(every, wg * warps.m, warps.m, 0) if warps.along_m else every

    @mosaic_gpu_code(
        meaning,
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT),
        return_type=plgpu.ShapeDtypeStruct((warps.m, warps.k), warps.dtype, layout=warps.lhs_layout),
    )
    def load(_: Any, a: Any, wg: Any) -> Any:
        loads = _Loads(_lhs_lanes(of, warps, lanes.number(wg)), lanes.smem_address(a), of)
        words = loads.all(warps.m, warps.m_warps * MMA_ROWS, number, warps)
        return _fragment(words, (warps.m, warps.k), warps, warps.lhs_layout)

    loaded: jax.Array = load(a, jnp.int32(wg))
    return loaded


def rhs(b: Any, of: Operand, warps: WarpTiles, wg: Any, number: int) -> jax.Array:
    """Loads fragments of `b`, ``[k, n]``, like `lhs`."""

    def meaning(b: Any, wg: Any) -> jax.Array:
        every = of.k_last(b[...])[:, number * warps.k :][:, : warps.k].T
        return every if warps.along_m else jax.lax.dynamic_slice_in_dim(every, wg * warps.n, warps.n, 1)

    @mosaic_gpu_code(
        meaning,
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT),
        return_type=plgpu.ShapeDtypeStruct((warps.k, warps.n), warps.dtype, layout=warps.rhs_layout),
    )
    def load(_: Any, b: Any, wg: Any) -> Any:
        loads = _Loads(_rhs_lanes(of, warps, lanes.number(wg)), lanes.smem_address(b), of)
        # Registers are ordered along k first.
        words = loads.all(warps.n, 2 * warps.n_warps * MMA_COLUMNS, number, warps)
        return _fragment(words, (warps.k, warps.n), warps, warps.rhs_layout)

    loaded: jax.Array = load(b, jnp.int32(wg))
    return loaded


@dataclasses.dataclass(frozen=True)
class _Lane:
    """The position of a lane's row in the first matrices that ldmatrix loads: the row, and the 16-byte run in it."""

    row: Any
    run: Any


@dataclasses.dataclass(frozen=True)
class _Loads:
    """Loads of an operand's matrices.

    Attributes:
      lane: the lane's position in the first matrices.
      base: address of the tile.
      operand: the operand stored there.
    """

    lane: _Lane
    base: Any
    operand: Operand

    def four(self, row: int, run: int) -> list[Any]:
        """Loads four matrices, `row` rows and `run` runs after the first ones.

        `row` is a multiple of 16. The bits of `run` do not overlap those of any lane's run, except for whole multiples
        of the swizzle's runs. The offsets added here therefore need no swizzle.
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

    def all(self, extent: int, each: int, number: int, warps: WarpTiles) -> list[Any]:
        """Loads all of `extent` for the k of instruction `number`; four matrices cover `each` of it."""
        if self.operand.k_major:
            along_k = number * (MMA_K_BYTES // ACCESS_BYTES)
            places = [(first, along_k) for first in range(0, extent, each)]
        else:
            places = [(number * warps.k, first // MATRIX) for first in range(0, extent, each)]
        return [word for place in places for word in self.four(*place)]


def _place() -> tuple[Any, Any]:
    """Returns the index of the lane in its warp, and of the warp in its warpgroup."""
    return lanes.thread() % WARP, lanes.thread() % WARPGROUP // WARP


def _lhs_lanes(a: Operand, warps: WarpTiles, wg: Any) -> _Lane:
    """Returns the lane's position for 16 rows of `a`: upper and lower matrix of the first, then second half of k."""
    lane, warp = _place()
    warp_m = warp // warps.n_warps
    first = wg * warps.m if warps.along_m else wg * 0
    if a.k_major:
        return _Lane(first + warp_m * MMA_ROWS + lane % MMA_ROWS, lane // MMA_ROWS)
    run = first // MATRIX + warp_m * (MMA_ROWS // MATRIX) + lane // MATRIX % 2
    return _Lane(lane // MMA_ROWS * MATRIX + lane % MATRIX, run)


def _rhs_lanes(b: Operand, warps: WarpTiles, wg: Any) -> _Lane:
    """Returns the lane's position for a warp's first 8 columns of `b` (first, second half of k), then the next 8."""
    lane, warp = _place()
    first = wg * 0 if warps.along_m else wg * warps.n
    columns = lane // MMA_ROWS * warps.n_warps + warp % warps.n_warps  # in units of 8
    half = lane // MATRIX % 2
    if b.k_major:
        return _Lane(first + columns * MMA_COLUMNS + lane % MATRIX, half)
    return _Lane(half * MATRIX + lane % MATRIX, first // MATRIX + columns)


def _fragment(words: list[Any], shape: tuple[int, int], warps: WarpTiles, kind: Any) -> Any:
    layout = kind.to_mgpu()
    element = mgpu.utils.dtype_to_ir_type(warps.dtype)
    vector = ir.VectorType.get((4 // warps.dtype.itemsize,), element)
    registers = np.empty(len(words), dtype=object)
    registers[:] = [mgpu.utils.bitcast(word, vector) for word in words]
    signed = True if jnp.issubdtype(warps.dtype, jnp.integer) else None
    return mgpu.FragmentedArray(
        _registers=registers.reshape(layout.registers_shape(shape)), _layout=layout, _is_signed=signed
    )


# ------------------------------------------------------------------------------
# The chips that kernels by warp-level MMA support, and the dtypes that their tensor cores multiply.

_HALF = ("bfloat16", "float16", "int8")
_FP8 = ("float8_e4m3fn", "float8_e5m2")
# PTX ISA, mma.m16n8k16 and mma.m16n8k32: FP8 from sm_89 on. Mosaic GPU does not support TF32 (jax 0.12).
DTYPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"sm_80": _HALF, "sm_86": _HALF, "sm_89": (*_HALF, *_FP8), "sm_90": (*_HALF, *_FP8)}
)
_NAMES = {"sm_80": "Ampere", "sm_86": "Ampere", "sm_89": "Ada", "sm_90": "Hopper"}
# Mosaic GPU compiles for these (jax 0.11.2), without TMA and wgmma.
BEFORE_HOPPER = frozenset({"sm_80", "sm_86", "sm_89"})


def not_before_hopper(target: Target, also_on: frozenset[str] = frozenset()) -> str | None:
    """Returns why pre-Hopper kernels do not run on `target`, or None; `also_on` are additional architectures."""
    known = sorted(BEFORE_HOPPER | also_on)
    if target.platform != "cuda" or target.architecture not in known:
        *others, last = dict.fromkeys(_NAMES[architecture] for architecture in known)
        names = f"{', '.join(others)} and {last} ({', '.join(known)})"
        return f"is written for NVIDIA {names}, not for {target.kind} ({target.architecture})"
    if not HAS_MMA:
        wanted = f"{NEEDS_JAX}0.11.2 or newer, whose Mosaic GPU compiles for {target.architecture}"
        return f"{wanted}; this is {jax.__version__}"
    return None


def multiplies(target: Target, dtype: str) -> str | None:
    """Returns why the tensor cores of `target` do not multiply operands of this dtype, or None."""
    if dtype in DTYPES[target.architecture]:
        return None
    return f"multiplies {', '.join(DTYPES[target.architecture])} on {target.architecture}, not {dtype}"
