"""The kernel and its Pallas call: the shared memory of a CTA, the roles of its warpgroups, and the epilogue.

A persistent CTA computes one tile of the result after another (see tile_scheduler.py for the order). Its producer
warpgroup loads the operands of each step of k by TMA into a pipeline of `stages`. Its consumers multiply them, and
process the accumulators in the epilogue.
Time runs down. Tiles of two steps with "ordered_ping_pong" (t, k: step k of tile t):

      producer          consumer 0                   consumer 1
      load 0, 0         wait full
      load 0, 1         wgmma 0, 0 -> empty          wait full
      load 1, 0         wgmma 0, 1 -> empty             :
      load 1, 1         epilogue of 0                wgmma 1, 0 -> empty
      wait empty           : bias, activation,       wgmma 1, 1 -> empty
      load 2, 0            : residual, store         epilogue of 1
      load 2, 1         wgmma 2, 0 -> empty             :
         :              wgmma 2, 1 -> empty             :

Cooperative consumers share each tile instead, and the epilogue of both overlaps the loads of the next tile:

      producer          consumer 0                   consumer 1
      load 0, 0         wait full                    wait full
      load 0, 1         wgmma 0, 0 -> empty          wgmma 0, 0 -> empty
      load 1, 0         wgmma 0, 1 -> empty          wgmma 0, 1 -> empty
      load 1, 1         epilogue of its half of 0    epilogue of its half of 0
      wait empty        wgmma 1, 0 -> empty          wgmma 1, 0 -> empty

"-> empty" happens when the wgmma has ended, or, with `delay_release`, when the next one has started. In a cluster along
m or n, each CTA loads half of the shared operand for both CTAs (multicast), so its stages are empty when the consumers
of both have read them. In a cluster along k, the CTAs reduce their accumulators before the epilogue
(plan.py).

**Why not `plgpu.emit_pipeline_warp_specialized`**, as in JAX's `hopper_matmul_mgpu`? It can also keep its pipeline full
from one tile to the next (`pipeline_state`), but all of its consumers take part in every step. This excludes ping-pong,
where the epilogue of one consumer overlaps the main loop of the other. Also, a block of its operands is one TMA copy,
whereas a stage in the untiled layout takes several.

Below, `a` fills the rows of wgmma and `b` its columns. With `swap_ab` this is the mirrored matmul, and only the results
are transposed back.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from search_spaces.hopper import WGMMA_ROWS, untiled_swizzled
from search_spaces.hopper.smem_layout import Untiled
from search_spaces.hopper.synchronization import Pipeline, Turns, by_one_warp
from search_spaces.jax_compat import plgpu
from search_spaces.matmul.hopper.epilogue_loads import EpilogueLoads
from search_spaces.matmul.hopper.main_loop import Consumer, Cta, Operand, Scales, Scaling, main_loop, scaled_main_loop
from search_spaces.matmul.hopper.plan import Plan, by_factor, plan, scratch
from search_spaces.matmul.hopper.schedule import Gate, HopperSchedule, sources
from search_spaces.matmul.hopper.tile_scheduler import (
    MakeScheduler,
    TailReduction,
    WorkTile,
    tail_reduction,
    tile_scheduler,
    workspace,
)
from search_spaces.matmul.problem import MatmulProblem
from search_spaces.problem import Problem
from search_spaces.space import cdiv
from search_spaces.target import Target

# ------------------------------------------------------------------------------
# Stores of the epilogue: subtiles go from shared memory to the results in device memory, which split the columns.
#
# Several results are separate arrays, each with its own TMA descriptor. No subtile spans two results (a rule of the
# space), so its first column selects the result, by a branch that is uniform in a warpgroup. A tile may span several
# results.


@dataclasses.dataclass(frozen=True)
class EpilogueStores:
    """The epilogue stores of one consumer warpgroup.

    Attributes:
      plan: of the launch.
      results: in device memory, or the accumulators of splits of k.
    """

    plan: Plan
    results: tuple[Any, ...]

    def by_threads(self, product: Any, row: Any, column: Any, end: Any, smem: Any) -> None:
        """Stores the rows before `end` of the subtile at `row` and `column` from its stage by ordinary stores."""

        def send(c: Any, column: Any) -> None:
            untiled_swizzled.copy_to_gmem(c, row, column, end, smem, self.plan.out_tile.swizzle)

        self._where_it_lies(product, row, column, send)
        plgpu.commit_smem()

    def by_tma(self, product: Any, row: Any, column: Any, smem: Any) -> None:
        """Stores a subtile from its stage by TMA, in one commit group, which ends when TMA has read the stage."""

        def send(c: Any, column: Any) -> None:
            boxes = self.plan.out_tile.boxes(row, column)
            for number, (index, box) in enumerate(boxes, 1):
                plgpu.copy_smem_to_gmem(smem.at[index] if index else smem, c.at[box], commit_group=number == len(boxes))

        self._where_it_lies(product, row, column, send)

    def _where_it_lies(self, product: Any, row: Any, column: Any, store: Callable[[Any, Any], None]) -> None:
        """Calls ``store(result, column within it)`` for the result that contains `row` and `column` of the product."""
        several = self.plan.outputs > 1
        of_product = [c.at[product] if several else c for c in self.results]
        ends = list(itertools.accumulate(self.plan.problem.columns))

        def choose() -> None:
            if len(of_product) == 1:
                store(of_product[0], column)
                return
            for number, (c, first, end) in enumerate(zip(of_product, (0, *ends), ends, strict=False)):
                here = (column >= first) & (column < end) if number < len(ends) - 1 else column >= first

                def store_here(c: Any = c, first: int = first) -> None:
                    store(c, column - first)

                pl.when(here)(store_here)

        if not (within := self._to_be_clipped(row, column, ends[-1])):  # TMA clips stores beyond the edge
            choose()
            return
        here = functools.reduce(operator.and_, within)
        pl.when(here)(choose)
        pl.when(jnp.logical_not(here))(plgpu.commit_smem_to_gmem_group)  # stages are counted in groups

    def _to_be_clipped(self, row: Any, column: Any, end: int) -> list[Any]:
        """Returns the conditions under which a subtile lies inside the array, where TMA would not clip it.

        Mosaic GPU drops an axis along which both the array and the box have at most one swizzled tile (8 rows), and
        ignores the offset of the box along that axis (jax 0.11.2, launch_context.py). Elements beyond the edge would be
        stored at the start.
        """
        out, s = self.plan.out_tile, self.plan.s
        if isinstance(out, Untiled):
            return []
        tile_m, tile_n = (s.tile_n, s.tile_m) if s.swap_ab else (s.tile_m, s.tile_n)
        rows, columns = (int(extent) for extent in self.plan.tiling.c_extents[-1])
        width = out.swizzle // out.dtype.itemsize
        within = []
        one_box_high, one_box_wide = out.rows == 8 and rows <= 8, out.columns == width and columns <= width
        if one_box_high and tile_m > out.rows:
            within.append(row < rows)
        if one_box_wide and tile_n > out.columns:
            within.append(column < end)
        return within


# Registers per thread, in multiples of 8. A CTA of 384 threads starts with 168 each (65,536 / 384, rounded down). The
# consumers share the registers that the producer's threads release. With one consumer, each thread starts with as many
# registers as it can address, and none are released.
PRODUCER_REGISTERS = 40
CONSUMER_REGISTERS = 232


def kernel(
    problem: MatmulProblem,
    schedule: HopperSchedule,
    gate: Gate | None = None,
    scaling: Scaling | None = None,
    scheduler: MakeScheduler | None = None,
) -> Callable[..., None]:
    """Builds the kernel, a function of arrays in device memory: operands, then results or the accumulators of splits.

    With a `scaling`, the scales of `a` and of `b` follow the operands. With a `scheduler`, the array that the
    scheduler reads follows.
    """
    launch = plan(problem, schedule, gate)
    s, types = launch.s, scratch(launch)

    def matmul(*arrays: Any) -> None:
        (a, weights, biases, residual), left = sources(problem, gate, arrays)
        scales, left = (Scales(scaling, *left[:2]), left[2:]) if scaling else (None, left)
        of_scheduler, left = (left[:1], left[1:]) if scheduler else ([], left)
        results, beside = tuple(left[: len(problem.results())]), left[len(problem.results()) :]
        rows, columns = (weights, (a,)) if s.swap_ab else ((a,), weights)
        cluster, clusters = lax.axis_index("cluster_grid"), lax.axis_size("cluster_grid")
        rank, warpgroup = lax.axis_index("cluster"), lax.axis_index("wg")
        tiles = (scheduler or tile_scheduler)(launch, cluster, clusters, rank, *of_scheduler)
        tail = tail_reduction(launch, beside, tiles, warpgroup)

        def with_scratch(*refs: Any) -> None:
            others = dict(zip(types, refs, strict=True))
            cta = Cta(
                plan=launch,
                a=Operand(rows, launch.a_tile, others.pop("a_smem"), s.cluster == "n"),
                b=Operand(columns, launch.b_tile, others.pop("b_smem"), s.cluster == "m"),
                pipeline=Pipeline(s.stages, launch.groups, others.pop("full"), others.pop("empty")),
                biases=biases,
                residual=residual,
                scales=scales,
                results=results,
                out_smem=others.pop("out_smem"),
                others=others,
                mailbox=[] if launch.reduction is None else beside,
                tail=tail,
                rank=rank,
                warpgroup=warpgroup,
                tiles=tiles,
            )
            _take_roles(cta)

        # Positional, to keep the order: JAX would sort keyword arguments.
        pl.run_scoped(with_scratch, *types.values(), collective_axes="wg")

    return matmul


def _take_roles(cta: Cta) -> None:
    consumers = cta.plan.t.consumers

    @pl.when(cta.warpgroup == consumers)
    def producer() -> None:
        if consumers == 2:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        produce(cta)
        if cta.plan.reduction:
            for _ in cta.plan.factors:
                cta.plan.reduction.meet()

    @pl.when(cta.warpgroup != consumers)
    def consumer() -> None:
        if consumers == 2:
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        consume(cta)


def produce(cta: Cta) -> None:
    """Runs the producer: one of its warps loads the operands of all steps of all tiles."""
    p, s, pipeline = cta.plan.p, cta.plan.s, cta.pipeline

    def load_tile(number: Any, start: Any) -> Any:
        work = cta.tiles.work_tile(number, start)
        row, column = work.row, work.column

        def load_step(k_step: Any, _: None) -> None:
            step = work.start + k_step
            stage = pipeline.stage(step)
            full = pipeline.full_barrier(number, stage)
            k = work.first_k + k_step * s.tile_k
            pipeline.producer_acquire(step, stage)
            cta.a.load(work.batch, (k, row) if p.transpose_a else (row, k), stage, full)
            cta.b.load(work.batch, (column, k) if p.transpose_b else (k, column), stage, full)

        lax.fori_loop(0, work.steps, load_step, None)
        return cta.tiles.steps_before(number + 1, number, start)

    def load_all() -> None:
        steps = lax.fori_loop(0, cta.tiles.count, load_tile, jnp.int32(0))
        pipeline.producer_tail(steps)

    by_one_warp(load_all)


def consume(cta: Cta) -> None:
    """Runs a consumer: main loop and epilogue of all tiles, or in ping-pong of every other tile."""
    launch, s, t = cta.plan, cta.plan.s, cta.plan.t
    reduction, others = launch.reduction, dict(cta.others)
    arrived = {name: others.pop(name) for name in (reduction.scratch() if reduction else ())}
    loads = tuple(
        EpilogueLoads(launch.tiling, factor, s.swap_ab, cta.warpgroup, bias, cta.residual, **own)
        for factor, bias, own in zip(
            launch.factors, cta.biases or launch.without, by_factor(launch, others), strict=True
        )
    )
    first_row = cta.warpgroup * t.wg_m if s.consumers == "cooperative_m" else 0
    first_column = cta.warpgroup * t.wg_n if s.consumers == "cooperative_n" else 0
    first_own = first_column + cta.rank * launch.out_n if reduction else first_column
    consumer = Consumer(cta, first_row, first_column, first_own, loads)

    # If each step is waited for, there is nothing to order.
    waits = cta.scales is not None and cta.scales.scaling.by_steps
    turns = Turns(launch.groups) if s.consumers == "ordered_ping_pong" and not waits else None

    def compute(number: Any, start: Any) -> Any:
        work = cta.tiles.work_tile(number, start)
        finishes = pl.when(jnp.logical_not(work.leaves)) if cta.tail else _always
        if launch.problem.fused:
            finishes(lambda: prefetch(consumer, work))
        accs = main_loop(consumer, work, turns) if cta.scales is None else (scaled_main_loop(consumer, work, turns),)
        if reduction:
            smem, transforms = cta.a.smem if launch.larger is launch.a_tile else cta.b.smem, launch.larger.transforms
            accs = tuple(
                reduction.add(acc, cta.warpgroup, smem, transforms, [box], **arrived)
                for acc, box in zip(accs, cta.mailbox or launch.without, strict=True)
            )
        if cta.tail:
            accs = (share(cta.tail, work, *accs),)
        if s.split_k == 1:
            finishes(lambda: finish(consumer, work, accs))
        else:  # The reduction kernel multiplies the factors.
            for factor, acc in enumerate(accs):
                finish(consumer, work, (acc,), factor)
        return cta.tiles.steps_before(number + launch.groups, number, start)

    if turns is not None:
        turns.start(cta.warpgroup)
    if (groups := launch.groups) > 1:
        own = lax.div(cta.tiles.count - 1 - cta.warpgroup + groups, groups)
        first = cta.tiles.steps_before(cta.warpgroup)
        lax.fori_loop(0, own, lambda number, start: compute(number * groups + cta.warpgroup, start), first)
    else:
        lax.fori_loop(0, cta.tiles.count, compute, jnp.int32(0))
    if turns is not None:
        turns.end(cta.warpgroup, cta.tiles.count)
    cta.tiles.zero_tiles(functools.partial(finish_zeros, consumer))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def share(tail: TailReduction, work: WorkTile, acc: jax.Array) -> jax.Array:
    """Leaves the accumulators of a part for another CTA, or adds the accumulators that other CTAs have left."""
    pl.when(work.leaves)(lambda: tail.leave(acc))
    whole: jax.Array = lax.cond(work.adds, tail.add, lambda acc: acc, acc)
    return whole


def prefetch(consumer: Consumer, work: WorkTile) -> None:
    """Starts the first loads of a tile's epilogue."""
    launch = consumer.cta.plan
    first = work.row + consumer.first_row if launch.s.swap_ab else work.column + consumer.first_own
    for loads in consumer.loads:
        loads.fetch_bias(work.product, first)
    for count in range(int(launch.tiling.epi_stages)):
        consumer.fetch_residual(count, work)


def finish(consumer: Consumer, work: WorkTile, accs: tuple[jax.Array, ...], factor: int = 0) -> None:
    """Runs the epilogue of a tile, subtile by subtile: bias, activation and residual, rounding, store.

    Several accumulators are multiplied; for a single one with split-K, `factor` is the index of its factor.
    """
    cta, launch = consumer.cta, consumer.cta.plan
    fused, swap_ab, out_dtype = launch.problem.fused, launch.s.swap_ab, launch.out_tile.dtype
    stages, width, subtiles = int(launch.tiling.epi_stages), consumer.subtile_columns, consumer.subtiles
    # Without an epilogue the whole tile is rounded at once, otherwise each subtile.
    accs = accs if fused else tuple(acc.astype(out_dtype) for acc in accs)
    product = work.product + factor * launch.t.products if factor else work.product
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for loads in consumer.loads:
        loads.wait_for_bias()
    for count, (m, n) in enumerate(subtiles):
        stage = count % stages
        if count >= stages:
            plgpu.wait_smem_to_gmem(stages - 1, wait_read_only=True)
        values = [acc[m : m + WGMMA_ROWS, n : n + width] for acc in accs]
        if swap_ab:
            values = [plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED) for value in values]
        if fused:
            columns = pl.ds(m, WGMMA_ROWS) if swap_ab else pl.ds(n, width)
            values = [loads.apply(value, stage, columns) for loads, value in zip(consumer.loads, values, strict=True)]
            values = [math.prod(values[1:], start=values[0]).astype(out_dtype)]
        (value,) = values
        store(cta, product, consumer.corner(work, m, n), work.end_row, cta.out_smem.at[cta.warpgroup, stage], value)
        if fused and count + stages < len(subtiles):
            consumer.fetch_residual(count + stages, work)


def finish_zeros(consumer: Consumer, work: WorkTile) -> None:
    """Stores zeros to a tile, or to the consumer's part of it."""
    t = consumer.cta.plan.t
    layout = plgpu.Layout.WGMMA
    zeros = plgpu.layout_cast(jnp.zeros((t.wg_m, t.wg_n), consumer.cta.plan.p.acc_dtype), layout)
    finish(consumer, work, (zeros,) * len(consumer.cta.plan.factors))


def store(cta: Cta, product: Any, corner: tuple[Any, Any], end: Any, smem: Any, value: jax.Array) -> None:
    """Stores the rows before `end` of a subtile of a product's results through its stage in shared memory.

    With None, the subtile ends with the array.
    """
    launch = cta.plan
    stores = EpilogueStores(launch, cta.results)
    launch.out_tile.store(smem, value, transposed=launch.s.swap_ab)
    plgpu.commit_smem()
    if launch.tiling.stored_by_threads:
        stores.by_threads(product, *corner, launch.problem.m if end is None else lax.max(end, corner[0]), smem)
        return
    if end is None:
        stores.by_tma(product, *corner, smem)
        return
    whole = corner[0] + launch.out_tile.rows <= end
    pl.when(whole)(lambda: stores.by_tma(product, *corner, smem))

    @pl.when(jnp.logical_not(whole))
    def store_part() -> None:
        stores.by_threads(product, *corner, lax.max(end, corner[0]), smem)
        plgpu.commit_smem_to_gmem_group()  # stages are counted in groups


def _always(do: Callable[[], None]) -> None:
    do()


# ------------------------------------------------------------------------------
# One launch of persistent CTAs: the number of clusters, the output arrays, and the Pallas call.


def launched(
    problem: MatmulProblem,
    schedule: HopperSchedule,
    target: Target,
    operands: Sequence[jax.Array],
    *,
    posed: Problem,
    gate: Gate | None = None,
    scaling: Scaling | None = None,
    scheduler: MakeScheduler | None = None,
    most_tiles: int | None = None,
) -> list[jax.Array]:
    """Runs the launch and returns the results ``[..., m, n]``.

    With split-K, returns the accumulators of each split and of each factor, along the first axis.

    Args:
      problem: the matmul that this launch computes: with split-K, that of `posed` without its epilogue.
      operands: in their device memory layout; with a `scaling`, followed by the scales of `a` and of `b`; with a
        `scheduler`, by the array that the scheduler reads.
      scheduler: creates the scheduler of a CTA; by default `tile_scheduler`.
      most_tiles: bound of the work tiles of all clusters; by default their number in the tiling.

    Raises:
      ValueError: two CTAs share each tile along k, and there are more tiles than clusters; or the last wave is split,
        and there are too few clusters or steps for all parts.
    """
    launch = plan(problem, schedule, gate)
    t, reduction = launch.tiling, launch.reduction
    ctas = t.cluster_m * t.cluster_n * t.cluster_k
    clusters = max(1, min(target.cores // ctas, t.tiles if most_tiles is None else most_tiles))
    if reduction and clusters < t.tiles:
        raise ValueError(
            f"{schedule} shares a tile along k between two CTAs, for which {posed} has too many on {target}"
        )
    if (parts := schedule.tail_split_k) > 1:
        waves, tail = divmod(int(t.tiles), int(clusters))
        before_last_part = (parts - 1) * cdiv(t.steps, parts)
        if not (waves and tail and tail * parts <= clusters and before_last_part + schedule.delay_release < t.steps):
            raise ValueError(
                f"{schedule} splits the last wave of {posed} into {parts} parts on {target}: it has {tail} tiles of "
                f"{t.steps} steps beside {waves} waves of {clusters}"
            )
    dtype = problem.whole.dtype if schedule.split_k == 1 else problem.acc_dtype
    lead = (launch.outputs,) if launch.outputs > 1 else ()
    mailboxes = len(launch.factors) * reduction.mailbox(clusters) if reduction else ()
    run = plgpu.kernel(
        kernel(problem, schedule, gate, scaling, scheduler),
        out_type=(
            *(jax.ShapeDtypeStruct((*lead, *map(int, each)), dtype) for each in t.c_extents),
            *mailboxes,
            *workspace(launch, clusters),
        ),
        grid=(clusters,),
        grid_names=("cluster_grid",),
        cluster=(ctas,),
        cluster_names=("cluster",),
        num_threads=t.consumers + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    # Indices are 32 bits wide, regardless of the user's default.
    with jax.enable_x64(False):
        stored: Sequence[jax.Array] = run(*operands)
    results = zip(stored, t.c_extents, problem.columns, strict=False)  # ignores mailboxes and workspaces
    return [c if extents == (problem.m, n) else c[..., : problem.m, :n] for c, extents, n in results]
