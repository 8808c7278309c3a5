"""The matmul on TPUs: a Mosaic kernel whose grid is a loop over blocks, and its schedules."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from search_spaces.contrib.tpu.vmem import LANES, VMEM_LIMITS_MIB, limit_bytes, window_bytes
from search_spaces.footprint import Footprint, Operand, Phase
from search_spaces.jax_compat import JAX_VERSION
from search_spaces.kernel import INDICES_OF_32_BITS, Kernel
from search_spaces.matmul import epilogue
from search_spaces.matmul.epilogue import ACTIVATION_OPERATIONS, EXPONENTIALS
from search_spaces.matmul.problem import MatmulProblem
from search_spaces.problem import Arrays, nbytes
from search_spaces.space import Columns, Space, cdiv, round_up
from search_spaces.target import Target

# ------------------------------------------------------------------------------
# The dtypes that TPUs multiply, by chip.

# 8-bit operands that the MXU multiplies at twice the rate of bfloat16, by architecture (Google's pages of each version,
# cloud.google.com/tpu/docs); other chips would have to widen them first.
NARROW: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        **dict.fromkeys(("TPU v5 lite", "TPU v5", "TPU v6 lite"), frozenset({"int8"})),
        "TPU7x": frozenset({"float8_e4m3fn", "float8_e5m2"}),
    }
)
# All other dtypes that a kernel reads and writes. Mosaic does not support float16
# (docs.jax.dev/en/latest/pallas/tpu/details.html).
OTHERS = frozenset({"bfloat16", "float32", "int32"})


def unsupported(target: Target, operands: str, *others: str) -> str | None:
    """Returns why `target` does not support a product of such operands, with other arrays of `others`.

    None if it does.
    """
    if target.platform != "tpu":
        return f"needs a TPU, not {target.kind}"
    if operands not in OTHERS | NARROW.get(target.architecture, frozenset()):
        return f"multiplies no {operands} on {target.kind}"
    if unknown := sorted(set(others) - OTHERS):
        return f"reads and writes no {unknown[0]}"
    return None


# ------------------------------------------------------------------------------
# The footprint of a matmul launch on a TPU.

# A launch that needs more than the default limit requests 1.5 times what it needs, for spills, plus this. When all of
# VMEM was requested, libtpu 0.0.50 rejected a program that needs 2 MiB, because XLA keeps its own arrays in VMEM (v5e,
# v6e).
SPILL_ROOM = 8 * 2**20
# Blocks of an operand in VMEM: one is loaded while the other is multiplied.
BUFFERS = 2


# Lower bound of the bytes that steps of at least 512 x 512 x 256 spill, by chip and operand dtype: the spill of the
# smallest such step in libtpu 0.0.50, rounded down. For bfloat16 there is no spill on chips with MXUs 256 wide.
LEAST_SPILLS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "TPU v4": {"bfloat16": 64 * 1024, "float32": 64 * 1024},
        "TPU v5 lite": {"bfloat16": 64 * 1024, "float32": 1024 * 1024},
        "TPU v5": {"bfloat16": 64 * 1024, "float32": 1024 * 1024},
        "TPU v6 lite": {"float32": 1024 * 1024},
        "TPU7x": {"float32": 512 * 1024},
    }
)


def footprint(p: MatmulProblem, s: Columns, target: Target, factors: int = 1) -> Footprint:
    """Returns the footprint; a block is a tile of the grid, and each factor has its weights, bias and accumulators."""
    rows, columns, steps = cdiv(p.m, s.tile_m), cdiv(p.n, s.tile_n), cdiv(p.k, s.tile_k)
    itemsize, out = jnp.dtype(p.dtype).itemsize, p.whole
    part_m, part_n, part_k = p.m / rows, p.n / columns, p.k / steps
    minor_is_n = np.equal(s.grid_minor_dim, "n")
    results = s.tile_m * s.tile_n
    exponentials = results * EXPONENTIALS[p.activation]
    a = Operand(bytes=part_m * part_k * itemsize, axes=(0, 1), name="a")
    b = Operand(bytes=part_k * part_n * itemsize, axes=(0, 2), name="b")
    bias = (Operand(bytes=part_n * jnp.dtype(p.bias).itemsize, axes=(0, 2), name="bias"),) if p.bias else ()
    residual = part_m * part_n * jnp.dtype(p.residual).itemsize if p.residual else 0
    return Footprint(
        arithmetic=p.arithmetic,
        grid=(np.full(len(s), p.batch), rows, columns),
        step=Phase(loads=(a, *[b] * factors), flops=2.0 * factors * results * s.tile_k),
        tile=Phase(
            loads=(
                *bias * factors,
                *((Operand(bytes=residual, axes=(0, 1, 2), name="residual"),) if p.residual else ()),
            ),
            fp32_ops=ACTIVATION_OPERATIONS * exponentials,
            mufu_ops=exponentials,
            bytes_written=part_m * part_n * out.dtype.itemsize,
        ),
        onchip_bytes=_vmem_bytes(p, s, target, factors),
        spill_bytes=_least_spill(p, s, target, steps),
        onchip_limit_bytes=vmem_limit(p, s, target, factors),
        steps=steps,
        minor=np.where(minor_is_n, 2, 1),
        group=np.where(minor_is_n, columns, rows),
        axes=("batch", "m", "n"),
        stages=BUFFERS,
        persistent=True,
        # Several results are slices of one array.
        copied_bytes=2.0 * nbytes(out) if p.split_sizes else 0.0,
        launches=1 + len(p.columns) if p.split_sizes else 1,
    )


def _vmem_bytes(p: MatmulProblem, s: Columns, target: Target, factors: int) -> Any:
    """Returns the bytes of the windows of operands and result, and of the accumulators.

    The compiler allocates one buffer for a window that is constant over all steps of the grid, and for all windows if
    the grid gives each core one step. There are no accumulators if a step takes all of k.
    """
    rows, columns, steps = cdiv(p.m, s.tile_m), cdiv(p.n, s.tile_n), cdiv(p.k, s.tile_k)
    one_step = steps == 1
    one_each = one_step & (p.batch * rows * columns == target.cores)

    def window(tile: tuple[Any, Any], dtype: Any, constant: Any, turned: bool = False) -> Any:
        buffers = np.where(constant | one_each, 1, BUFFERS)
        return window_bytes(*(tile[::-1] if turned else tile), dtype, buffers)

    one_row, one_column = (p.batch == 1) & (rows == 1), (p.batch == 1) & (columns == 1)
    one_tile = one_row & one_column
    total = window((s.tile_m, s.tile_k), p.dtype, one_row & one_step, p.transpose_a)
    total = total + factors * window((s.tile_k, s.tile_n), p.dtype, one_column & one_step, p.transpose_b)
    if p.bias:
        total = total + factors * window((1, s.tile_n), p.bias, one_column)
    if p.residual:
        total = total + window((s.tile_m, s.tile_n), p.residual, one_tile)
    total = total + window((s.tile_m, s.tile_n), p.whole.dtype, one_tile)
    accumulators = factors * window_bytes(s.tile_m, s.tile_n, p.acc_dtype)
    return total + np.where(one_step, 0, accumulators)


def vmem_limit(p: MatmulProblem, s: Columns, target: Target, factors: int = 1) -> Any:
    """Returns the VMEM bytes that a launch requests; 0 means the compiler's default."""
    return requested_bytes(s.vmem_limit_mib, _vmem_bytes(p, s, target, factors))


def requested_bytes(limit_mib: Any, needed: Any) -> Any:
    """Returns the VMEM bytes that a launch requests at most `limit_mib` of, for blocks and accumulators of `needed`."""
    return np.minimum(limit_bytes(limit_mib), needed + needed // 2 + SPILL_ROOM)


def _least_spill(p: MatmulProblem, s: Columns, target: Target, steps: Any) -> Any:
    """Returns a lower bound of the spill, so that no schedule is dropped that the compiler accepts."""
    large = (s.tile_m >= 512) & (s.tile_n >= 512) & (s.tile_k >= 256) & (steps > 1)
    return np.where(large, LEAST_SPILLS.get(target.architecture, {}).get(p.dtype, 0), 0)


# ------------------------------------------------------------------------------
# The schedule of a matmul on a TPU.


@dataclasses.dataclass(frozen=True)
class TpuSchedule:
    """Maps a matmul to the steps of a grid, which one core runs in sequence.

    Attributes:
      tile_m, tile_n: extents of the output tile; its accumulators stay in VMEM during the loop over k.
      tile_k: extent of k that one step multiplies. If it is all of k, there is one step, which needs no accumulators.
      grid_minor_dim: the axis, "m" or "n", along which consecutive tiles are adjacent. The operand that they share is
        not loaded again if one step takes all of k.
      vmem_limit_mib: the VMEM that the launch requests at most, in MiB; 0 means the compiler's default.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    grid_minor_dim: str
    vmem_limit_mib: int


# ------------------------------------------------------------------------------
# The kernel of a matmul's blocks: factors of one operand, accumulated in VMEM, and finished tile by tile.

# Computes the result's tile from accumulators (in their dtype), a bias ``[1, tile_n]`` or None for each, and a residual
# or None.
Finish = Callable[[Sequence[jax.Array], Sequence[Any], Any], jax.Array]

# Extent of k whose products are summed before they are added to accumulators in VMEM, and extents of the rows and
# columns that are finished at a time. Larger values spill: 1024 x 1024 x 1024 in bfloat16 spills 2.4 MiB (v5e) and 2.8
# MiB (v6e), and 0.4 MiB with these; 1024 x 512 x 2048 in one step 4.8 and 4.4, and 1.1 with these; two factors of 256 x
# 2048 x 512 in one step 2.2 if all columns are finished at a time, and 0.7 with these (v5e). The number of cycles is
# the same.
SUBTILE = 256
SUBTILE_N = 512
ALL = slice(None)


def subtiles(extent: int, size: int = SUBTILE) -> list[slice]:
    return [slice(first, min(first + size, extent)) for first in range(0, extent, size)]


@dataclasses.dataclass(frozen=True)
class Factor:
    """One product of the operand that all factors share.

    Attributes:
      b: ``[batch, k, n]``, or ``[batch, n, k]``; other columns may precede and follow those of this factor.
      bias: ``[batch, 1, n]``, or None.
      first: index of this factor's first tile of columns in `b` and in `bias`.
    """

    b: jax.Array
    bias: jax.Array | None = None
    first: int = 0


def launched(
    p: MatmulProblem,
    s: TpuSchedule,
    a: jax.Array,
    factors: Sequence[Factor],
    residual: jax.Array | None,
    finish: Finish,
    name: str,
    vmem_limit_bytes: int,
) -> jax.Array:
    """Launches the kernel and returns ``[batch, m, n]`` in the dtype of the result of `p`.

    `a`, factors and residual have a batch axis too.

    Args:
      finish: the epilogue, from the accumulators of all factors.
      name: of the kernel, as profilers show it.
      vmem_limit_bytes: the VMEM limit of the launch; 0 means the compiler's default.
    """
    rows, columns, steps = cdiv(p.m, s.tile_m), cdiv(p.n, s.tile_n), cdiv(p.k, s.tile_k)
    added = [*(f.bias for f in factors if f.bias is not None), *([] if residual is None else [residual])]

    def spec(shape: tuple[int, int], block: Callable[[Any, Any, Any], tuple[Any, Any]], turned: bool) -> pl.BlockSpec:
        def index_map(batch: Any, outer: Any, inner: Any, step: Any) -> tuple[Any, ...]:
            row, column = (outer, inner) if s.grid_minor_dim == "n" else (inner, outer)
            first, second = block(row, column, step)
            return (batch, second, first) if turned else (batch, first, second)

        return pl.BlockSpec((None, *(shape[::-1] if turned else shape)), index_map)

    def bias(f: Factor) -> pl.BlockSpec:
        return spec((1, s.tile_n), lambda row, column, step: (0, f.first + column), turned=False)

    def weights(f: Factor) -> pl.BlockSpec:
        return spec((s.tile_k, s.tile_n), lambda row, column, step: (step, f.first + column), p.transpose_b)

    result = spec((s.tile_m, s.tile_n), lambda row, column, step: (row, column), turned=False)
    outer, inner = (rows, columns) if s.grid_minor_dim == "n" else (columns, rows)
    call = pl.pallas_call(
        _body(p, s, [f.bias is not None for f in factors], residual is not None, finish),
        grid=(p.batch, outer, inner, steps),
        in_specs=[
            spec((s.tile_m, s.tile_k), lambda row, column, step: (row, step), p.transpose_a),
            *map(weights, factors),
            *(bias(f) for f in factors if f.bias is not None),
            *([] if residual is None else [result]),
        ],
        out_specs=result,
        out_shape=jax.ShapeDtypeStruct((p.batch, p.m, p.n), p.whole.dtype),
        scratch_shapes=[pltpu.VMEM((s.tile_m, s.tile_n), p.acc_dtype)] * (len(factors) if steps > 1 else 0),
        compiler_params=pltpu.CompilerParams(
            # Devices with two cores split the parallel dimensions.
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=vmem_limit_bytes or None,
        ),
        name=name,
    )
    # Indices are 32 bits wide, regardless of the user's default.
    with jax.enable_x64(False):
        c: jax.Array = call(a, *(f.b for f in factors), *added)
    return c


def _body(p: MatmulProblem, s: TpuSchedule, biased: Sequence[bool], has_residual: bool, finish: Finish) -> Any:
    """Builds the kernel of a step, for factors with or without a bias."""
    factors, steps = len(biased), cdiv(p.k, s.tile_k)
    # Extent of k in the last step; elements beyond the edge are undefined.
    left = p.k - (steps - 1) * s.tile_k
    contract = (((0 if p.transpose_a else 1,), (1 if p.transpose_b else 0,)), ((), ()))
    precision = precision_of(p)

    def body(a_ref: Any, *refs: Any) -> None:
        b_refs, rest = refs[:factors], list(refs[factors:])
        bias_refs = [rest.pop(0) if there else None for there in biased]
        residual_ref = rest.pop(0) if has_residual else None
        out_ref, *acc_refs = rest

        def products(k: slice, rows: slice = ALL, columns: slice = ALL) -> list[jax.Array]:
            """Computes the products of this part of the step's k, and of the tile's rows and columns."""
            a = a_ref[k, rows] if p.transpose_a else a_ref[rows, k]
            bs = [b_ref[columns, k] if p.transpose_b else b_ref[k, columns] for b_ref in b_refs]
            return [
                lax.dot_general(a, b, contract, precision=precision, preferred_element_type=p.acc_dtype) for b in bs
            ]

        def store(accumulated: Callable[[slice, slice], Sequence[jax.Array]]) -> None:
            for rows, columns in itertools.product(subtiles(s.tile_m), subtiles(s.tile_n, SUBTILE_N)):
                biases = [None if ref is None else ref[:, columns] for ref in bias_refs]
                residual = None if residual_ref is None else residual_ref[rows, columns]
                out_ref[rows, columns] = finish(accumulated(rows, columns), biases, residual).astype(out_ref.dtype)

        if steps == 1:
            store(functools.partial(products, ALL))
            return
        step = pl.program_id(3)

        @pl.when(step == 0)
        def _() -> None:
            for acc_ref in acc_refs:
                acc_ref[...] = jnp.zeros_like(acc_ref)

        def accumulate(extent: int) -> None:
            for k in subtiles(extent):
                for acc_ref, product in zip(acc_refs, products(k), strict=True):
                    acc_ref[...] += product

        if left == s.tile_k:
            accumulate(s.tile_k)
        else:
            pl.when(step < steps - 1)(lambda: accumulate(s.tile_k))
            pl.when(step == steps - 1)(lambda: accumulate(left))

        @pl.when(step == steps - 1)
        def _() -> None:
            store(lambda rows, columns: [acc_ref[rows, columns] for acc_ref in acc_refs])

    return body


# From this version on, Mosaic can multiply float32 in three passes of bfloat16, not only in six or one.
HAS_BF16_3X = JAX_VERSION >= (0, 11)


def precision_of(p: MatmulProblem) -> lax.Precision | None:
    """Returns the number of bfloat16 passes for float32 operands, as a precision.

    One pass, Mosaic's default, keeps 8 bits of an operand; the least accurate arithmetic that a problem allows is TF32,
    with 11.
    """
    if p.dtype != "float32":
        return None
    return lax.Precision.HIGH if HAS_BF16_3X and p.precision != "highest" else lax.Precision.HIGHEST


# ------------------------------------------------------------------------------
# The search space of a matmul on a TPU: the schedules worth considering, and the rules that exclude the others.

# Results of one tile, over all factors: the compiler unrolls its code, and takes more than a minute for larger tiles.
MOST_RESULTS = 1024 * 1024
# Multiply-adds of one step, for the same reason.
MOST_PRODUCTS = 2**31
# Divisors of both limits for float32, which takes up to six passes of as much code, and spills the parts of operands
# (2048 x 457 x 512: 7 MiB on a v5e). Tiles of 256 x 128 already keep the MXU as busy as larger ones.
FLOAT32_RESULTS, FLOAT32_PRODUCTS = 2, 8
# A grid is a loop on one core, and a step costs as much as some hundred thousand multiply-adds: smaller tiles never pay
# off for larger problems (v5e, 2048^3: 256^3 takes 3.1 times as long as 512^3).
LEAST_TILE = 256
TILES = (1024, 512, 256, 2048)


def space(p: MatmulProblem, factors: int = 1) -> Space[TpuSchedule]:
    """Returns the schedules, some hundreds at most.

    `factors` is the number of products of one `a` that are multiplied; each has its own tile of `b` and accumulators.
    """

    most_results, most_products = MOST_RESULTS, MOST_PRODUCTS
    if p.dtype == "float32":
        most_results, most_products = MOST_RESULTS // FLOAT32_RESULTS, MOST_PRODUCTS // FLOAT32_PRODUCTS

    def steps(s: Any) -> Any:
        return cdiv(p.k, s.tile_k)

    return Space(
        TpuSchedule,
        choices={
            "tile_m": tile_extents(p.m, TILES),
            "tile_n": tile_extents(p.n, (*TILES, 4096) if p.m <= LEAST_TILE else TILES),
            "tile_k": tile_extents(p.k, (*TILES, 4096)),
            "grid_minor_dim": ("n", "m"),
            "vmem_limit_mib": VMEM_LIMITS_MIB,
        },
        rules={
            f"tiles of over {most_results} results take minutes to compile": lambda s: (
                factors * s.tile_m * s.tile_n <= most_results
            ),
            f"so do steps of over {most_products} products": lambda s: (
                factors * s.tile_m * s.tile_n * s.tile_k <= most_products
            ),
            "where several steps walk k, or all tiles lie in a row, one order is enough": lambda s: (
                (s.grid_minor_dim == "n") | (steps(s) == 1) & (s.tile_m < p.m) & (s.tile_n < p.n)
            ),
        },
    )


def tile_extents(extent: int, sizes: Iterable[int]) -> tuple[int, ...]:
    """Returns tile sizes near `sizes` that divide the extent evenly, in whole lanes.

    The extent itself if it is small.
    """
    if extent <= LEAST_TILE:
        return (extent,)
    even = (extent if size >= extent else round_up(cdiv(extent, cdiv(extent, size)), LANES) for size in sizes)
    return tuple(dict.fromkeys(even))


# ------------------------------------------------------------------------------
# The matmul on TPUs: supported problems, and the launch of one matmul.


class MosaicTpuMatmul(Kernel[MatmulProblem, TpuSchedule]):
    backend = "mosaic_tpu"
    version = 1
    most_elements = INDICES_OF_32_BITS

    def supports(self, problem: MatmulProblem, target: Target) -> str | None:
        p = problem
        return unsupported(target, p.dtype, *filter(None, (p.out_dtype, p.bias, p.residual)))

    def space(self, problem: MatmulProblem, target: Target) -> Space[TpuSchedule]:
        return space(problem)

    def footprint(self, problem: MatmulProblem, schedules: Columns, target: Target) -> Footprint:
        return footprint(problem, schedules, target)

    def run(
        self, problem: MatmulProblem, schedule: TpuSchedule, target: Target, /, *args: Any, **params: Any
    ) -> Arrays:
        p = problem
        a, b, bias, residual = p.named([x.reshape((p.batch, -1, x.shape[-1])) for x in args])

        def finish(accs: Sequence[jax.Array], biases: Sequence[Any], residual: Any) -> jax.Array:
            return epilogue.apply(accs[0], bias=biases[0], activation=p.activation, residual=residual)

        limit = int(vmem_limit(p, Columns.of([schedule]), target)[0])
        c = launched(p, schedule, a, [Factor(b, bias)], residual, finish, name="matmul", vmem_limit_bytes=limit)
        return p.cut(c.reshape(p.whole.shape))


__all__ = ["MosaicTpuMatmul", "TpuSchedule"]
