"""Grouped products on Hopper: the matmul kernel with tiles that follow the boundaries of groups.

**Rows times the matrix of their group.** The tiles of a group start at its first row. TMA loads the untiled layout from
any row (smem_layout.py), so no tile is shared by two groups, and there are at most ``cdiv(rows, tile) + groups - 1``
rows of tiles. The last tile of a group also multiplies rows of the next group; threads store its own rows only. The
matrices are one array with a batch axis, indexed by the group.

**The gradient of the matrices.** Each group has the same tiles, and k runs over its rows. In its last step the
consumers set the rows of the next group to zero in shared memory, in both operands: zero times infinity would be NaN.
The groups with most rows come first, so that the last wave has short tiles. An empty group takes one step of zeros.

XLA computes the first row, the end and the group of each row of tiles before the launch, once, and CTAs read them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from search_spaces.footprint import Footprint
from search_spaces.gated_matmul.hopper import of_two_factors
from search_spaces.hopper import TMA_GMEM_ALIGNMENT, not_hopper
from search_spaces.jax_compat import HAS_UNTILED_SWIZZLE
from search_spaces.kernel import INDICES_OF_32_BITS, Kernel
from search_spaces.matmul.hopper.footprint import footprint as of_product
from search_spaces.matmul.hopper.kernel import launched
from search_spaces.matmul.hopper.schedule import Gate, HopperSchedule, Tiling
from search_spaces.matmul.hopper.space import SWAP_AB_RULE
from search_spaces.matmul.hopper.space import space as of_matmul
from search_spaces.matmul.hopper.tile_scheduler import TileScheduler, WorkTile
from search_spaces.matmul.problem import MatmulProblem
from search_spaces.matmul.tiles import planar_snake
from search_spaces.ragged_dot.problem import (
    GatedRaggedDotProblem,
    GroupedProblem,
    RaggedDotProblem,
    RaggedDotWeightsProblem,
    covering,
)
from search_spaces.space import Column, Columns, Space, cdiv
from search_spaces.target import Target

# ------------------------------------------------------------------------------
# Grouped products as matmuls of the kernel.


@dataclasses.dataclass(frozen=True)
class GroupedRows(MatmulProblem):
    """The matmul with one matrix in `b` for each group of rows."""

    starts_at_any_row: ClassVar[bool] = True

    @property
    def batched(self) -> tuple[bool, bool]:
        return False, True


@dataclasses.dataclass(frozen=True)
class GroupedK(MatmulProblem):
    """The matmul with one result for each group of elements of k; `batch` is the number of groups."""

    starts_at_any_row: ClassVar[bool] = True

    @property
    def batched(self) -> tuple[bool, bool]:
        return False, False


# ------------------------------------------------------------------------------
# The tiles of groups of rows.


def row_tiles(boundaries: jax.Array, rows: int, tile: int) -> jax.Array:
    """Returns two counts, and then the group, the first row and the end of each row of tiles, in launch order.

    The first count is that of the rows of tiles in groups. The second count is that of the rows of tiles in no group,
    which follow. The array ``[2 + 3 * most_row_tiles(...)]`` has room for any boundaries.
    """
    groups = boundaries.shape[0] - 1
    # Rows before the first boundary and after the last one form two more groups, at the end.
    edges = covering(boundaries, rows)
    order = np.array([*range(1, groups + 1), 0, groups + 1])
    first, end = edges[order], edges[order + 1]
    counts = (end - first + tile - 1) // tile
    ends = jnp.cumsum(counts)
    number = jnp.arange(most_row_tiles(rows, groups, tile), dtype=jnp.int32)
    group = jnp.minimum(jnp.sum(number[:, None] >= ends, axis=1, dtype=jnp.int32), groups + 1)
    first_row = first[group] + (number - (ends - counts)[group]) * tile
    tiles_in_groups = ends[groups - 1]
    parts = [
        jnp.stack([tiles_in_groups, ends[-1] - tiles_in_groups]),
        jnp.minimum(group, groups - 1),
        first_row,
        end[group],
    ]
    return jnp.concatenate(parts).astype(jnp.int32)


def most_row_tiles(rows: int, groups: int, tile: int) -> int:
    """Returns the largest number of rows of tiles for any boundaries of groups, including rows of no group."""
    # Each of these groups but one ends with a part of a tile.
    return int(min(cdiv(rows, tile) + groups + 1, rows))


@dataclasses.dataclass(frozen=True)
class RowScheduler(TileScheduler):
    """The work tiles of one CTA of a launch over groups of rows.

    Attributes:
      rows: in device memory: the result of `row_tiles` for the rows of a cluster.
    """

    rows: Any

    @property
    def _along(self) -> str:
        """The axis of groups, as wgmma sees it."""
        return "n" if self.plan.s.swap_ab else "m"

    @property
    def _others(self) -> int:
        """Number of clusters along the other axis."""
        return int(self.plan.t.grid_m if self.plan.s.swap_ab else self.plan.t.grid_n)

    @property
    def count(self) -> Any:
        return self._own(self.rows[0])

    def _own(self, row_tiles: Any) -> Any:
        """Returns how many tiles of `row_tiles` rows of tiles this CTA's cluster computes."""
        return lax.div(row_tiles * self._others - 1 - self.cluster + self.clusters, self.clusters)

    def work_tile(self, number: Any, start: Any) -> WorkTile:
        return self._tile(number, start, self.rows[0], 0)

    def zero_tiles(self, store: Callable[[WorkTile], None]) -> None:
        own, before = self._own(self.rows[1]), self.rows[0]
        lax.fori_loop(0, own, lambda number, _: store(self._tile(number, 0, self.rows[1], before)), None)

    def _tile(self, number: Any, start: Any, row_tiles: Any, before: Any) -> WorkTile:
        """Returns a tile of `row_tiles` rows of tiles, which follow `before` others."""
        s, along = self.plan.s, self._along
        grid = (self._others, row_tiles) if s.swap_ab else (row_tiles, self._others)
        tile = self.cluster + number * self.clusters
        _, *place = planar_snake(tile, grid, s.grid_minor_dim, s.grid_tile_width)
        other, row_tile = place if s.swap_ab else place[::-1]
        most = (self.rows.shape[0] - 2) // 3
        group, first, end = (self.rows[2 + most * which + before + row_tile] for which in range(3))
        tile_along, tile_other = (s.tile_n, s.tile_m) if s.swap_ab else (s.tile_m, s.tile_n)
        if s.cluster == along:
            first += self.rank * tile_along
        elif s.cluster != "none":
            other = 2 * other + self.rank
        corner = (other * tile_other, first) if s.swap_ab else (first, other * tile_other)
        return WorkTile(number, 0, group, *corner, 0, self.plan.t.steps, start, end_row=end)


# ------------------------------------------------------------------------------
# The tiles of groups of elements of k.


def k_ranges(boundaries: jax.Array) -> jax.Array:
    """Returns the groups by size, the largest first, and the first element and the end of each: ``[3 * groups]``."""
    first, end = boundaries[:-1], boundaries[1:]
    order = jnp.argsort(first - end).astype(jnp.int32)
    return jnp.concatenate([order, first[order], end[order]])


def least_steps(s: Any) -> Any:
    """Returns the steps that a main loop takes even if a group has fewer: some are issued before the loop."""
    return 1 + s.delay_release + (s.consumers == "ordered_ping_pong")


@dataclasses.dataclass(frozen=True)
class KScheduler(TileScheduler):
    """The work tiles of one CTA of a launch over groups of elements of k.

    Attributes:
      ranges: in device memory: the result of `k_ranges`.
    """

    ranges: Any

    def _range(self, number: Any) -> tuple[Any, Any, Any]:
        """Returns the group of a work tile, by number, and the first element and the end of the group."""
        t, groups = self.plan.t, self.plan.p.batch
        place = lax.min(lax.div(self.cluster + number * self.clusters, int(t.grid_m * t.grid_n)), groups - 1)
        return tuple(self.ranges[which * groups + place] for which in range(3))

    def steps_before(self, number: Any, first: Any = 0, before: Any = 0) -> Any:
        def add(number: Any, steps: Any) -> Any:
            _, start, end = self._range(number)
            return steps + self._steps(start, end)

        return lax.fori_loop(first, number, add, jnp.int32(before))

    def _steps(self, first: Any, end: Any) -> Any:
        tile = self.plan.s.tile_k
        return lax.max(lax.div(end - first + tile - 1, tile), int(least_steps(self.plan.s)))

    def work_tile(self, number: Any, start: Any) -> WorkTile:
        group, first, end = self._range(number)
        tile = self.cluster + number * self.clusters
        work = self._of_tile(tile, number, 0, self._steps(first, end), start)
        return dataclasses.replace(work, product=group, batch=group, first_k=first, end_k=end)


# ------------------------------------------------------------------------------
# Spaces and footprints: those of a matmul with groups of typical size, and the tiles of the groups' distributions.

# Rows of a group up to which the matrices fill the rows of wgmma, and tiles have few rows.
FEW_ROWS = 64
SHORT_TILES = (8, 16, 32, 64)


def rows_space(p: RaggedDotProblem | GatedRaggedDotProblem, cores: int, factors: int = 1) -> Space[HopperSchedule]:
    """Returns the schedules for groups of rows: those of a batch of matmuls of the mean size, without splits of k."""
    typical = cdiv(p.rows, p.groups)
    base = of_matmul(dataclasses.replace(_of_rows(p), m=typical, batch=p.groups), cores, factors)
    rules = dict(base.rules)
    choices = _without_splits(base)
    if typical <= FEW_ROWS:
        choices |= {"swap_ab": (True, False), "tile_m": (*SHORT_TILES, 128), "stages": (4, 3, 5, 6, 2, 8, 12)}
        del rules[SWAP_AB_RULE]
        rules["with swap_ab a tile has 8, 16, 32 or 64 rows, else 64 or more"] = lambda s: np.where(
            s.swap_ab, s.tile_m <= FEW_ROWS, s.tile_m >= FEW_ROWS
        )
    return Space(HopperSchedule, choices=choices, rules=rules)


def weights_space(p: RaggedDotWeightsProblem, cores: int) -> Space[HopperSchedule]:
    """Returns the schedules for groups of elements of k: those of a batch of matmuls of the mean size."""
    base = of_matmul(dataclasses.replace(of_weights(p), k=cdiv(p.rows, p.groups)), cores)
    return Space(HopperSchedule, choices=_without_splits(base), rules=base.rules)


def _without_splits(base: Space[HopperSchedule]) -> dict[str, Any]:
    clusters = tuple(each for each in base.choices["cluster"] if each != "split_k")
    return dict(base.choices) | {"split_k": (1,), "tail_split_k": (1,), "cluster": clusters}


def rows_footprint(p: RaggedDotProblem | GatedRaggedDotProblem, s: Columns) -> Footprint:
    """Returns the footprint: each group loads its matrix once for each of its rows of tiles.

    The number of rows of tiles is the mean over the distributions of the problem.
    """
    product = _of_rows(p)
    one, t = of_product(product, s), Tiling(product, s)
    if isinstance(p, GatedRaggedDotProblem):
        one = of_two_factors(one, s, t, jnp.dtype(p.dtype).itemsize)
    sizes = [np.diff(each) for each in p.draws()]
    unit = s.tile_m * t.cluster_m
    row_tiles = np.mean([cdiv(each[:, None], unit).sum(0) for each in sizes], axis=0) * t.cluster_m
    share = t.grid_m * t.cluster_m / row_tiles
    a, *weights = one.step.loads
    a = dataclasses.replace(a, bytes=a.bytes * share)
    return dataclasses.replace(
        one,
        grid=(p.touched, row_tiles / p.touched, t.grid_n * t.cluster_n),
        step=dataclasses.replace(one.step, loads=(a, *weights)),
        tile=dataclasses.replace(one.tile, bytes_written=one.tile.bytes_written * share),
    )


def weights_footprint(p: RaggedDotWeightsProblem, s: Columns) -> Footprint:
    """Returns the footprint; the steps of a tile are the mean over groups and the distributions of the problem."""
    product = dataclasses.replace(of_weights(p), k=cdiv(p.rows, p.groups))
    one, t = of_product(product, s), Tiling(product, s)
    least = least_steps(s)
    sizes = np.concatenate([np.diff(each) for each in p.draws()])
    steps = np.maximum(cdiv(sizes[:, None], s.tile_k), least).mean(0)
    share = p.rows / (p.groups * steps) / (product.k / t.steps)
    loads = tuple(dataclasses.replace(load, bytes=load.bytes * share) for load in one.step.loads)
    return dataclasses.replace(one, steps=steps, step=dataclasses.replace(one.step, loads=loads))


# ------------------------------------------------------------------------------
# The kernels.


def _of_rows(p: RaggedDotProblem | GatedRaggedDotProblem) -> GroupedRows:
    activation = getattr(p, "activation", "")
    return GroupedRows(
        p.rows, p.n, p.k, p.dtype, out_dtype=p.out_dtype, transpose_b=p.transpose_rhs, activation=activation
    )


def _unsupported(p: GroupedProblem, target: Target) -> str | None:
    if reason := not_hopper(target):
        return reason
    if p.dtype == "float32":
        return "multiplies operands of 16 or 8 bits, not float32"
    aligned = TMA_GMEM_ALIGNMENT // jnp.dtype(p.dtype).itemsize
    if p.k % aligned or p.n % aligned:
        return f"needs k and n that are multiples of {aligned}, as TMA loads rows at multiples of 16 bytes"
    if not HAS_UNTILED_SWIZZLE:
        return "needs a swizzled layout without tiles, which this version of JAX does not support"
    return None


def _largest_indexed(p: GroupedProblem) -> int:
    """Returns the elements of the largest array that threads index; only TMA, by group, accesses all matrices."""
    return max(p.rows * p.k, p.rows * p.n, p.k * p.n)


def run_rows(
    p: GroupedRows, s: HopperSchedule, target: Target, operands: tuple[jax.Array, ...], gate: Gate | None = None
) -> jax.Array:
    """Runs a launch over groups of rows; the last of `operands` holds the boundaries."""
    *arrays, boundaries = operands
    unit = s.tile_m * (1 + (s.cluster == "m"))
    tiles = row_tiles(boundaries, p.m, unit)
    most = most_row_tiles(p.m, boundaries.shape[0] - 1, unit) * int(Tiling(p, s).grid_n)
    (result,) = launched(p, s, target, [*arrays, tiles], posed=p, gate=gate, scheduler=RowScheduler, most_tiles=most)
    return result


class MosaicGpuRaggedDot(Kernel[RaggedDotProblem, HopperSchedule]):
    backend = "mosaic_gpu"
    version = 1
    most_elements = INDICES_OF_32_BITS
    verified_on = frozenset({"sm_90"})  # tests/device on an NVIDIA H100

    def supports(self, problem: RaggedDotProblem, target: Target) -> str | None:
        if reason := _unsupported(problem, target):
            return reason
        if jnp.dtype(problem.dtype).itemsize == 1 and not problem.transpose_rhs:
            # PTX ISA, wgmma: other operands than 16-bit ones are read in that order only.
            return "multiplies 8-bit matrices whose last axis is k: transpose_rhs=True"
        return None

    def largest_array(self, problem: RaggedDotProblem) -> int:
        return _largest_indexed(problem)

    def verified(self, problem: RaggedDotProblem, schedules: Columns, target: Target) -> Column | bool:
        # 8-bit operands ran in the interpreter only.
        return jnp.dtype(problem.dtype).itemsize > 1 and super().verified(problem, schedules, target)

    def space(self, problem: RaggedDotProblem, target: Target) -> Space[HopperSchedule]:
        return rows_space(problem, target.cores)

    def footprint(self, problem: RaggedDotProblem, schedules: Columns, target: Target) -> Footprint:
        return rows_footprint(problem, schedules)

    def run(
        self, problem: RaggedDotProblem, schedule: HopperSchedule, target: Target, /, *args: Any, **params: Any
    ) -> jax.Array:
        return run_rows(_of_rows(problem), schedule, target, args)


class MosaicGpuGatedRaggedDot(Kernel[GatedRaggedDotProblem, HopperSchedule]):
    """Both factors multiply the same stages of `lhs` (search_spaces/gated_matmul/hopper.py)."""

    backend = "mosaic_gpu"
    version = 1
    most_elements = INDICES_OF_32_BITS
    verified_on = frozenset({"sm_90"})  # tests/device on an NVIDIA H100

    def supports(self, problem: GatedRaggedDotProblem, target: Target) -> str | None:
        return _unsupported(problem, target)

    def largest_array(self, problem: GatedRaggedDotProblem) -> int:
        return _largest_indexed(problem)

    def space(self, problem: GatedRaggedDotProblem, target: Target) -> Space[HopperSchedule]:
        return rows_space(problem, target.cores, factors=2)

    def footprint(self, problem: GatedRaggedDotProblem, schedules: Columns, target: Target) -> Footprint:
        return rows_footprint(problem, schedules)

    def run(
        self, problem: GatedRaggedDotProblem, schedule: HopperSchedule, target: Target, /, *args: Any, **params: Any
    ) -> jax.Array:
        return run_rows(_of_rows(problem), schedule, target, args, Gate(joined=False, bias_joined=False))


class MosaicGpuRaggedDotWeights(Kernel[RaggedDotWeightsProblem, HopperSchedule]):
    backend = "mosaic_gpu"
    version = 1
    most_elements = INDICES_OF_32_BITS
    verified_on = frozenset({"sm_90"})  # tests/device on an NVIDIA H100

    def supports(self, problem: RaggedDotWeightsProblem, target: Target) -> str | None:
        return _unsupported(problem, target)

    def largest_array(self, problem: RaggedDotWeightsProblem) -> int:
        return _largest_indexed(problem)

    def space(self, problem: RaggedDotWeightsProblem, target: Target) -> Space[HopperSchedule]:
        return weights_space(problem, target.cores)

    def footprint(self, problem: RaggedDotWeightsProblem, schedules: Columns, target: Target) -> Footprint:
        return weights_footprint(problem, schedules)

    def run(
        self, problem: RaggedDotWeightsProblem, schedule: HopperSchedule, target: Target, /, *args: Any, **params: Any
    ) -> jax.Array:
        p, s = of_weights(problem), schedule
        lhs, rhs, boundaries = args
        operands = [lhs, rhs, k_ranges(boundaries)]
        (result,) = launched(p, s, target, operands, posed=problem, scheduler=KScheduler)
        return result.reshape(problem.result().shape)


def of_weights(p: RaggedDotWeightsProblem) -> GroupedK:
    return GroupedK(p.k, p.n, p.rows, p.dtype, batch=p.groups, out_dtype=p.out_dtype, transpose_a=True)
