"""The kernel itself: what a CTA keeps in shared memory, and what its warpgroups do with it.

A persistent CTA computes one tile of the result after the other. Its producer warpgroup loads the operands of each step
of k by TMA into a pipeline of `stages`; its consumers multiply them, and hand their accumulators over in the epilogue.
Time runs down; tiles of two steps, "ping_pong" (t, k: step k of tile t):

      producer          consumer 0                   consumer 1
      load 0, 0         wait full
      load 0, 1         wgmma 0, 0 -> empty          wait full
      load 1, 0         wgmma 0, 1 -> empty             :
      load 1, 1         epilogue of 0                wgmma 1, 0 -> empty
      wait empty           : bias, activation,       wgmma 1, 1 -> empty
      load 2, 0            : residual, store         epilogue of 1
      load 2, 1         wgmma 2, 0 -> empty             :
         :              wgmma 2, 1 -> empty             :

Cooperative consumers share each tile instead, so that the epilogue of both runs beside the loads of the next tile:

      producer          consumer 0                   consumer 1
      load 0, 0         wait full                    wait full
      load 0, 1         wgmma 0, 0 -> empty          wgmma 0, 0 -> empty
      load 1, 0         wgmma 0, 1 -> empty          wgmma 0, 1 -> empty
      load 1, 1         epilogue of its half of 0    epilogue of its half of 0
      wait empty        wgmma 1, 0 -> empty          wgmma 1, 0 -> empty

"-> empty" comes when the wgmma has ended, or, with `delay_release`, when the next one has been started. In a cluster
along m or n each CTA loads half of the operand that both need, for both (multicast): its stages are empty when the
consumers of both have read them. In one along k the CTAs reduce their accumulators before the epilogue
(dsmem_reduction.py).

**Why not `plgpu.emit_pipeline_warp_specialized`**, as in JAX's `hopper_matmul_mgpu`. It too can keep its pipeline full
from one tile to the next (`pipeline_state`), but all of its consumers take part in every step: no ping-pong, where one
runs its epilogue beside the other's main loop. And a block of its operands is one TMA copy, where a stage in the
untiled layout takes several.

Below, `a` fills the rows of wgmma and `b` its columns. With `swap_ab` that is the mirrored product, and only what
leaves the kernel is turned back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl

from search_spaces.hopper import untiled_swizzled
from search_spaces.hopper.limits import WGMMA_ROWS
from search_spaces.hopper.pipeline import Pipeline
from search_spaces.hopper.smem_layout import SmemTile
from search_spaces.jax_compat import plgpu
from search_spaces.matmul.hopper.epilogue_loads import EpilogueLoads
from search_spaces.matmul.hopper.plan import Plan, plan, scratch
from search_spaces.matmul.hopper.schedule import HopperSchedule
from search_spaces.matmul.hopper.tiling import planar_snake
from search_spaces.matmul.problem import MatmulProblem

# Registers per thread, in multiples of 8. A CTA of 384 threads starts with 168 each (65,536 / 384, rounded down); what
# the producer's threads give back, the consumers share. With one consumer each thread starts with all that it can
# address, and nobody needs to give.
PRODUCER_REGISTERS = 40
CONSUMER_REGISTERS = 232


@dataclasses.dataclass(frozen=True)
class Operand:
    """`a` or `b`, as wgmma sees it.

    Attributes:
      array: in device memory.
      batched: whether that has a batch axis.
      tile: a stage of it...
      smem: ...of which there are so many in shared memory.
      multicast: the CTAs of a cluster load halves of each stage for each other.
    """

    array: Any
    batched: bool
    tile: SmemTile
    smem: Any
    multicast: bool

    def load(self, batch: Any, corner: tuple[Any, Any], stage: Any, full: Any) -> None:
        """Loads the tile at `corner` into a stage; `full` then tells."""
        for index, box in self.tile.boxes(*corner):
            plgpu.copy_gmem_to_smem(
                self.array.at[(batch, *box) if self.batched else box],
                self.smem.at[stage, *index],
                full,
                collective_axes="cluster" if self.multicast else None,
            )


@dataclasses.dataclass(frozen=True)
class Cta:
    """A CTA of a launch, as its warpgroups see it.

    Attributes:
      plan: of the launch.
      a, b: the operands, and the pipeline that they share.
      bias, residual, c: in device memory; None where there is no such operand.
      out_smem: stages of each consumer's epilogue subtiles.
      others: scratch of the epilogue's operands and of a reduction, by name.
      mailbox: of a reduction, for the interpreter.
      cluster, clusters: number of its cluster in the grid, and how many there are.
      rank: of the CTA in its cluster.
      warpgroup: that asks: the consumers are the first of a CTA.
      tiles: that the cluster computes.
    """

    plan: Plan
    a: Operand
    b: Operand
    pipeline: Pipeline
    bias: Any
    residual: Any
    c: Any
    out_smem: Any
    others: dict[str, Any]
    mailbox: list[Any]
    cluster: Any
    clusters: Any
    rank: Any
    warpgroup: Any
    tiles: Any

    def origin(self, tile: Any) -> tuple[Any, Any, Any]:
        """Product, first row and first column of this CTA's `tile`-th tile."""
        s, t = self.plan.s, self.plan.t
        number, grid = self.cluster + tile * self.clusters, (t.grid_m, t.grid_n)
        product, row, column = planar_snake(number, grid, s.grid_minor_dim, s.grid_tile_width)
        row = 2 * row + self.rank if s.cluster == "m" else row
        column = 2 * column + self.rank if s.cluster == "n" else column
        return product, row * s.tile_m, column * s.tile_n


def kernel(problem: MatmulProblem, schedule: HopperSchedule) -> Callable[..., None]:
    """The kernel, from its arrays in device memory: the operands, and the result or the accumulators of splits of k."""
    launch = plan(problem, schedule)
    p, s, t, types = launch.p, launch.s, launch.t, scratch(launch)

    def matmul(*arrays: Any) -> None:
        operands, (c, *mailbox) = arrays[: len(problem.operands())], arrays[len(problem.operands()) :]
        a, b, bias, residual = problem.named(operands)
        a, b = (b, a) if s.swap_ab else (a, b)
        cluster, clusters = lax.axis_index("cluster_grid"), lax.axis_size("cluster_grid")
        rank, warpgroup = lax.axis_index("cluster"), lax.axis_index("wg")
        tiles = lax.div(t.products * t.grid_m * t.grid_n - 1 - cluster + clusters, clusters)

        def with_scratch(*refs: Any) -> None:
            others = dict(zip(types, refs, strict=True))
            cta = Cta(
                plan=launch,
                a=Operand(a, p.batch > 1, launch.a_tile, others.pop("a_smem"), s.cluster == "n"),
                b=Operand(b, p.batch > 1, launch.b_tile, others.pop("b_smem"), s.cluster == "m"),
                pipeline=Pipeline(s.stages, launch.groups, others.pop("full"), others.pop("empty")),
                bias=bias,
                residual=residual,
                c=c,
                out_smem=others.pop("out_smem"),
                others=others,
                mailbox=mailbox,
                cluster=cluster,
                clusters=clusters,
                rank=rank,
                warpgroup=warpgroup,
                tiles=tiles,
            )
            _take_roles(cta)

        # In their order: by name, JAX would sort them.
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
            cta.plan.reduction.meet()

    @pl.when(cta.warpgroup != consumers)
    def consumer() -> None:
        if consumers == 2:
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        consume(cta)


def produce(cta: Cta) -> None:
    """The producer: loads the operands of all steps of all tiles."""
    p, s, t, pipeline = cta.plan.p, cta.plan.s, cta.plan.t, cta.pipeline

    def load_tile(tile: Any, _: None) -> None:
        product, row, column = cta.origin(tile)
        batch, first_step = product, 0
        if s.split_k > 1:
            batch, first_step = lax.rem(product, p.batch), lax.div(product, p.batch) * t.steps
        if s.cluster == "split_k":
            first_step = cta.rank * t.steps

        def load_step(k_step: Any, _: None) -> None:
            step = tile * t.steps + k_step
            stage = pipeline.stage(step)
            full = pipeline.full_barrier(tile, stage)
            k = (first_step + k_step) * s.tile_k
            pipeline.producer_acquire(step, stage)
            cta.a.load(batch, (k, row) if p.transpose_a else (row, k), stage, full)
            cta.b.load(batch, (column, k) if p.transpose_b else (k, column), stage, full)

        lax.fori_loop(0, t.steps, load_step, None)

    lax.fori_loop(0, cta.tiles, load_tile, None)
    pipeline.producer_tail(cta.tiles * t.steps)


@dataclasses.dataclass(frozen=True)
class Consumer:
    """One consumer warpgroup of a CTA.

    Attributes:
      cta: its CTA.
      first_row, first_column: of a tile, as wgmma sees it, the first that it computes...
      first_own: ...and the first column that it finishes.
      loads: of its epilogue's operands.
    """

    cta: Cta
    first_row: Any
    first_column: Any
    first_own: Any
    loads: EpilogueLoads

    @property
    def subtile_columns(self) -> int:
        """Of an epilogue subtile, as wgmma sees them."""
        return self.cta.plan.out_n if self.cta.plan.s.swap_ab else self.cta.plan.s.epi_tile_n

    @property
    def subtiles(self) -> list[tuple[int, int]]:
        """First row and column of each, in what the consumer finishes."""
        t, out_n = self.cta.plan.t, self.cta.plan.out_n
        return [(m, n) for m in range(0, t.wg_m, WGMMA_ROWS) for n in range(0, out_n, self.subtile_columns)]

    def corner(self, row: Any, column: Any, m: int, n: int) -> tuple[Any, Any]:
        """First row and column of the result of a subtile of the tile at `row` and `column`."""
        corner = row + self.first_row + m, column + self.first_own + n
        return corner[::-1] if self.cta.plan.s.swap_ab else corner

    def fetch_residual(self, count: int, product: Any, row: Any, column: Any) -> None:
        """Asks for the `count`-th subtile."""
        stage = count % int(self.cta.plan.tiling.epi_stages)
        self.loads.fetch_residual(stage, product, *self.corner(row, column, *self.subtiles[count]))


def consume(cta: Cta) -> None:
    """A consumer: main loop and epilogue of all tiles, or in ping-pong of every other one."""
    launch, s, t = cta.plan, cta.plan.s, cta.plan.t
    reduction, others = launch.reduction, dict(cta.others)
    arrived = {name: others.pop(name) for name in (reduction.scratch() if reduction else ())}
    loads = EpilogueLoads(launch.tiling, launch.problem, s.swap_ab, cta.warpgroup, cta.bias, cta.residual, **others)
    first_row = cta.warpgroup * t.wg_m if s.consumers == "cooperative_m" else 0
    first_column = cta.warpgroup * t.wg_n if s.consumers == "cooperative_n" else 0
    first_own = first_column + cta.rank * launch.out_n if reduction else first_column
    consumer = Consumer(cta, first_row, first_column, first_own, loads)

    def compute(tile: Any, _: None) -> None:
        if launch.problem.fused:
            prefetch(consumer, tile)
        acc = main_loop(consumer, tile)
        if reduction:
            smem = cta.a.smem if launch.larger is launch.a_tile else cta.b.smem
            acc = reduction.add(acc, cta.warpgroup, smem, launch.larger.transforms, cta.mailbox, **arrived)
        finish(consumer, tile, acc)

    if (groups := launch.groups) > 1:
        own = lax.div(cta.tiles - 1 - cta.warpgroup + groups, groups)
        lax.fori_loop(0, own, lambda number, _: compute(number * groups + cta.warpgroup, None), None)
    else:
        lax.fori_loop(0, cta.tiles, compute, None)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def prefetch(consumer: Consumer, tile: Any) -> None:
    """Asks for what the epilogue of a tile begins with."""
    launch = consumer.cta.plan
    product, row, column = consumer.cta.origin(tile)
    consumer.loads.fetch_bias(product, row + consumer.first_row if launch.s.swap_ab else column + consumer.first_own)
    for count in range(int(launch.tiling.epi_stages)):
        consumer.fetch_residual(count, product, row, column)


def main_loop(consumer: Consumer, tile: Any) -> jax.Array:
    """The accumulators of a tile, or of the consumer's half of it: all steps of the CTA's part of k."""
    cta, p, s, t = consumer.cta, consumer.cta.plan.p, consumer.cta.plan.s, consumer.cta.plan.t
    pipeline, delay, untiled = cta.pipeline, s.delay_release, cta.plan.tiling.untiled
    rows, columns = pl.ds(consumer.first_row, t.wg_m), pl.ds(consumer.first_column, t.wg_n)
    whole = slice(None)

    def stage_of(k_step: Any) -> Any:
        return pipeline.stage(tile * t.steps + k_step)

    def start(stage: Any, acc: Any) -> Any:
        """The accumulators to go on with: new ones, or `acc` itself, a reference to those in place."""
        a = cta.a.tile.part(cta.a.smem, stage, *((whole, rows) if p.transpose_a else (rows, whole)))
        b = cta.b.tile.part(cta.b.smem, stage, *((columns, whole) if p.transpose_b else (whole, columns)))
        pipeline.consumer_wait(tile, stage)
        if untiled:
            return untiled_swizzled.wgmma(
                acc, a, b, cta.a.tile.swizzle, transpose_a=p.transpose_a, transpose_b=p.transpose_b
            )
        plgpu.wgmma(acc, a.T if p.transpose_a else a, b.T if p.transpose_b else b)
        return acc

    def release(stage: Any, pending: int) -> None:
        """Empties a stage when no more than so many steps, all later ones, are `pending`."""
        plgpu.wgmma_wait(pending)
        pipeline.consumer_release(stage)

    def step(k_step: Any, acc: Any) -> Any:
        stage = stage_of(k_step)
        acc = start(stage, acc)
        release(stage_of(k_step - delay) if delay else stage, delay)
        return acc

    def in_place(acc: Any) -> jax.Array:
        for k_step in range(delay):
            start(stage_of(k_step), acc)

        def step_in_place(k_step: Any, _: None) -> None:
            step(k_step, acc)

        lax.fori_loop(delay, t.steps, step_in_place, None)
        for k_step in range(t.steps - delay, t.steps):
            release(stage_of(k_step), 0)
        return acc[...]

    if untiled:  # Each step is waited for: what follows could not see that wgmmas are pending.
        acc: jax.Array = lax.fori_loop(0, t.steps, step, untiled_swizzled.zeros((t.wg_m, t.wg_n), p.acc_dtype))
    else:
        acc = pl.run_scoped(in_place, plgpu.ACC((t.wg_m, t.wg_n), p.acc_dtype))
    return acc


def finish(consumer: Consumer, tile: Any, acc: jax.Array) -> None:
    """The epilogue: bias, activation and residual, rounding and store of a tile, subtile by subtile."""
    cta, launch = consumer.cta, consumer.cta.plan
    fused, swap_ab, out_dtype = launch.problem.fused, launch.s.swap_ab, launch.out_tile.dtype
    stages, width, subtiles = int(launch.tiling.epi_stages), consumer.subtile_columns, consumer.subtiles
    # A plain product is rounded whole, another one subtile by subtile.
    acc = acc if fused else acc.astype(out_dtype)
    product, row, column = cta.origin(tile)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    consumer.loads.wait_for_bias()
    for count, (m, n) in enumerate(subtiles):
        stage = count % stages
        if count >= stages:
            plgpu.wait_smem_to_gmem(stages - 1, wait_read_only=True)
        value = acc[m : m + WGMMA_ROWS, n : n + width]
        value = plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED) if swap_ab else value
        if fused:
            columns = pl.ds(m, WGMMA_ROWS) if swap_ab else pl.ds(n, width)
            value = consumer.loads.apply(value, stage, columns).astype(out_dtype)
        store(consumer, product, (row, column, m, n), cta.out_smem.at[cta.warpgroup, stage], value)
        if fused and count + stages < len(subtiles):
            consumer.fetch_residual(count + stages, product, row, column)


def store(consumer: Consumer, product: Any, place: tuple[Any, Any, int, int], smem: Any, value: jax.Array) -> None:
    """A subtile of the result, through its stage in shared memory, at a `place` as `Consumer.corner` takes it."""
    c, launch = consumer.cta.c, consumer.cta.plan
    out, swap_ab, several = launch.out_tile, launch.s.swap_ab, launch.t.products > 1
    if launch.tiling.stored_by_threads:
        corner = consumer.corner(*place)
        of_product = c.at[product] if several else c
        untiled_swizzled.store_to_gmem(of_product, *corner, smem, value, out.swizzle, transposed=swap_ab)
        plgpu.commit_smem()
        return
    out.store(smem, value, transposed=swap_ab)
    plgpu.commit_smem()
    boxes = out.boxes(*consumer.corner(*place))
    for number, (index, box) in enumerate(boxes, 1):
        plgpu.copy_smem_to_gmem(
            smem.at[index] if index else smem,
            c.at[(product, *box) if several else box],
            commit_group=number == len(boxes),
        )
