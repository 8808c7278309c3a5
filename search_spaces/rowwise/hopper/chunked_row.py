"""What kernels of rows in chunks have in common: the launch, and what one CTA works with."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import jax
from jax import lax
from jax.experimental import pallas as pl

from search_spaces.jax_compat import plgpu
from search_spaces.rowwise.hopper.cluster_reduction import CLUSTER_RANK, PartialsBuffer
from search_spaces.rowwise.hopper.reduction import Reduction, Statistics
from search_spaces.rowwise.hopper.register_resident import COMPILER_PARAMS
from search_spaces.rowwise.hopper.row_ends import End, RowStart
from search_spaces.rowwise.hopper.row_partition import RowPartition, Scratch

Plan = TypeVar("Plan", bound=RowPartition)


@dataclasses.dataclass(frozen=True)
class Cta(Generic[Plan]):
    """What one warpgroup of a CTA works with.

    Attributes:
      plan: how rows are divided.
      reduction: the formula.
      buffer: the all-reduce of the cluster.
      x, out: flat references to all rows, and to their results.
      shared: reference to the aligned copies of what all rows share, or None.
      mailbox: reference to the interpreter's substitute for DSMEM, or None.
      warpgroup: its number.
      starts: elements of each chunk at which its fragments start...
      share: ...of which this is the first.
      start_of, overlap_of: see `RowPartition.chunks_of_rank`.
      scratch: SMEM.
    """

    plan: Plan
    reduction: Reduction
    buffer: PartialsBuffer
    x: Any
    out: Any
    shared: Any
    mailbox: Any
    warpgroup: Any
    starts: list[Any]
    share: Any
    start_of: Callable[[Any], Any]
    overlap_of: Callable[[int], Any]
    scratch: Scratch

    def copy(self, first: Any, stage: Any) -> None:
        """Starts the TMA bulk copy of a chunk, from an element of the array on, into a stage."""
        plgpu.copy_gmem_to_smem(
            self.x.at[pl.ds(first, self.plan.chunk)],
            self.scratch.stages.at[stage],
            self.scratch.full.at[stage],
            oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,  # one run of bytes: a copy of any length
        )

    def init(self) -> Statistics:
        return tuple(self.plan.layout.full(value) for value in self.reduction.init)

    def load(self, stage: Any) -> list[jax.Array]:
        """This warpgroup's fragments of the chunk that a stage holds."""
        return [self.plan.layout.load_flat(self.scratch.stages.at[stage], start) for start in self.starts]

    def update(self, statistics: Statistics, fragments: Sequence[jax.Array], overlap: Any) -> Statistics:
        """With this warpgroup's fragments of a chunk, whose first `overlap` elements another chunk counts."""
        return self.reduction.update(statistics, self.plan.masked(self.reduction, self.starts, fragments, overlap))

    def arrive(self, statistics: Statistics, ends: list[End], row: Any, number: Any) -> tuple[Any, Any]:
        """First phase of the all-reduce of a row, in a buffer of this number: what `wait` gets."""
        partials = self.scratch.partials.at[number] if self.mailbox is None else self.mailbox.at[row]
        barrier = None if self.scratch.arrived is None else self.scratch.arrived.at[0]
        of_warps = self.plan.of_warps(self.reduction, statistics, ends)
        self.buffer.arrive(of_warps, self.warpgroup, partials, barrier)
        return partials, barrier

    def wait(self, arrival: tuple[Any, Any]) -> Statistics:
        """Second phase: what `Reduction.apply` needs."""
        return self.buffer.wait(self.reduction, *arrival)

    def apply_ends(self, ends: list[End], start: RowStart, final: Statistics) -> None:
        self.plan.ends.apply(self.reduction, ends, start, self.shared, final, self.out)


def launch(
    run: Callable[[Cta[Plan]], None],
    reduction: Reduction,
    plan: Plan,
    result: jax.ShapeDtypeStruct,
    x: jax.Array,
    shared: Sequence[jax.Array],
    **grid: int,
) -> jax.Array:
    """The result of a kernel.

    Args:
      run: what each warpgroup of a CTA does.
      grid: so many CTAs, or clusters of them, by the name of their axis.
    """
    statistics = len(reduction.init)
    buffer = plan.partials(statistics)

    def kernel(*refs: Any) -> None:
        x, *weights, out = refs[: 2 + len(shared)]
        mailbox = refs[2 + len(shared) :]
        warpgroup = lax.axis_index("warpgroup")
        start_of, overlap_of = plan.chunks_of_rank()
        cta = functools.partial(
            Cta,
            plan=plan,
            reduction=reduction,
            buffer=buffer,
            x=x,
            out=out,
            shared=weights[0] if weights else None,
            mailbox=mailbox[0] if mailbox else None,
            warpgroup=warpgroup,
            starts=plan.fragment_starts(warpgroup),
            share=plan.share(warpgroup),
            start_of=start_of,
            overlap_of=overlap_of,
        )
        scratch = plan.scratch(x.dtype, statistics)
        pl.run_scoped(lambda scratch: run(cta(scratch=scratch)), scratch, collective_axes="warpgroup")

    in_cluster = {"cluster": (plan.cluster,), "cluster_names": (CLUSTER_RANK,)} if plan.cluster > 1 else {}
    made: jax.Array = plgpu.kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct((result.size,), result.dtype), *buffer.mailbox(result.shape[0])),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=plan.warpgroups,
        thread_name="warpgroup",
        compiler_params=COMPILER_PARAMS,
        **in_cluster,
    )(x.reshape(-1), *map(plan.aligned_copies, shared))[0]
    return made.reshape(result.shape)
