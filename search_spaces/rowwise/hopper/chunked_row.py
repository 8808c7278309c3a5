"""Code shared by kernels on rows in chunks: the launch, and the values that one CTA works with."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from search_spaces.jax_compat import plgpu
from search_spaces.rowwise.hopper.cluster_reduction import CLUSTER_RANK, PartialsBuffer
from search_spaces.rowwise.hopper.register_resident import COMPILER_PARAMS
from search_spaces.rowwise.hopper.row_ends import End, RowStart
from search_spaces.rowwise.hopper.row_partition import RowPartition, Scratch
from search_spaces.rowwise.reduction import Reduction, Statistics

Plan = TypeVar("Plan", bound=RowPartition)


@dataclasses.dataclass(frozen=True)
class Cta(Generic[Plan]):
    """The values that one warpgroup of a CTA works with.

    Attributes:
      plan: the division of rows.
      reduction: the formula.
      buffer: the all-reduce of the cluster.
      xs: flat references to all rows, one per row operand.
      out: flat reference to the results.
      row_out: flat reference to the reduced rows if these are a result; else empty.
      shared: reference to the aligned copies of the operand that all rows share, or None.
      mailbox: reference to the interpreter's substitute for DSMEM, or None.
      warpgroup: index of the warpgroup.
      starts: element offsets in each chunk at which its fragments start.
      share: the first of these offsets.
      start_of, overlap_of: see `RowPartition.chunks_of_rank`.
      scratch: SMEM.
    """

    plan: Plan
    reduction: Reduction
    buffer: PartialsBuffer
    xs: Sequence[Any]
    out: Any
    row_out: Sequence[Any]
    shared: Any
    mailbox: Any
    warpgroup: Any
    starts: list[Any]
    share: Any
    start_of: Callable[[Any], Any]
    overlap_of: Callable[[int], Any]
    scratch: Scratch

    def copy(self, first: Any, stage: Any) -> None:
        """Starts the TMA bulk copies of a chunk into a stage of each operand; `first` is an element of the array."""
        for x, stages in zip(self.xs, self.scratch.stages, strict=True):
            plgpu.copy_gmem_to_smem(
                x.at[pl.ds(first, self.plan.chunk)],
                stages.at[stage],
                self.scratch.full.at[stage],
                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,  # one run of bytes: a copy of any length
            )

    def init(self) -> Statistics:
        return tuple(self.plan.layout.full(value) for value in self.reduction.init)

    def load_narrow(self, start: Any) -> jax.Array:
        """Loads a fragment of the reduced row from device memory, in its dtype there."""
        return self.reduction.prologue(*(self.plan.layout.load_flat_narrow(x, start) for x in self.xs))

    def load(self, stage: Any) -> list[jax.Array]:
        """Returns this warpgroup's fragments of the chunk in a stage."""
        layout, stages = self.plan.layout, self.scratch.stages
        return [
            self.reduction.prologue(*(layout.load_flat_narrow(each.at[stage], at) for each in stages)).astype(
                jnp.float32
            )
            for at in self.starts
        ]

    def load_share(self, stage: Any) -> jax.Array:
        """Returns this warpgroup's share of the chunk in a stage as one array."""
        layout, stages = self.plan.chunk_layout, self.scratch.stages
        row = self.reduction.prologue(*(layout.load_narrow(each.at[stage], self.share) for each in stages))
        return row.astype(jnp.float32)

    def store_row(self, first: Any, fragments: Sequence[jax.Array]) -> None:
        """Stores fragments of a chunk of the reduced row if it is a result; `first` is the chunk's first element."""
        for ref in self.row_out:
            for at, fragment in zip(self.starts, fragments, strict=True):
                self.plan.layout.store_flat(ref, first + at, fragment)

    def update(self, statistics: Statistics, fragments: Sequence[jax.Array], overlap: Any) -> Statistics:
        """Adds this warpgroup's fragments of a chunk, except the first `overlap` elements, counted in another chunk."""
        return self.reduction.update(statistics, self.plan.masked(self.reduction, self.starts, fragments, overlap))

    def arrive(self, statistics: Statistics, ends: list[End], row: Any, number: Any) -> tuple[Any, Any]:
        """Starts the all-reduce of a row in the buffer of this number; returns the argument of `wait`."""
        partials = self.scratch.partials.at[number] if self.mailbox is None else self.mailbox.at[row]
        barrier = None if self.scratch.arrived is None else self.scratch.arrived.at[0]
        of_warps = self.plan.of_warps(self.reduction, statistics, ends)
        self.buffer.arrive(of_warps, self.warpgroup, partials, barrier)
        return partials, barrier

    def wait(self, arrival: tuple[Any, Any]) -> Statistics:
        """Finishes the all-reduce; returns the values that `Reduction.apply` needs."""
        return self.buffer.wait(self.reduction, *arrival)

    def apply_ends(self, ends: list[End], start: RowStart, final: Statistics) -> None:
        self.plan.ends.apply(self.reduction, ends, start, self.shared, final, self.out, self.row_out)


def launch(
    run: Callable[[Cta[Plan]], None],
    reduction: Reduction,
    plan: Plan,
    results: Sequence[jax.ShapeDtypeStruct],
    by_row: Sequence[jax.Array],
    shared: Sequence[jax.Array],
    **grid: int,
) -> list[jax.Array]:
    """Returns the results of a kernel: the computed elements, and the reduced row if there are two results.

    Args:
      run: the code of each warpgroup of a CTA.
      grid: number of CTAs, or of clusters, by the name of their axis.
    """
    statistics = len(reduction.init)
    buffer = plan.partials(statistics)

    def kernel(*refs: Any) -> None:
        rest = iter(refs)
        xs, weights, outs = ([*itertools.islice(rest, len(of))] for of in (by_row, shared, results))
        mailbox = [*rest]
        warpgroup = lax.axis_index("warpgroup")
        start_of, overlap_of = plan.chunks_of_rank()
        cta = functools.partial(
            Cta,
            plan=plan,
            reduction=reduction,
            buffer=buffer,
            xs=xs,
            out=outs[0],
            row_out=outs[1:],
            shared=weights[0] if weights else None,
            mailbox=mailbox[0] if mailbox else None,
            warpgroup=warpgroup,
            starts=plan.fragment_starts(warpgroup),
            share=plan.share(warpgroup),
            start_of=start_of,
            overlap_of=overlap_of,
        )
        scratch = plan.scratch(xs[0].dtype, len(xs), statistics)
        pl.run_scoped(lambda scratch: run(cta(scratch=scratch)), scratch, collective_axes="warpgroup")

    in_cluster = {"cluster": (plan.cluster,), "cluster_names": (CLUSTER_RANK,)} if plan.cluster > 1 else {}
    flat = [jax.ShapeDtypeStruct((result.size,), result.dtype) for result in results]
    made = plgpu.kernel(
        kernel,
        out_type=(*flat, *buffer.mailbox(results[0].shape[0])),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=plan.warpgroups,
        thread_name="warpgroup",
        compiler_params=COMPILER_PARAMS,
        **in_cluster,
    )(*(x.reshape(-1) for x in by_row), *map(plan.aligned_copies, shared))
    return [x.reshape(result.shape) for x, result in zip(made, results, strict=False)]  # without a mailbox
