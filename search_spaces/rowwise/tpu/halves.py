"""Rows of two halves on a TPU: elements are independent, so a block is some rows, computed in steps.

If halves start at a register of 128 columns, a step loads the same position of each half and stores the results.
Otherwise the other half is offset by some columns: its elements are loaded from the preceding register on, and shifted.
Results of the second half are then computed in a separate pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from search_spaces.rowwise.halves import HalvesFormula
from search_spaces.rowwise.tpu.row_loop import Place, RowLoop, over_rows
from search_spaces.rowwise.tpu.schedule import HalvesSchedule
from search_spaces.tpu.vmem import LANES, limit_or_none


def rows_of_halves(
    formula: HalvesFormula,
    s: HalvesSchedule,
    columns: int,
    result: jax.ShapeDtypeStruct,
    operands: Sequence[jax.Array],
    name: str,
) -> jax.Array:
    """Returns the only result, given operands of `columns` columns or of two halves of these."""
    rows = result.shape[0]
    compute = _shifted if columns % LANES else _aligned

    def kernel(*refs: Any) -> None:
        *sources, out = refs
        over_rows(s.rows, s.step_rows, lambda at: compute(formula, s.lanes, columns, at, sources, out))

    def whole(x: Any) -> pl.BlockSpec:
        return pl.BlockSpec((s.rows, x.shape[-1]), lambda i: (i, 0))

    made: jax.Array = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(rows, s.rows),),
        in_specs=[whole(x) for x in operands],
        out_specs=whole(result),
        out_shape=result,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=limit_or_none(s.vmem_limit_mib)
        ),
        name=name,
    )(*operands)
    return made


def _aligned(formula: HalvesFormula, lanes: int, columns: int, at: Any, sources: Sequence[Any], out: Any) -> None:
    def step(place: Place) -> None:
        start, width = place
        halves = [
            sources[number][at, pl.ds(start + second * columns, width)].astype(jnp.float32)
            for number, second in formula.read
        ]
        for second, result in zip(formula.written, formula.compute(*halves), strict=True):
            out[at, pl.ds(start + second * columns, width)] = result.astype(out.dtype)

    RowLoop(columns, lanes, 1).apply(step)


def _shifted(formula: HalvesFormula, lanes: int, columns: int, at: Any, sources: Sequence[Any], out: Any) -> None:
    beyond = columns % LANES  # columns in the last register of a half: the offset of the second half
    behind = columns - beyond

    def load(number: int, start: Any, skipped: int, width: int) -> jax.Array:
        loaded = sources[number][at, pl.ds(start, skipped + width)].astype(jnp.float32)
        return loaded[:, skipped:] if skipped else loaded

    def results(start: Any, width: int) -> tuple[jax.Array, ...]:
        """Returns the results from column `start` of a half on, a multiple of 128."""
        read = (
            load(number, behind + start, beyond, width) if second else load(number, start, 0, width)
            for number, second in formula.read
        )
        return formula.compute(*read)

    def first(place: Place) -> None:
        out[at, pl.ds(*place)] = results(*place)[0].astype(out.dtype)

    def second(place: Place) -> None:
        """Computes the rest after the second half's first register: stores are aligned there, and loads shifted."""
        start, width = place
        read = (
            load(number, behind + LANES + start, 0, width) if second else load(number, start, LANES - beyond, width)
            for number, second in formula.read
        )
        out[at, pl.ds(behind + LANES + start, width)] = formula.compute(*read)[1].astype(out.dtype)

    RowLoop(behind, lanes, 1).apply(first)
    seam = results(behind, beyond)[0]
    if len(formula.written) == 2:
        after = min(LANES - beyond, columns)
        seam = jnp.concatenate([seam, results(0, after)[1]], axis=-1)
        if (left := columns - after) > 0:
            RowLoop(left, lanes, 1).apply(second)
    out[at, pl.ds(behind, seam.shape[-1])] = seam.astype(out.dtype)
