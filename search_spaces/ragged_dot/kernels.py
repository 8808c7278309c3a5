"""Grouped products by XLA, and by Pallas's interpreter on a CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from search_spaces.footprint import Footprint, Operand, Phase
from search_spaces.kernel import INDICES_OF_32_BITS, Kernel, Library, LibraryKernel
from search_spaces.matmul import epilogue
from search_spaces.matmul.interpret import masked, tile_extents
from search_spaces.problem import Tolerance
from search_spaces.ragged_dot.problem import (
    GatedRaggedDotProblem,
    GroupedProblem,
    RaggedDotProblem,
    RaggedDotWeightsProblem,
    sizes_of,
)
from search_spaces.space import Columns, Space, cdiv
from search_spaces.target import Target, not_interpreted

# ------------------------------------------------------------------------------
# XLA's grouped products, `jax.lax.ragged_dot_general`: their groups start at row 0.
#
# The first group therefore takes the rows before it, too, and a mask removes their results. Rolling the rows instead
# would copy an operand and the result. XLA may multiply all rows by all matrices, with zeros in place of the rows of
# other groups: NaN or infinity in a matrix then reaches rows of other groups, as it does with `jax.lax.ragged_dot`.


def of_a_group(boundaries: jax.Array, rows: int) -> jax.Array:
    """Returns which rows belong to a group, ``bool[rows, 1]``."""
    row = lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
    return (row >= boundaries[0]) & (row < boundaries[-1])


def numbers(contracted: tuple[int, int], group_axes: tuple[int, ...]) -> lax.RaggedDotDimensionNumbers:
    """Returns the dimension numbers of a product without batch in which axis 0 of `lhs` has the groups."""
    (lhs, rhs) = contracted
    return lax.RaggedDotDimensionNumbers((((lhs,), (rhs,)), ((), ())), (0,), group_axes)


def ragged_dot(lhs: jax.Array, rhs: jax.Array, boundaries: jax.Array, transpose_rhs: bool, out: Any) -> jax.Array:
    """Computes `RaggedDotProblem` by XLA; `out` is the dtype of the result."""
    product = _general(lhs, rhs, boundaries, numbers((1, 2 if transpose_rhs else 1), (0,)), out)
    return jnp.where(of_a_group(boundaries, lhs.shape[0]), product, jnp.zeros_like(product))


def _general(lhs: jax.Array, rhs: jax.Array, boundaries: jax.Array, dimensions: Any, out: Any) -> jax.Array:
    # Sums of integers are integers, for any dtype of the result.
    summed = jnp.dtype(jnp.int32 if lhs.dtype == jnp.int8 else out)
    return lax.ragged_dot_general(
        lhs,
        rhs,
        sizes_of(boundaries),
        dimensions,
        precision=lax.Precision.DEFAULT,
        preferred_element_type=summed,
    ).astype(out)


class XlaRaggedDot(LibraryKernel[RaggedDotProblem]):
    version = 1

    def run(
        self, problem: RaggedDotProblem, schedule: Library, target: Target, /, *args: Any, **params: Any
    ) -> jax.Array:
        lhs, rhs, boundaries = args
        return ragged_dot(lhs, rhs, boundaries, problem.transpose_rhs, problem.result().dtype)


class XlaGatedRaggedDot(LibraryKernel[GatedRaggedDotProblem]):
    """Two grouped products with an epilogue in float32, or as users write it, rounded at each step."""

    version = 1

    def programs(self, problem: GatedRaggedDotProblem) -> tuple[str, ...]:
        return (Library.program, "plain")

    def tolerance(self, problem: GatedRaggedDotProblem, schedule: Library) -> Tolerance:
        """Widens the tolerance for the program that users write, as `XlaGatedMatmul` does."""
        exact = problem.tolerance()
        if schedule.program != "plain":
            return exact
        return Tolerance(absolute=exact.absolute + 36 * exact.relative, relative=8 * exact.relative)

    def run(
        self, problem: GatedRaggedDotProblem, schedule: Library, target: Target, /, *args: Any, **params: Any
    ) -> jax.Array:
        p, (lhs, *factors, boundaries), plain = problem, args, schedule.program == "plain"
        out = p.result().dtype
        gate, up = (ragged_dot(lhs, x, boundaries, p.transpose_rhs, out if plain else jnp.float32) for x in factors)
        active = getattr(jax.nn, p.activation)(gate) if plain else epilogue.apply(gate, activation=p.activation)
        return (active * up).astype(out)


class XlaRaggedDotWeights(LibraryKernel[RaggedDotWeightsProblem]):
    version = 1

    def run(
        self, problem: RaggedDotWeightsProblem, schedule: Library, target: Target, /, *args: Any, **params: Any
    ) -> jax.Array:
        *operands, boundaries = args
        inside = of_a_group(boundaries, problem.rows)
        lhs, rhs = (jnp.where(inside, x, jnp.zeros_like(x)) for x in operands)
        return _general(lhs, rhs, boundaries, numbers((0, 0), ()), problem.result().dtype)


# ------------------------------------------------------------------------------
# Tiled grouped products in plain ``pallas_call``: the teaching kernels, run by the interpreter on a CPU.


@dataclasses.dataclass(frozen=True)
class InterpretRaggedSchedule:
    """Extents of tiles along rows, n and k."""

    tile_m: int
    tile_n: int
    tile_k: int


def _space(p: GroupedProblem, steps: Any) -> Space[InterpretRaggedSchedule]:
    """Returns the schedules; ``steps(tile_m, tile_n, tile_k)`` is the number of grid steps."""
    largest = steps(512, 512, 512)
    return Space(
        InterpretRaggedSchedule,
        choices={"tile_m": tile_extents(p.rows), "tile_n": tile_extents(p.n), "tile_k": tile_extents(p.k)},
        rules={
            # An interpreted grid step costs about a millisecond whatever it computes.
            "at most 4096 grid steps": lambda s: steps(s.tile_m, s.tile_n, s.tile_k) <= max(4096, largest),
        },
    )


class _InterpretRows(Kernel[Any, InterpretRaggedSchedule]):
    """A tile of the result adds the products of its rows with the matrix of each group that has rows in it.

    A row of another group adds zero in place of such a product, which may be NaN.
    """

    backend = "interpret"
    version = 1
    most_elements = INDICES_OF_32_BITS
    factors = 1

    def supports(self, problem: Any, target: Target) -> str | None:
        return not_interpreted(target)

    def space(self, problem: Any, target: Target) -> Space[InterpretRaggedSchedule]:
        p = problem
        return _space(p, lambda m, n, k: cdiv(p.rows, m) * cdiv(p.n, n) * cdiv(p.k, k))

    def footprint(self, problem: Any, schedules: Columns, target: Target) -> Footprint:
        p, s = problem, schedules
        itemsize, out = jnp.dtype(p.dtype).itemsize, p.result().dtype.itemsize
        rows, columns, steps = cdiv(p.rows, s.tile_m), cdiv(p.n, s.tile_n), cdiv(p.k, s.tile_k)
        matrices = self.factors * p.groups * (p.k / steps) * (p.n / columns) * itemsize
        result = s.tile_m * s.tile_n
        # On average, a tile has rows of one group, and of one more for each boundary within it.
        products = self.factors * (1 + (p.groups - 1) / rows)
        return Footprint(
            arithmetic=p.arithmetic,
            grid=(rows, columns),
            step=Phase(
                loads=(
                    Operand(bytes=(p.rows / rows) * (p.k / steps) * itemsize, axes=(0,), name="lhs"),
                    Operand(bytes=matrices, axes=(1,), name="rhs"),
                ),
                flops=2.0 * result * s.tile_k * products,
            ),
            tile=Phase(
                mufu_ops=result * epilogue.EXPONENTIALS[p.activation] if self.factors == 2 else 0,
                bytes_written=(p.rows / rows) * (p.n / columns) * out,
            ),
            onchip_bytes=(s.tile_m + self.factors * p.groups * s.tile_n) * s.tile_k * itemsize
            + result * (4 * self.factors + out),
            steps=steps,
            minor=1,
            group=columns,
            axes=("rows", "n"),
        )

    def _finished(self, problem: Any, accs: Sequence[jax.Array]) -> jax.Array:
        (acc,) = accs
        return acc

    def run(
        self, problem: Any, schedule: InterpretRaggedSchedule, target: Target, /, *args: Any, **params: Any
    ) -> jax.Array:
        p, s = problem, schedule
        lhs, *factors, boundaries = args
        grid = cdiv(p.rows, s.tile_m), cdiv(p.n, s.tile_n), cdiv(p.k, s.tile_k)
        k_axis = 1 if p.transpose_rhs else 0

        def body(bounds_ref: Any, lhs_ref: Any, *refs: Any) -> None:
            rhs_refs, out_ref, acc_refs = refs[: len(factors)], refs[len(factors)], refs[len(factors) + 1 :]
            step, first_row = pl.program_id(2), pl.program_id(0) * s.tile_m
            # Elements beyond the edge of k are undefined, not zero, and 0 * NaN is NaN: mask both operands.
            left = p.k - step * s.tile_k
            tile = masked(lhs_ref[...], axis=1, extent=left)
            row = first_row + lax.broadcasted_iota(jnp.int32, (s.tile_m, 1), 0)
            bounds = bounds_ref[...]
            first_group = jnp.sum(bounds[1:] <= first_row, dtype=jnp.int32)
            end_group = jnp.sum(bounds[:-1] < first_row + s.tile_m, dtype=jnp.int32)

            @pl.when(step == 0)
            def _() -> None:
                for acc_ref in acc_refs:
                    acc_ref[...] = jnp.zeros_like(acc_ref)

            def add(group: jax.Array, accs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                inside = (row >= bounds_ref[group]) & (row < bounds_ref[group + 1])
                products = (
                    _product(tile, masked(rhs_ref[group], axis=k_axis, extent=left), (1, k_axis))
                    for rhs_ref in rhs_refs
                )
                return tuple(acc + jnp.where(inside, x, 0.0) for acc, x in zip(accs, products, strict=True))

            accs = lax.fori_loop(first_group, end_group, add, tuple(acc_ref[...] for acc_ref in acc_refs))
            for acc_ref, acc in zip(acc_refs, accs, strict=True):
                acc_ref[...] = acc

            @pl.when(step == grid[2] - 1)
            def _() -> None:
                out_ref[...] = self._finished(p, accs).astype(out_ref.dtype)

        if p.transpose_rhs:
            matrices = pl.BlockSpec((p.groups, s.tile_n, s.tile_k), lambda row, column, step: (0, column, step))
        else:
            matrices = pl.BlockSpec((p.groups, s.tile_k, s.tile_n), lambda row, column, step: (0, step, column))
        out: jax.Array = pl.pallas_call(
            body,
            grid=grid,
            in_specs=[
                pl.BlockSpec((p.groups + 1,), lambda row, column, step: (0,)),
                pl.BlockSpec((s.tile_m, s.tile_k), lambda row, column, step: (row, step)),
                *[matrices] * len(factors),
            ],
            out_specs=pl.BlockSpec((s.tile_m, s.tile_n), lambda row, column, step: (row, column)),
            out_shape=p.result(),
            scratch_shapes=[pl.MemorySpace.ANY((s.tile_m, s.tile_n), jnp.float32)] * len(factors),
            interpret=True,
        )(boundaries, lhs, *factors)
        return out


def _product(lhs: jax.Array, rhs: jax.Array, contracted: tuple[int, int]) -> jax.Array:
    (lhs_axis, rhs_axis) = contracted
    dimensions = (((lhs_axis,), (rhs_axis,)), ((), ()))
    precision = lax.Precision.DEFAULT
    return lax.dot_general(lhs, rhs, dimensions, precision=precision, preferred_element_type=jnp.float32)


class InterpretRaggedDot(_InterpretRows):
    pass


class InterpretGatedRaggedDot(_InterpretRows):
    factors = 2

    def _finished(self, problem: GatedRaggedDotProblem, accs: Sequence[jax.Array]) -> jax.Array:
        gate, up = accs
        return epilogue.apply(gate, activation=problem.activation) * up


class InterpretRaggedDotWeights(Kernel[RaggedDotWeightsProblem, InterpretRaggedSchedule]):
    """A tile of a group's matrix adds the products of blocks of the group's rows, in which other rows are zeros."""

    backend = "interpret"
    version = 1
    most_elements = INDICES_OF_32_BITS

    def supports(self, problem: RaggedDotWeightsProblem, target: Target) -> str | None:
        return not_interpreted(target)

    def space(self, problem: RaggedDotWeightsProblem, target: Target) -> Space[InterpretRaggedSchedule]:
        p = problem
        return _space(p, lambda m, n, k: p.groups * cdiv(p.k, k) * cdiv(p.n, n))

    def footprint(self, problem: RaggedDotWeightsProblem, schedules: Columns, target: Target) -> Footprint:
        p, s = problem, schedules
        itemsize, out = jnp.dtype(p.dtype).itemsize, p.result().dtype.itemsize
        heights, columns = cdiv(p.k, s.tile_k), cdiv(p.n, s.tile_n)
        # On average, half a block of each group has rows of other groups.
        steps = np.ceil(p.rows / p.groups / s.tile_m + 0.5)
        rows = p.rows / p.groups / steps
        return Footprint(
            arithmetic=p.arithmetic,
            grid=(np.full(len(s), p.groups), heights, columns),
            step=Phase(
                loads=(
                    Operand(bytes=rows * (p.k / heights) * itemsize, axes=(0, 1), name="lhs"),
                    Operand(bytes=rows * (p.n / columns) * itemsize, axes=(0, 2), name="rhs"),
                ),
                flops=2.0 * s.tile_m * s.tile_k * s.tile_n,
            ),
            tile=Phase(bytes_written=(p.k / heights) * (p.n / columns) * out),
            onchip_bytes=s.tile_m * (s.tile_k + s.tile_n) * itemsize + s.tile_k * s.tile_n * (4 + out),
            steps=steps,
            minor=2,
            group=columns,
            axes=("groups", "k", "n"),
        )

    def run(
        self,
        problem: RaggedDotWeightsProblem,
        schedule: InterpretRaggedSchedule,
        target: Target,
        /,
        *args: Any,
        **params: Any,
    ) -> jax.Array:
        p, s = problem, schedule
        lhs, rhs, boundaries = args

        def body(bounds_ref: Any, lhs_ref: Any, rhs_ref: Any, out_ref: Any) -> None:
            group = pl.program_id(0)
            start, end = bounds_ref[group], bounds_ref[group + 1]

            def add(block: jax.Array, acc: jax.Array) -> jax.Array:
                first = start + block * s.tile_m
                at = jnp.minimum(first, p.rows - s.tile_m)  # the last block of an array reads earlier rows again
                row = at + lax.broadcasted_iota(jnp.int32, (s.tile_m, 1), 0)
                inside = (row >= first) & (row < end)
                parts = [ref[pl.ds(at, s.tile_m), :] for ref in (lhs_ref, rhs_ref)]
                lhs, rhs = (jnp.where(inside, x, jnp.zeros_like(x)) for x in parts)
                return acc + _product(lhs, rhs, (0, 0))

            acc = jnp.zeros((s.tile_k, s.tile_n), jnp.float32)
            out_ref[...] = lax.fori_loop(0, cdiv(end - start, s.tile_m), add, acc).astype(out_ref.dtype)

        out: jax.Array = pl.pallas_call(
            body,
            grid=(p.groups, cdiv(p.k, s.tile_k), cdiv(p.n, s.tile_n)),
            in_specs=[
                pl.BlockSpec((p.groups + 1,), lambda group, height, column: (0,)),
                pl.BlockSpec((p.rows, s.tile_k), lambda group, height, column: (0, height)),
                pl.BlockSpec((p.rows, s.tile_n), lambda group, height, column: (0, column)),
            ],
            out_specs=pl.BlockSpec((None, s.tile_k, s.tile_n), lambda group, height, column: (group, height, column)),
            out_shape=p.result(),
            interpret=True,
        )(boundaries, lhs, rhs)
        return out
