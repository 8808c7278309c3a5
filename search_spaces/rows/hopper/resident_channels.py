"""Rows of adjacent channels in SMEM: a persistent CTA or cluster loads one block of channels while it stores another.

A block of a few channels at all positions of a sample fits into the SMEM of a CTA or of a cluster. Each warpgroup has a
part of the positions, in chunks with a slot each:

    for each block of channels b, in turn
      first stage, chunk by chunk:   | wait until the slot is full, and update the statistics
      all-reduce, and further stages | from the same slots
      for each chunk c               | compute the results in its slot; TMA store of the slot to memory
                                     | when slot c - 2 is stored: TMA load of the next block's chunk into it

Loads and stores are in flight while statistics are computed, and cores are at different phases. No data is read twice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl

from search_spaces.jax_compat import interprets, load, plgpu, store
from search_spaces.rows.hopper.channel_layout import ChannelLayout, ChannelPlan, opaque
from search_spaces.rows.hopper.partition import persistent_ctas
from search_spaces.rows.hopper.streamed_channels import Cta, launch, samples_of
from search_spaces.rows.program import Program, narrowed

# Chunks that a warpgroup stores at once, before it loads into the slot of the first of them.
_STORES = 2


def unsupported_program(program: Program) -> str | None:
    """Returns why a program has no resident blocks; None if it has."""
    rows = [x for x in program.operands if x.kind == "row"]
    results = [x for x in program.results if x.kind == "row"]
    if [x.dtype for x in rows] != [x.dtype for x in results] or len(rows) != 1 or not program.stages:
        return "a result takes the place of its row in SMEM: one row of the same dtype is read and written"
    return None


@dataclasses.dataclass(frozen=True)
class ResidentCta(Cta):
    """A warpgroup with one block of channels in its slots.

    Attributes:
      refs, outs: rows are ``[samples, positions, blocks, channels]``.
      chunks: slots ``[warpgroups * chunks, positions * channels]`` of the row. The interpreter cannot reshape
        references: there, they are ``[warpgroups * chunks, positions, 1, channels]``.
      full: a barrier for each slot.
      parity: 0 or 1 for successive blocks.
      next: the next block as (block, sample), and whether there is one.
    """

    full: Any = None
    parity: Any = 0
    next: tuple[Any, Any, Any] = (0, 0, False)

    @property
    def part(self) -> Any:
        return self.rank * int(self.plan.warpgroups) + self.warpgroup

    @property
    def _slots(self) -> Any:
        (slots,) = self.chunks.values()
        return slots

    def _slot(self, chunk: Any) -> Any:
        return self.warpgroup * int(self.plan.chunks) + chunk

    def _box(self, ref: Any, block: Any, sample: Any, chunk: Any) -> Any:
        # Mosaic GPU swizzles no boxes with an axis of one block: threads access slots as they are in memory.
        return ref.at[sample, pl.ds(self._chunk_start(chunk), int(self.plan.chunk)), pl.ds(block, 1)]

    def _boxed(self, slot: Any) -> Any:
        """Returns a slot in the form of the boxes of `_box`."""
        ref = self._slots.at[slot]
        return ref if interprets() else ref.reshape(int(self.plan.chunk), 1, int(self.plan.block))

    def load_chunk(self, chunk: Any, block: Any, sample: Any) -> None:
        """Starts the load of a chunk of a block into its slot."""
        (value,), slot = self.chunks, self._slot(chunk)
        ref = self.refs[self.program.inputs[value].operand]
        plgpu.copy_gmem_to_smem(self._box(ref, block, sample, chunk), self._boxed(slot), self.full.at[slot])

    def _positions(self, chunk: Any) -> list[Any]:
        start = self._chunk_start(chunk)
        return [start + access * int(self.plan.fragment) for access in range(self.plan.accesses)]

    def _in_slot(self, chunk: Any, access: int) -> Any:
        """Returns the positions of a fragment."""
        size = int(self.plan.fragment) * (1 if interprets() else int(self.plan.block))
        return self._slots.at[self._slot(chunk), pl.ds(access * size, size)]

    def _loaded(self, chunk: Any, positions: Sequence[Any], stage: int, *, kept: bool) -> list[dict[int, jax.Array]]:
        if not stage:
            plgpu.barrier_wait(self.full.at[self._slot(chunk)])
        (value,) = self.chunks
        return [{value: _load(self._in_slot(chunk, access), self.layout)} for access in range(len(positions))]

    def _apply(self, scalars: Any, shared: Any, *, backwards: bool) -> None:
        (result, out), *_ = [x for x in zip(self.program.results, self.outs, strict=True) if x[0].kind == "row"]
        chunks = int(self.plan.chunks)

        def apply(chunk: Any, _: tuple[()]) -> tuple[()]:
            fragments = self._chunk(chunk, scalars, shared, len(self.program.stages), kept=True)
            for access, (_position, values) in enumerate(fragments):
                fragment = narrowed(values, result.values[0], result.dtype)
                _store(self._in_slot(chunk, access), fragment, self.layout)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(self._boxed(self._slot(chunk)), self._box(out, self.block, self.sample, chunk))

            @pl.when(chunk >= _STORES)
            def refill() -> None:
                plgpu.wait_smem_to_gmem(_STORES, wait_read_only=True)
                self._load_next(chunk - _STORES)

            return ()

        lax.fori_loop(0, opaque(chunks), apply, ())
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for chunk in range(max(0, chunks - _STORES), chunks):
            self._load_next(chunk)

    def _load_next(self, chunk: Any) -> None:
        block, sample, exists = self.next

        @pl.when(exists)
        def load_it() -> None:
            self.load_chunk(chunk, block, sample)

    def _place(self, stage: int) -> Any:
        return self.parity * len(self.program.stages) + stage


def _load(ref: Any, layout: ChannelLayout) -> jax.Array:
    """Loads consecutive positions as a fragment."""
    if interprets():
        return load(ref, None).reshape(layout.shape)
    # Mosaic GPU of JAX 0.11.2 tries to swizzle references without an axis of groups, and fails.
    return (
        layout.of_run(load(ref, layout.run)) if layout.splits_vector else load(ref.reshape(layout.shape), layout.layout)
    )


def _store(ref: Any, fragment: jax.Array, layout: ChannelLayout) -> None:
    if interprets():
        store(ref, fragment.reshape(ref.shape))
    elif layout.splits_vector:
        store(ref, layout.as_run(fragment))
    else:
        store(ref.reshape(fragment.shape), fragment)


def resident_channels(
    program: Program,
    plan: ChannelPlan,
    ctas: int,
    results: Sequence[jax.ShapeDtypeStruct],
    arrays: Sequence[jax.Array],
) -> list[jax.Array]:
    """Runs the kernel on at most `ctas` CTAs, for a program that `unsupported_program` accepts."""
    blocks, samples, chunks = int(plan.blocks), samples_of(program, arrays), int(plan.chunks)
    tasks, slots = samples * blocks, int(plan.warpgroups) * chunks
    of_slot = (int(plan.chunk), 1, int(plan.block))
    rows = next(x for x, o in zip(arrays, program.operands, strict=True) if o.kind == "row")
    (value,) = program.inputs_of("row")

    def run(values: Mapping[str, Any]) -> None:
        first, stride = lax.axis_index("persistent_cta"), lax.axis_size("persistent_cta")

        def at(task: Any) -> tuple[Any, Any]:
            return lax.rem(task, blocks), lax.div(task, blocks)

        block, sample = at(first)
        cta = ResidentCta(**values, block=block, sample=sample)
        lax.fori_loop(0, chunks, lambda chunk, _: cta.load_chunk(chunk, block, sample), None)

        def step(wave: Any, _: tuple[()]) -> tuple[()]:
            task = first + wave * stride
            (block, sample), following = at(task), (*at(task + stride), task + stride < tasks)
            dataclasses.replace(cta, block=block, sample=sample, parity=lax.rem(wave, 2), next=following).run()
            return ()

        lax.fori_loop(0, lax.div(tasks - 1 - first + stride, stride), step, ())
        plgpu.wait_smem_to_gmem(0)

    return launch(
        run,
        program,
        plan,
        results,
        arrays,
        of_row=(samples, plan.positions, blocks, int(plan.block)),
        scratch={
            "chunks": {value: plgpu.SMEM((slots, *(of_slot if interprets() else (math.prod(of_slot),))), rows.dtype)},
            "full": plgpu.Barrier(num_arrivals=1, num_barriers=slots),
        },
        grid={"persistent_cta": persistent_ctas(int(plan.cluster), ctas, tasks)},
    )
