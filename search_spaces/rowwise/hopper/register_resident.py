"""Register-resident rows: a block loads all of its rows into registers, reduces them, and stores their results."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces.jax_compat import plgpu
from search_spaces.rowwise.hopper.thread_layout import ThreadLayout
from search_spaces.rowwise.reduction import Reduction

# Exponentials use the hardware unit. Exchanges between warps use explicit barriers, so stores need no automatic ones.
COMPILER_PARAMS = plgpu.CompilerParams(
    lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True, unsafe_no_auto_barriers=True
)

# Maximum elements of a row per thread: the number of its registers. Where no other residency takes longer rows, a
# search should have no schedules that spill: one with 153 elements does, and norms of sums with 96 take all registers
# (ptxas, sm_80).
MOST_ELEMENTS = 256
MOST_ELEMENTS_BEFORE_HOPPER = 96


@dataclasses.dataclass(frozen=True)
class RegisterResident:
    """The layout of rows over the threads of a block of one warpgroup; fields may be `Columns` of schedules.

    Attributes:
      columns: columns of a row.
      warps: warps that share a row: 1 or 4.
      vector: elements of one access of one thread.
      rows: rows of which each thread has a part.
    """

    columns: int
    warps: Any
    vector: Any
    rows: Any

    @classmethod
    def of(cls, columns: int, s: Any) -> RegisterResident:
        """Returns the layout of a `RowSchedule`, or of `Columns` of them, for rows of `columns` columns."""
        return cls(columns, s.warps, s.vector, s.rows)

    @property
    def layout(self) -> ThreadLayout:
        return ThreadLayout(self.warps, self.vector)

    @property
    def block_rows(self) -> Any:
        return self.layout.rows * self.rows

    @property
    def accesses(self) -> Any:
        """Accesses of a thread to each of its rows."""
        return -(-self.columns // self.layout.columns)

    @property
    def elements(self) -> Any:
        """Elements that a thread has in registers."""
        return self.rows * self.accesses * self.vector


def register_resident(
    reduction: Reduction,
    plan: RegisterResident,
    results: Sequence[jax.ShapeDtypeStruct],
    by_row: Sequence[jax.Array],
    shared: Sequence[jax.Array],
) -> list[jax.Array]:
    """Runs the kernel, which issues all loads of a block before it computes. A row that is a result is stored first.

    Rows may have any number and any length of at least one fragment. The last block starts early enough that its last
    row is the last of the array, as does the last fragment of a row. Overlapping elements are stored twice, with the
    same bits.
    """
    (total_rows, columns), layout, block_rows = results[0].shape, plan.layout, plan.block_rows
    starts = [min(start, columns - layout.columns) for start in range(0, columns, layout.columns)]
    overlap = len(starts) * layout.columns - columns

    def kernel(*refs: Any) -> None:
        rest = iter(refs)
        xs, weights, (out, *row_out) = ([*itertools.islice(rest, len(of))] for of in (by_row, shared, results))
        first = lax.min(lax.axis_index("block") * block_rows, total_rows - block_rows)
        row_of = [first + step * layout.rows for step in range(plan.rows)]
        loaded = [
            [reduction.prologue(*(layout.load_narrow(x, row, at) for x in xs)).astype(jnp.float32) for at in starts]
            for row in row_of
        ]
        others = [layout.load_shared(weights[0], start) for start in starts] if weights else [None] * len(starts)
        for row, fragments in zip(row_of, loaded, strict=True):
            for start, fragment in zip(starts, fragments, strict=True):
                for ref in row_out:
                    layout.store(ref, row, start, fragment)
            masked = fragments
            if overlap:
                new = layout.iota(len(layout.shape) - 1) >= overlap
                masked = [*fragments[:-1], jnp.where(new, fragments[-1], reduction.identity)]
            normed = reduction.whole_row(fragments, masked, others, layout)
            for start, fragment in zip(starts, normed, strict=True):
                layout.store(out, row, start, fragment)

    made = plgpu.kernel(
        kernel,
        out_type=tuple(results),
        grid=(-(-total_rows // block_rows),),
        grid_names=("block",),
        compiler_params=COMPILER_PARAMS,
    )(*by_row, *shared)
    return list(made)
