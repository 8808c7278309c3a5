"""The kernel of a matmul's blocks: factors of one operand, accumulated in VMEM, and finished tile by tile."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from search_spaces.jax_compat import HAS_TPU_BF16_3X
from search_spaces.matmul.problem import MatmulProblem
from search_spaces.matmul.tpu.schedule import TpuSchedule
from search_spaces.space import cdiv

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
    precision = _precision(p)

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


def _precision(p: MatmulProblem) -> lax.Precision | None:
    """Returns the number of bfloat16 passes for float32 operands, as a precision.

    One pass, Mosaic's default, keeps 8 bits of an operand; the least accurate arithmetic that a problem allows is TF32,
    with 11.
    """
    if p.dtype != "float32":
        return None
    return lax.Precision.HIGH if HAS_TPU_BF16_3X and p.precision != "highest" else lax.Precision.HIGHEST
