"""A row-wise formula as a plain ``pallas_call`` on blocks of rows, run by Pallas's interpreter on a CPU."""

from __future__ import annotations

import dataclasses
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from search_spaces.footprint import Footprint, Operand, Phase
from search_spaces.kernel import INDICES_OF_32_BITS, Kernel, Target
from search_spaces.problem import as_tuple, nbytes
from search_spaces.rowwise.problem import RowProblem
from search_spaces.space import Columns, Space

P = TypeVar("P", bound=RowProblem)


@dataclasses.dataclass(frozen=True)
class InterpretedSchedule:
    """Rows per block; a block has whole rows."""

    rows: int


class InterpretedRows(Kernel[P, InterpretedSchedule], Generic[P]):
    """Operands with one row per result row are divided into blocks; other operands are whole in each block."""

    backend = "interpret"
    version = 1
    most_elements = INDICES_OF_32_BITS

    def supports(self, problem: P, target: Target) -> str | None:
        return None if target.platform == "cpu" else f"runs in Pallas's interpreter on a CPU, not on {target.kind}"

    def space(self, problem: P, target: Target) -> Space[InterpretedSchedule]:
        p = problem
        # An interpreted grid step takes about a millisecond, regardless of its work.
        few = [rows for rows in (1, 4, 16, 64, 256, 1024) if rows < p.rows <= 1024 * rows]
        return Space(InterpretedSchedule, choices={"rows": (p.rows, *reversed(few))})

    def footprint(self, problem: P, schedules: Columns, target: Target) -> Footprint:
        p, s = problem, schedules
        blocks = -(-p.rows // s.rows)
        by_rows = [x for x in p.operands() if _in_rows(x)]
        whole = [x for x in p.operands() if not _in_rows(x)]
        row_bytes = sum(x.shape[1] * x.dtype.itemsize for x in by_rows)
        whole_bytes = sum(x.size * x.dtype.itemsize for x in whole)
        result_bytes = sum(map(nbytes, p.results())) // p.rows
        return Footprint(
            arithmetic=p.arithmetic,
            grid=(blocks,),
            step=Phase(
                loads=(
                    Operand(bytes=p.rows / blocks * row_bytes, axes=(0,)),
                    Operand(bytes=np.full(len(s), float(whole_bytes)), axes=()),
                ),
                flops=p.flops / p.rows * s.rows,
            ),
            tile=Phase(bytes_written=p.rows / blocks * result_bytes),
            axes=("rows",),
            onchip_bytes=s.rows * (row_bytes + result_bytes) + whole_bytes,
        )

    def run(self, problem: P, schedule: InterpretedSchedule, target: Target, /, *args: Any, **params: Any) -> Any:
        p, s = problem, schedule

        def body(*refs: Any) -> None:
            operands, outs = refs[: len(args)], refs[len(args) :]
            results = p.compute_in(jnp.float32, *(ref[...] for ref in operands), **params)
            for out, result in zip(outs, as_tuple(results), strict=True):
                out[...] = result.astype(out.dtype)

        def some_rows(x: Any) -> pl.BlockSpec:
            return pl.BlockSpec((s.rows, *x.shape[1:]), lambda i: (i, *(0 for _ in x.shape[1:])))

        def block(x: Any) -> pl.BlockSpec:
            return some_rows(x) if _in_rows(x) else pl.BlockSpec(x.shape, lambda i: (0,) * len(x.shape))

        return pl.pallas_call(
            body,
            grid=(-(-p.rows // s.rows),),
            in_specs=[block(x) for x in p.operands()],
            out_specs=p.pack([some_rows(x) for x in p.results()]),
            out_shape=p.result(),
            interpret=True,
        )(*args)


def _in_rows(operand: jax.ShapeDtypeStruct) -> bool:
    return len(operand.shape) == 2
