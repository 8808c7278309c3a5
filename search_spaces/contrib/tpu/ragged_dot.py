"""Grouped products on TPUs: Mosaic kernels whose grid walks over the tiles of rows of each group.

Before the launch, XLA computes the tile of rows and the group of each visit (`visits`). The index maps of all blocks
read them (scalar prefetch), and the number of visits is an extent of the grid. This is the method of MegaBlocks
(Gale et al., arXiv:2211.15841) on TPUs, as in JAX's `jax.experimental.pallas.ops.tpu.megablox`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from search_spaces.contrib.tpu.matmul import (
    ALL,
    BUFFERS,
    FLOAT32_PRODUCTS,
    FLOAT32_RESULTS,
    MOST_PRODUCTS,
    MOST_RESULTS,
    SUBTILE_N,
    TILES,
    precision_of,
    requested_bytes,
    subtiles,
    tile_extents,
    unsupported,
)
from search_spaces.contrib.tpu.visits import inside, mean_visits, rows_of_visit, visits_of
from search_spaces.contrib.tpu.vmem import VMEM_LIMITS_MIB, window_bytes
from search_spaces.footprint import Footprint, Operand, Phase
from search_spaces.kernel import INDICES_OF_32_BITS, Kernel
from search_spaces.matmul import epilogue
from search_spaces.matmul.epilogue import ACTIVATION_OPERATIONS, EXPONENTIALS
from search_spaces.ragged_dot.problem import (
    FLOATS,
    GatedRaggedDotProblem,
    GroupedProblem,
    RaggedDotProblem,
    RaggedDotWeightsProblem,
    covering,
)
from search_spaces.space import Columns, Space, cdiv
from search_spaces.target import Target

ACCUMULATOR = jnp.float32


@dataclasses.dataclass(frozen=True)
class RaggedTpuSchedule:
    """Maps a grouped product to the steps of a grid, which one core runs in sequence.

    Attributes:
      tile_rows: rows of a tile. A tile with rows of several groups is multiplied once for each of them.
      tile_k: extent of k that one step multiplies. If it is all of k, a group's matrix stays in VMEM for all of its
        tiles of rows. For the gradient of the matrices: first extent of an output tile.
      tile_n: columns of an output tile.
      vmem_limit_mib: the VMEM that the launch requests at most, in MiB; 0 means the compiler's default.
    """

    tile_rows: int
    tile_k: int
    tile_n: int
    vmem_limit_mib: int


# ------------------------------------------------------------------------------
# The kernel of products: factors of one operand, accumulated in VMEM, and stored in the rows of their group.

# Computes the result's tile from the accumulators of all factors; zeros from zeros.
Finish = Callable[[Sequence[jax.Array]], jax.Array]
Forward = RaggedDotProblem | GatedRaggedDotProblem


def _forward(
    p: Forward,
    s: RaggedTpuSchedule,
    lhs: jax.Array,
    factors: Sequence[jax.Array],
    boundaries: jax.Array,
    finish: Finish,
    name: str,
) -> jax.Array:
    """Launches the kernel and returns ``[rows, n]`` in the dtype of the result of `p`.

    Args:
      factors: the matrices of the groups for each of the products of `lhs`.
      finish: the epilogue, from the accumulators of all factors.
      name: of the kernel, as profilers show it.
    """
    vmem_limit_bytes = int(requested_bytes(s.vmem_limit_mib, _forward_vmem_bytes(p, s, len(factors))))
    columns, steps = cdiv(p.n, s.tile_n), cdiv(p.k, s.tile_k)
    # Indices are 32 bits wide, regardless of the user's default.
    with jax.enable_x64(False):
        # Rows of no group are visited too: each visit stores its own rows of a tile, so all rows are stored.
        visits = visits_of(covering(boundaries, p.rows), p.rows, s.tile_rows, least=0)

        def weights(column: Any, visit: Any, step: Any, tile: Any, group: Any, bounds: Any) -> tuple[Any, ...]:
            # Rows of no group multiply nothing, and load the matrix of the group next to them.
            matrix = jnp.clip(group[visit] - 1, 0, p.groups - 1)
            return (matrix, column, step) if p.transpose_rhs else (matrix, step, column)

        matrix = (None, s.tile_n, s.tile_k) if p.transpose_rhs else (None, s.tile_k, s.tile_n)
        call = pl.pallas_call(
            _body(p, s, len(factors), finish),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(visits.prefetched),
                grid=(columns, visits.count, steps),
                in_specs=[
                    pl.BlockSpec(
                        (s.tile_rows, s.tile_k), lambda column, visit, step, tile, group, bounds: (tile[visit], step)
                    ),
                    *[pl.BlockSpec(matrix, weights)] * len(factors),
                ],
                out_specs=pl.BlockSpec(
                    (s.tile_rows, s.tile_n), lambda column, visit, step, tile, group, bounds: (tile[visit], column)
                ),
                scratch_shapes=[pltpu.VMEM((s.tile_rows, s.tile_n), ACCUMULATOR)] * (len(factors) if steps > 1 else 0),
            ),
            out_shape=p.result(),
            compiler_params=pltpu.CompilerParams(
                # Devices with two cores split the parallel dimension. The visits of a tile store into one block.
                dimension_semantics=("parallel", "arbitrary", "arbitrary"),
                vmem_limit_bytes=vmem_limit_bytes or None,
            ),
            name=name,
        )
        out: jax.Array = call(*visits.prefetched, lhs, *factors)
    return out


def _body(p: Forward, s: RaggedTpuSchedule, factors: int, finish: Finish) -> Any:
    """Builds the kernel of a step. Groups 0 and ``groups + 1`` are the rows of no group."""
    steps = cdiv(p.k, s.tile_k)
    # Extent of k in the last step; elements beyond the edge are undefined.
    left = p.k - (steps - 1) * s.tile_k
    contract = (((1,), (1 if p.transpose_rhs else 0,)), ((), ()))
    precision = precision_of(p.product)

    def body(tile_ref: Any, group_ref: Any, bounds_ref: Any, lhs_ref: Any, *refs: Any) -> None:
        rhs_refs, (out_ref, *acc_refs) = refs[:factors], refs[factors:]
        # The interpreter needs all indices of a grid outside of branches.
        visit, step = pl.program_id(1), pl.program_id(2)
        begin, end = rows_of_visit(tile_ref, group_ref, bounds_ref, visit, s.tile_rows)
        multiplies = (group_ref[visit] > 0) & (group_ref[visit] <= p.groups)

        def products(k: slice, rows: slice = ALL, columns: slice = ALL) -> list[jax.Array]:
            """Computes the products of this part of the step's k, and of the tile's rows and columns."""
            lhs = lhs_ref[rows, k]
            matrices = [ref[columns, k] if p.transpose_rhs else ref[k, columns] for ref in rhs_refs]
            return [
                lax.dot_general(lhs, matrix, contract, precision=precision, preferred_element_type=ACCUMULATOR)
                for matrix in matrices
            ]

        def store(result: Callable[[slice, slice], jax.Array]) -> None:
            for rows, columns in itertools.product(subtiles(s.tile_rows), subtiles(s.tile_n, SUBTILE_N)):
                # Other rows of the tile are those of another visit, or not yet written.
                old, new = out_ref[rows, columns].astype(ACCUMULATOR), result(rows, columns)
                mine = inside(rows, new.shape[1], begin, end)
                out_ref[rows, columns] = jnp.where(mine, new, old).astype(out_ref.dtype)

        def zeros(rows: slice, columns: slice) -> jax.Array:
            return jnp.zeros((rows.stop - rows.start, columns.stop - columns.start), ACCUMULATOR)

        if steps == 1:
            pl.when(multiplies)(lambda: store(lambda *part: finish(products(slice(0, s.tile_k), *part))))
            pl.when(jnp.logical_not(multiplies))(lambda: store(zeros))
            return

        @pl.when(step == 0)
        def _() -> None:
            for acc_ref in acc_refs:
                acc_ref[...] = jnp.zeros_like(acc_ref)

        def accumulate(extent: int) -> None:
            for k in subtiles(extent):
                for acc_ref, product in zip(acc_refs, products(k), strict=True):
                    acc_ref[...] += product

        if left == s.tile_k:
            pl.when(multiplies)(lambda: accumulate(s.tile_k))
        else:
            pl.when(multiplies & (step < steps - 1))(lambda: accumulate(s.tile_k))
            pl.when(multiplies & (step == steps - 1))(lambda: accumulate(left))

        @pl.when(step == steps - 1)
        def _() -> None:
            store(lambda *part: finish([acc_ref[part] for acc_ref in acc_refs]))

    return body


# ------------------------------------------------------------------------------
# The kernel of the gradient of the matrices: one output tile for all visits of a group.


def _weights(
    p: RaggedDotWeightsProblem, s: RaggedTpuSchedule, lhs: jax.Array, rhs: jax.Array, boundaries: jax.Array
) -> jax.Array:
    """Launches the kernel and returns ``[groups, k, n]`` in the dtype of the result of `p`."""
    vmem_limit_bytes = int(requested_bytes(s.vmem_limit_mib, _weights_vmem_bytes(p, s)))
    # Indices are 32 bits wide, regardless of the user's default.
    with jax.enable_x64(False):
        visits = visits_of(boundaries, p.rows, s.tile_rows, least=1)
        call = pl.pallas_call(
            _weights_body(p, s),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(visits.prefetched),
                grid=(cdiv(p.k, s.tile_k), cdiv(p.n, s.tile_n), visits.count),
                in_specs=[
                    pl.BlockSpec(
                        (s.tile_rows, s.tile_k), lambda row, column, visit, tile, group, bounds: (tile[visit], row)
                    ),
                    pl.BlockSpec(
                        (s.tile_rows, s.tile_n), lambda row, column, visit, tile, group, bounds: (tile[visit], column)
                    ),
                ],
                out_specs=pl.BlockSpec(
                    (None, s.tile_k, s.tile_n),
                    lambda row, column, visit, tile, group, bounds: (group[visit], row, column),
                ),
                scratch_shapes=[pltpu.VMEM((s.tile_k, s.tile_n), ACCUMULATOR)],
            ),
            out_shape=p.result(),
            compiler_params=pltpu.CompilerParams(
                # Devices with two cores split the parallel dimensions.
                dimension_semantics=("parallel", "parallel", "arbitrary"),
                vmem_limit_bytes=vmem_limit_bytes or None,
            ),
            name="ragged_dot_weights",
        )
        out: jax.Array = call(*visits.prefetched, lhs, rhs)
    return out


def _weights_body(p: RaggedDotWeightsProblem, s: RaggedTpuSchedule) -> Any:
    """Builds the kernel of a step."""
    contract, precision = (((0,), (0,)), ((), ())), precision_of(p.product)

    def body(
        tile_ref: Any, group_ref: Any, bounds_ref: Any, lhs_ref: Any, rhs_ref: Any, out_ref: Any, acc: Any
    ) -> None:
        begin, end = rows_of_visit(tile_ref, group_ref, bounds_ref, pl.program_id(2), s.tile_rows)

        def part(ref: Any, rows: slice, masked: bool) -> jax.Array:
            x = ref[rows, :]
            # Zero times NaN or infinity is NaN, so both operands are masked, in the 32 bits of the mask.
            here = inside(rows, x.shape[1], begin, end)
            return jnp.where(here, x.astype(ACCUMULATOR), 0.0).astype(x.dtype) if masked else x

        def accumulate(masked: bool) -> None:
            for rows in subtiles(s.tile_rows):
                lhs, rhs = (part(ref, rows, masked) for ref in (lhs_ref, rhs_ref))
                acc[...] += lax.dot_general(lhs, rhs, contract, precision=precision, preferred_element_type=ACCUMULATOR)

        # The group begins in the tile of its first visit.
        @pl.when(begin >= 0)
        def _() -> None:
            acc[...] = jnp.zeros_like(acc)

        whole = (begin <= 0) & (end >= s.tile_rows)
        pl.when(whole)(lambda: accumulate(masked=False))
        pl.when(jnp.logical_not(whole) & (begin < end))(lambda: accumulate(masked=True))

        # The group ends in the tile of its last visit.
        @pl.when(end <= s.tile_rows)
        def _() -> None:
            for element in itertools.product(subtiles(s.tile_k), subtiles(s.tile_n, SUBTILE_N)):
                out_ref[element] = acc[element].astype(out_ref.dtype)

    return body


# ------------------------------------------------------------------------------
# Footprints: visits are the mean of the distributions for which schedules are timed.

# Launches of XLA that compute the visits (libtpu 0.0.48).
VISIT_LAUNCHES = 6
# Operations of FP32 lanes on an element that a visit stores: two comparisons of its row, "and", and a selection.
MASK_OPERATIONS = 4


def _windows(*tiles: tuple[Any, Any, Any]) -> Any:
    """Returns the VMEM bytes of the blocks of operands and of the result, each given by its extents and its dtype.

    The compiler does not know the steps of the grid, so each block has all of its buffers.
    """
    return sum(window_bytes(rows, columns, dtype, BUFFERS) for rows, columns, dtype in tiles)


def _forward_vmem_bytes(p: Forward, s: Any, factors: int) -> Any:
    weights = (s.tile_n, s.tile_k, p.dtype) if p.transpose_rhs else (s.tile_k, s.tile_n, p.dtype)
    total = _windows((s.tile_rows, s.tile_k, p.dtype), *[weights] * factors, (s.tile_rows, s.tile_n, p.result().dtype))
    accumulators = factors * window_bytes(s.tile_rows, s.tile_n, ACCUMULATOR)
    return total + np.where(cdiv(p.k, s.tile_k) == 1, 0, accumulators)


def _forward_footprint(p: Forward, s: Columns, factors: Sequence[str]) -> Footprint:
    """Returns the footprint; a block is a visit, and each of the named factors has its weights and accumulators."""
    columns, steps = cdiv(p.n, s.tile_n), cdiv(p.k, s.tile_k)
    bounds = np.stack(p.draws())
    visits = mean_visits(np.pad(bounds, ((0, 0), (1, 1)), constant_values=(0, p.rows)), s.tile_rows, least=0)
    multiplied = mean_visits(bounds, s.tile_rows, least=0) / visits
    itemsize, written = jnp.dtype(p.dtype).itemsize, p.result().dtype.itemsize
    part_n, part_k, results = p.n / columns, p.k / steps, s.tile_rows * s.tile_n
    tiles = cdiv(p.rows, s.tile_rows)
    # Consecutive visits of a tile share its rows in VMEM if a step takes all of k.
    loaded = np.where(steps == 1, np.minimum(tiles / visits, 1), 1) * p.rows / tiles
    exponentials = results * EXPONENTIALS[p.activation if isinstance(p, GatedRaggedDotProblem) else ""]
    needed = _forward_vmem_bytes(p, s, len(factors))
    weights = [Operand(bytes=part_k * part_n * itemsize, axes=(0, 1), name=name) for name in factors]
    return Footprint(
        arithmetic=p.arithmetic,
        grid=(columns, np.full(len(s), p.touched), visits / p.touched),
        step=Phase(
            loads=(Operand(bytes=loaded * part_k * itemsize, axes=(1, 2), name="lhs"), *weights),
            flops=2.0 * len(factors) * multiplied * results * s.tile_k,
        ),
        tile=Phase(
            fp32_ops=(MASK_OPERATIONS + len(factors) - 1) * results + ACTIVATION_OPERATIONS * exponentials,
            mufu_ops=exponentials,
            bytes_written=p.rows / visits * part_n * written,
        ),
        onchip_bytes=needed,
        onchip_limit_bytes=requested_bytes(s.vmem_limit_mib, needed),
        steps=steps,
        minor=2,
        group=visits / p.touched,
        axes=("n", "group", "rows"),
        launches=1 + VISIT_LAUNCHES,
    )


def _weights_vmem_bytes(p: RaggedDotWeightsProblem, s: Any) -> Any:
    windows = _windows(
        (s.tile_rows, s.tile_k, p.dtype),
        (s.tile_rows, s.tile_n, p.dtype),
        (s.tile_k, s.tile_n, p.result().dtype),
    )
    return windows + window_bytes(s.tile_k, s.tile_n, ACCUMULATOR)


# ------------------------------------------------------------------------------
# The search space: the schedules worth considering, and the rules that exclude the others.

# The MXU needs as long to load 128 rows of weights as to multiply them by 128 rows: smaller tiles save nothing.
ROW_TILES = (512, 256, 128, 1024)
# Visits whose tiles and groups take half of SMEM, which has 1 MiB (jax/_src/pallas/mosaic/tpu_info.py). libtpu 0.0.48
# does not check it.
MOST_VISITS = 2**16


def _space(p: GroupedProblem, results: Callable[[Any], Any], factors: int = 1) -> Space[RaggedTpuSchedule]:
    """Returns the schedules; `results` is the number of elements of an output tile."""
    most_results, most_products = MOST_RESULTS, MOST_PRODUCTS
    if p.dtype == "float32":
        most_results, most_products = MOST_RESULTS // FLOAT32_RESULTS, MOST_PRODUCTS // FLOAT32_PRODUCTS
    return Space(
        RaggedTpuSchedule,
        choices={
            "tile_rows": tuple(dict.fromkeys(min(size, p.rows) for size in ROW_TILES)),
            "tile_k": tile_extents(p.k, (*TILES, 4096, 8192)),
            "tile_n": tile_extents(p.n, TILES),
            "vmem_limit_mib": VMEM_LIMITS_MIB,
        },
        rules={
            f"tiles of over {most_results} results take minutes to compile": lambda s: (
                factors * results(s) <= most_results
            ),
            f"so do steps of over {most_products} products": lambda s: (
                factors * s.tile_rows * s.tile_k * s.tile_n <= most_products
            ),
            f"SMEM has room for {MOST_VISITS} visits": lambda s: (
                cdiv(p.rows, s.tile_rows) + p.groups + 1 <= MOST_VISITS
            ),
        },
    )


# ------------------------------------------------------------------------------
# The grouped products on TPUs: supported problems, and the launch of one.


class MosaicTpuRaggedDot(Kernel[RaggedDotProblem, RaggedTpuSchedule]):
    backend = "mosaic_tpu"
    version = 1
    most_elements = INDICES_OF_32_BITS

    def supports(self, problem: RaggedDotProblem, target: Target) -> str | None:
        if problem.dtype not in FLOATS:
            return f"multiplies {', '.join(FLOATS)}, not {problem.dtype}"
        return unsupported(target, problem.dtype, problem.out_dtype or problem.dtype)

    def space(self, problem: RaggedDotProblem, target: Target) -> Space[RaggedTpuSchedule]:
        return _space(problem, lambda s: s.tile_rows * s.tile_n)

    def footprint(self, problem: RaggedDotProblem, schedules: Columns, target: Target) -> Footprint:
        return _forward_footprint(problem, schedules, ("rhs",))

    def run(
        self, problem: RaggedDotProblem, schedule: RaggedTpuSchedule, target: Target, /, *args: Any, **params: Any
    ) -> jax.Array:
        lhs, rhs, boundaries = args
        return _forward(problem, schedule, lhs, [rhs], boundaries, lambda accs: accs[0], name="ragged_dot")


class MosaicTpuGatedRaggedDot(Kernel[GatedRaggedDotProblem, RaggedTpuSchedule]):
    backend = "mosaic_tpu"
    version = 1
    most_elements = INDICES_OF_32_BITS

    def supports(self, problem: GatedRaggedDotProblem, target: Target) -> str | None:
        return unsupported(target, problem.dtype, problem.out_dtype or problem.dtype)

    def space(self, problem: GatedRaggedDotProblem, target: Target) -> Space[RaggedTpuSchedule]:
        return _space(problem, lambda s: s.tile_rows * s.tile_n, factors=2)

    def footprint(self, problem: GatedRaggedDotProblem, schedules: Columns, target: Target) -> Footprint:
        return _forward_footprint(problem, schedules, ("gate", "up"))

    def run(
        self, problem: GatedRaggedDotProblem, schedule: RaggedTpuSchedule, target: Target, /, *args: Any, **params: Any
    ) -> jax.Array:
        lhs, gate, up, boundaries = args

        def finish(accs: Sequence[jax.Array]) -> jax.Array:
            return epilogue.apply(accs[0], activation=problem.activation) * accs[1]

        return _forward(problem, schedule, lhs, [gate, up], boundaries, finish, name="gated_ragged_dot")


class MosaicTpuRaggedDotWeights(Kernel[RaggedDotWeightsProblem, RaggedTpuSchedule]):
    backend = "mosaic_tpu"
    version = 1
    most_elements = INDICES_OF_32_BITS

    def supports(self, problem: RaggedDotWeightsProblem, target: Target) -> str | None:
        return unsupported(target, problem.dtype, problem.out_dtype or problem.dtype)

    def space(self, problem: RaggedDotWeightsProblem, target: Target) -> Space[RaggedTpuSchedule]:
        return _space(problem, lambda s: s.tile_k * s.tile_n)

    def footprint(self, problem: RaggedDotWeightsProblem, schedules: Columns, target: Target) -> Footprint:
        """Returns the footprint; a block is an output tile of a group, and its steps are the visits of the group."""
        p, s = problem, schedules
        rows, columns, tiles = cdiv(p.k, s.tile_k), cdiv(p.n, s.tile_n), cdiv(p.rows, s.tile_rows)
        visits = mean_visits(np.stack(p.draws()), s.tile_rows, least=1)
        itemsize, results = jnp.dtype(p.dtype).itemsize, s.tile_k * s.tile_n
        part_k, part_n = p.k / rows, p.n / columns
        # Consecutive visits of a tile share its rows in VMEM.
        loaded = np.minimum(tiles / visits, 1) * p.rows / tiles
        needed = _weights_vmem_bytes(p, s)
        return Footprint(
            arithmetic=p.arithmetic,
            grid=(rows, columns, np.full(len(s), float(p.groups))),
            step=Phase(
                loads=(
                    Operand(bytes=loaded * part_k * itemsize, axes=(0, 2), name="lhs"),
                    Operand(bytes=loaded * part_n * itemsize, axes=(1, 2), name="rhs"),
                ),
                flops=2.0 * results * s.tile_rows,
            ),
            tile=Phase(bytes_written=part_k * part_n * p.result().dtype.itemsize),
            onchip_bytes=needed,
            onchip_limit_bytes=requested_bytes(s.vmem_limit_mib, needed),
            steps=visits / p.groups,
            minor=2,
            group=p.groups,
            axes=("k", "n", "group"),
            launches=1 + VISIT_LAUNCHES,
        )

    def run(
        self,
        problem: RaggedDotWeightsProblem,
        schedule: RaggedTpuSchedule,
        target: Target,
        /,
        *args: Any,
        **params: Any,
    ) -> jax.Array:
        return _weights(problem, schedule, *args)


__all__ = ["MosaicTpuGatedRaggedDot", "MosaicTpuRaggedDot", "MosaicTpuRaggedDotWeights", "RaggedTpuSchedule"]
