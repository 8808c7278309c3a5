"""The plan of a launch, known before tracing: tilings, SMEM layouts, scratch, and the reduction within a cluster."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from search_spaces.hopper import WARPGROUP
from search_spaces.hopper.smem_layout import SmemTile, Tiled, Untiled
from search_spaces.hopper.synchronization import ARRIVE, WAIT, ptx
from search_spaces.hopper.untiled_swizzled import ACCESS, WORD_BYTES, access, load_words, of_words, words
from search_spaces.jax_compat import interprets, mosaic_gpu_code, plgpu
from search_spaces.matmul.hopper.epilogue_loads import bias_scratch, residual_scratch
from search_spaces.matmul.hopper.schedule import Gate, HopperSchedule, Tiling, factors, mirrored
from search_spaces.matmul.problem import MatmulProblem

# ------------------------------------------------------------------------------
# Cluster split-K: two CTAs that share a tile reduce their parts of k through distributed shared memory (DSMEM).
#
# Each CTA sends the other the half of its accumulators that the other CTA finishes. A consumer thread writes them
# directly into the shared memory of the other CTA, for the thread that holds the same elements of the tile. This needs
# no pass through device memory and no second launch, and is deterministic, because there are two addends. The
# accumulators reuse the space of the operands, which is free by then: a cluster along k has one tile. All threads of
# both CTAs wait at the hardware's cluster barrier twice: after all operands have been read, and after all accumulators
# have been written. The barrier also prevents writes to the memory of a CTA that has ended.
#
# The interpreter does not support DSMEM. There the accumulators go through a mailbox, an array in device memory.

MEET = ARRIVE + WAIT


@dataclasses.dataclass(frozen=True)
class DsmemReduction:
    """The accumulators that the consumers of a CTA receive from the other CTA.

    Attributes:
      rows, columns: extents of the half of a consumer's accumulators that it finishes.
      dtype: of the accumulators.
      consumers: number of consumers of a CTA.
    """

    rows: int
    columns: int
    dtype: Any
    consumers: int

    @property
    def onchip_bytes(self) -> int:
        """Bytes that all consumers of a CTA receive."""
        return self.consumers * self.rows * self.columns * self.dtype.itemsize

    def scratch(self) -> dict[str, Any]:
        """Returns the barriers of a CTA by `add`'s names; empty on a device, where the hardware barrier is used."""
        arrivals = {"num_arrivals": 1, "num_barriers": self.consumers}
        return {"arrived": plgpu.ClusterBarrier(collective_axes=("cluster",), **arrivals)} if interprets() else {}

    def mailbox(self, clusters: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns the extra outputs of a launch of this many clusters; empty outside the interpreter."""
        shape = (clusters, 2, self.consumers, self.rows, self.columns)
        return (jax.ShapeDtypeStruct(shape, self.dtype),) if interprets() else ()

    def add(
        self,
        acc: jax.Array,
        consumer: Any,
        smem: Any,
        transforms: tuple[Any, ...],
        mailbox: list[Any],
        *,
        arrived: Any = None,
    ) -> jax.Array:
        """Adds both CTAs' accumulators for the half that this CTA finishes. The producer must call `meet` meanwhile.

        Args:
          acc: ``[rows, 2 * columns]`` of this CTA's part of k, in the layout of wgmma's accumulators.
          consumer: index of the warpgroup among the consumers, which come first in the CTA.
          smem: an array in shared memory that is no longer in use, of at least `onchip_bytes`.
          transforms: Mosaic GPU's transforms of `smem`.
          mailbox: see `mailbox`.
          arrived: see `scratch`.
        """
        rank = lax.axis_index("cluster")
        first, second = acc[:, : self.columns], acc[:, self.columns :]
        own, other = lax.cond(rank == 0, lambda: (first, second), lambda: (second, first))

        def meaning(other: jax.Array, smem: Any) -> jax.Array:
            (boxes,) = mailbox
            boxes = boxes.at[lax.axis_index("cluster_grid")]
            boxes[1 - rank, consumer] = other
            plgpu.barrier_arrive(arrived.at[consumer])
            plgpu.barrier_wait(arrived.at[consumer])
            received: jax.Array = boxes[rank, consumer]
            return received

        @mosaic_gpu_code(
            meaning,
            arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(transforms)),
            return_type=plgpu.ShapeDtypeStruct((self.rows, self.columns), self.dtype, layout=plgpu.Layout.WGMMA),
        )
        def exchange(_: Any, other: Any, smem: Any) -> Any:
            return _exchange(other, mgpu.utils.memref_ptr(smem), self.consumers * WARPGROUP)

        received: jax.Array = exchange(other, smem)
        return own + received

    def meet(self) -> None:
        """Waits at the cluster barriers, for threads without accumulators."""

        @mosaic_gpu_code(lambda: None)
        def meet(_: Any) -> None:
            ptx(MEET + MEET)

        meet()


def dsmem_reduction(problem: MatmulProblem, schedule: HopperSchedule) -> DsmemReduction | None:
    """Returns the reduction of a schedule with cluster split-K; None for other schedules."""
    if schedule.cluster != "split_k":
        return None
    p, s = mirrored(problem, schedule) if schedule.swap_ab else (problem, schedule)
    t = Tiling(p, s)
    return DsmemReduction(t.wg_m, t.wg_n // t.cluster_k, jnp.dtype(p.acc_dtype), t.consumers)


# PTX ISA, mapa: converts an address in this CTA to the same address in the other CTA of the pair.
PEER_ADDRESS = """{
    .reg .b32 rank;
    mov.u32 rank, %cluster_ctarank;
    xor.b32 rank, rank, 1;
    mapa.shared::cluster.u32 $0, $1, rank;
}"""


def _exchange(other: Any, smem: Any, threads: int) -> Any:
    """Writes registers to `smem` in the other CTA, and reads from `smem` the registers that the other CTA wrote."""
    bits, sent = ir.IntegerType.get_signless(32), words(other)
    own = mgpu.utils.getelementptr(smem, [mgpu.thread_idx()], access())
    there = llvm.inline_asm(bits, [llvm.ptrtoint(bits, own)], PEER_ADDRESS, "=r,r", has_side_effects=True)
    ptx(MEET)
    for first in range(0, len(sent), ACCESS):
        store = f"st.shared::cluster.v4.b32 [$0+{first * WORD_BYTES * threads}], {{$1, $2, $3, $4}};"
        ptx(store, [there, *sent[first : first + ACCESS]], "r,r,r,r,r")
    ptx(MEET)
    return of_words(load_words(own, len(sent), threads), other)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The plan of a launch, known before tracing.

    Attributes:
      problem, tiling: of the arrays as stored in device memory.
      p, s, t: problem, schedule and tiling as wgmma sees them; with `swap_ab` the mirrored ones.
      a_tile, b_tile: a stage of each operand.
      out_tile: an epilogue subtile.
      reduction: of cluster split-K; None for other schedules.
      factors: the matmuls with `a`; their results are multiplied. The first one is `problem`.
    """

    problem: MatmulProblem
    tiling: Tiling
    p: MatmulProblem
    s: HopperSchedule
    t: Tiling
    a_tile: SmemTile
    b_tile: SmemTile
    out_tile: SmemTile
    reduction: DsmemReduction | None
    factors: tuple[MatmulProblem, ...]

    @property
    def larger(self) -> SmemTile:
        """The operand with the stages that a reduction reuses after the main loop."""
        return self.a_tile if self.s.tile_m > self.s.tile_n else self.b_tile

    @property
    def out_n(self) -> int:
        """Columns, as wgmma sees them, that a consumer finishes."""
        return int(self.t.wg_n // self.t.cluster_k)

    @property
    def without(self) -> tuple[None, ...]:
        """One None per factor, in place of absent biases or mailboxes."""
        return (None,) * len(self.factors)

    @property
    def outputs(self) -> int:
        """Number of matrices that a launch writes: its results, or with split-K one per split and factor."""
        return int(self.t.products * (len(self.factors) if self.s.split_k > 1 else 1))

    @property
    def groups(self) -> int:
        """Number of consumer groups that take whole tiles in turn."""
        return int(self.t.consumers // self.t.cooperating)


def plan(problem: MatmulProblem, schedule: HopperSchedule, gate: Gate | None = None) -> Plan:
    """Returns the plan of a launch for `problem` with a legal schedule.

    Raises:
      ValueError: the stages of neither operand are large enough for the data that a DSMEM reduction receives.
    """
    tiling = Tiling(problem, schedule)
    p, s = mirrored(problem, schedule) if schedule.swap_ab else (problem, schedule)
    dtype = jnp.dtype(p.dtype)
    out_dtype = p.whole.dtype if s.split_k == 1 else p.acc_dtype
    a_extents = (s.tile_k, s.tile_m) if p.transpose_a else (s.tile_m, s.tile_k)
    b_extents = (s.tile_n, s.tile_k) if p.transpose_b else (s.tile_k, s.tile_n)
    layout = Untiled if tiling.untiled else Tiled
    made = Plan(
        problem=problem,
        tiling=tiling,
        p=p,
        s=s,
        t=Tiling(p, s),
        a_tile=layout(*a_extents, dtype, int(tiling.swizzle)),
        b_tile=layout(*b_extents, dtype, int(tiling.swizzle)),
        out_tile=layout(int(tiling.epi_m), int(tiling.epi_n), out_dtype, int(tiling.out_swizzle)),
        reduction=dsmem_reduction(problem, schedule),
        factors=factors(problem, gate),
    )
    larger = made.larger
    if made.reduction and made.reduction.onchip_bytes > s.stages * larger.rows * larger.columns * dtype.itemsize:
        raise ValueError(f"{schedule}: half of a tile's accumulators outgrow the operands' stages: more stages do it")
    return made


def scratch(launch: Plan) -> dict[str, Any]:
    """Returns the arrays and barriers of a CTA, by name."""
    s, t, dtype = launch.s, launch.t, launch.a_tile.dtype
    a, b, out = launch.a_tile, launch.b_tile, launch.out_tile
    weights = len(launch.factors)
    of_a, of_b = (weights, 1) if s.swap_ab else (1, weights)  # tiles per step
    empty = {"num_arrivals": t.cooperating, "num_barriers": s.stages}
    return {
        "a_smem": plgpu.SMEM((s.stages * of_a, *a.shape), dtype, transforms=a.transforms),
        **(launch.reduction.scratch() if launch.reduction else {}),
        "b_smem": plgpu.SMEM((s.stages * of_b, *b.shape), dtype, transforms=b.transforms),
        **bias_scratch(launch.problem, launch.tiling),
        "full": plgpu.Barrier(num_arrivals=of_a * a.copies + of_b * b.copies, num_barriers=launch.groups * s.stages),
        "out_smem": plgpu.SMEM(
            (t.consumers, int(launch.tiling.epi_stages), *out.shape), out.dtype, transforms=out.transforms
        ),
        # A stage that two CTAs fill is empty when both CTAs have read their copy.
        "empty": plgpu.Barrier(**empty)
        if s.cluster in ("none", "split_k")
        else plgpu.ClusterBarrier(collective_axes=("cluster",), **empty),
        **residual_scratch(launch.problem, launch.tiling),
        **{
            f"{name}_{number}": array
            for number, factor in enumerate(launch.factors[1:], 1)
            for name, array in bias_scratch(factor, launch.tiling).items()
        },
    }


def by_factor(launch: Plan, others: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the scratch of each factor's epilogue, by `EpilogueLoads`'s names."""
    first = {name: x for name, x in others.items() if not name[-1].isdigit()}
    more = [
        {name.removesuffix(end): x for name, x in others.items() if name.endswith(end)}
        for end in (f"_{number}" for number in range(1, len(launch.factors)))
    ]
    return [first, *more]
