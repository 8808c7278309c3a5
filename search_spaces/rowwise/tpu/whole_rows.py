"""Blocks of whole rows: each row is reduced and computed in the pipeline's window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from search_spaces.rowwise.reduction import Reduction
from search_spaces.rowwise.tpu.row_loop import Place, RowLoop, over_rows
from search_spaces.rowwise.tpu.schedule import RowSchedule
from search_spaces.tpu.vmem import limit_or_none


def whole_rows(
    reduction: Reduction,
    s: RowSchedule,
    results: Sequence[jax.ShapeDtypeStruct],
    by_row: Sequence[jax.Array],
    shared: Sequence[jax.Array],
    name: str,
) -> Sequence[jax.Array]:
    """Returns all results, given row operands and ``float32[1, columns]`` operands that all rows share."""
    rows, columns = by_row[0].shape
    loop = RowLoop(columns, s.lanes, s.fragments)

    def kernel(*refs: Any) -> None:
        operands, weights = refs[: len(by_row)], refs[len(by_row) : -len(results)]
        out, *row = refs[-len(results) :]
        reduced = row[0] if row else operands[0]

        def step(at: Any) -> None:
            def first(place: Place) -> jax.Array:
                there = (at, pl.ds(*place))
                fragment = reduction.prologue(*(ref[there] for ref in operands))
                if row:
                    reduced[there] = fragment
                return fragment.astype(jnp.float32)

            final = reduction.finalize(loop.statistics(reduction, s.step_rows, first))

            def second(place: Place) -> None:
                there = (at, pl.ds(*place))
                weight = weights[0][:, pl.ds(*place)] if weights else None
                out[there] = reduction.apply(reduced[there].astype(jnp.float32), weight, final).astype(out.dtype)

            loop.apply(second)

        over_rows(s.rows, s.step_rows, step)

    block = pl.BlockSpec((s.rows, columns), lambda i: (i, 0))
    call = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(rows, s.rows),),
        in_specs=[*(block for _ in by_row), *(pl.BlockSpec((1, columns), lambda i: (0, 0)) for _ in shared)],
        out_specs=[block for _ in results],
        out_shape=list(results),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=limit_or_none(s.vmem_limit_mib)
        ),
        name=name,
    )
    made: Sequence[jax.Array] = call(*by_row, *shared)
    return made
