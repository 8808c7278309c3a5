"""Rows held in registers: a block loads all of its rows, reduces them, and stores what it made of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces.jax_compat import plgpu
from search_spaces.rowwise.reduction import Reduction
from search_spaces.rowwise.team import Team


def registers(reduction: Reduction, team: Team, rows: int, result: jax.ShapeDtypeStruct, *args: jax.Array) -> jax.Array:
    """The kernel: one warpgroup a block, `rows` rows a team, all of whose loads are under way before it computes.

    Rows of any number and length from one piece up: the last block starts so early that its last row is the last one,
    and so does the last piece of a row. What two have both is stored twice, with the same bits.
    """
    (total_rows, columns), each = result.shape, team.rows * rows
    starts = [min(start, columns - team.columns) for start in range(0, columns, team.columns)]
    overlap = len(starts) * team.columns - columns

    def kernel(*refs: Any) -> None:
        x, *rest, out = refs
        first = lax.min(lax.axis_index("block") * each, total_rows - each)
        row_of = [first + step * team.rows for step in range(rows)]
        loaded = [[team.read(x, row, start) for start in starts] for row in row_of]
        shared = [team.read_shared(rest[0], start) for start in starts] if rest else [None] * len(starts)
        for row, pieces in zip(row_of, loaded, strict=True):
            counted = pieces
            if overlap:
                new = team.index(len(team.shape) - 1) >= overlap
                counted = [*pieces[:-1], jnp.where(new, pieces[-1], reduction.outside)]
            results = reduction.whole(pieces, counted, shared, team)
            for start, piece in zip(starts, results, strict=True):
                team.write(out, row, start, piece)

    made: jax.Array = plgpu.kernel(
        kernel,
        out_type=result,
        grid=(-(-total_rows // each),),
        grid_names=("block",),
        compiler_params=COMPILER,
    )(*args)
    return made


# Exponentials by the hardware's unit. What warps tell each other goes through barriers that are written out, so stores
# need none of their own.
COMPILER = plgpu.CompilerParams(
    lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True, unsafe_no_auto_barriers=True
)
