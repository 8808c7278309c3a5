"""A consumer warpgroup: products and softmax of 64 rows of queries, for a sequence of tiles.

**Code order that affects only speed** (visible only in SASS: tests/kernels/test_flash_attention_sass.py):

- ptxas hoists the wait for ``O += P V`` to the maximum of S, before all exponentials, unless a basic block ends in
  between. The wait for the keys of the next step is therefore placed there: it is a loop, and ends a basic block.
- P is rounded to 16 bits only after that wait. Otherwise the code would write registers that an instruction in flight
  reads, and ptxas would serialize all products (C7513).
- With head sizes above 128, O is rescaled between the issue of the two products, while those of S keep the tensor cores
  busy. An optimization barrier prevents LLVM from moving the rescaling to the end of the previous step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from search_spaces.attention import hopper
from search_spaces.attention.hopper import visible, zero_rows_from
from search_spaces.flash_attention.hopper.cta import Cta, RowState, over_columns
from search_spaces.flash_attention.hopper.schedule import Tile
from search_spaces.hopper import WGMMA_ROWS, synchronization
from search_spaces.hopper.synchronization import Turns, synchronize_warpgroup
from search_spaces.jax_compat import plgpu


class Carry(NamedTuple):
    """The state that a step passes to the next step.

    Attributes:
      o: ``float32[64, value_dim]``, the weighted sum of values of all blocks except the last one.
      rows: softmax state after all blocks so far.
      p: probabilities of the last block, in 16 bits.
      rescale: pending factor of `o`; None if `o` is already rescaled.
    """

    o: Any
    rows: RowState
    p: Any
    rescale: Any


@dataclasses.dataclass(frozen=True)
class Consumer:
    """A consumer warpgroup of a CTA; `warpgroup` is its index among the consumers."""

    cta: Cta
    warpgroup: Any

    @property
    def turns(self) -> Turns | None:
        return Turns(self.cta.t.s.consumers) if self.cta.t.s.ping_pong else None

    def run(self) -> None:
        cta = self.cta
        tile = cta.order.tile(jnp.int32(0))
        self.load_q(tile)
        if self.turns:
            self.turns.start(self.warpgroup)
        carry = self.first_step(tile)
        if cta.t.s.persistent:
            lax.fori_loop(0, cta.order.count, self.tile_and_next_start, (carry, jnp.int32(0)))
        else:
            carry = self.later_steps(tile, carry, jnp.int32(0))
            o = self.last_product(carry, tile.steps - 1, self.seen_values(tile, tile.steps == 1))
            self.store(tile, o, carry.rows)
        if self.turns:
            self.turns.end(self.warpgroup)
        plgpu.wait_smem_to_gmem(0)

    def tile_and_next_start(self, position: Any, state: tuple[Carry, Any]) -> tuple[Carry, Any]:
        """Runs the steps of a tile after the first, then its last product with the first step of the next tile."""
        order = self.cta.order
        carry, base = state
        tile, following = order.tile(position), order.tile(position + 1)
        more = position + 1 < order.count
        carry = self.later_steps(tile, carry, base, position + 1)
        base = base + tile.steps

        @pl.when(more)
        def wait_for_q() -> None:
            plgpu.barrier_wait(self.cta.q_full.at[self.warpgroup])

        after = self.step(
            carry,
            base,
            seen=self.seen(following, jnp.int32(0)),
            reads_keys=more,
            keys_follow=more & ((following.steps > 1) | (position + 2 < order.count)),
            seen_values=self.seen_values(tile, tile.steps == 1),
            new_tile=True,
            after_keys=lambda: self.load_next_q(following.steps == 1, position + 2),
        )
        self.store(tile, after.o, carry.rows)
        zeros = plgpu.layout_cast(jnp.zeros_like(after.o), plgpu.Layout.WGMMA)
        return after._replace(o=zeros), base

    def row(self, tile: Tile) -> Any:
        """Returns the index of this warpgroup's first query."""
        return tile.row + self.warpgroup * WGMMA_ROWS

    def load_q(self, tile: Tile) -> None:
        cta = self.cta
        place = tile.batch, self.row(tile), tile.head
        hopper.load_head_rows(cta.t.q_tile, cta.q, place, cta.q_smem.at[self.warpgroup], cta.q_full.at[self.warpgroup])

    def seen(self, tile: Tile, j: Any) -> Any:
        """Returns the mask of visible keys in the block of step `j`; None if no block of the problem needs a mask."""
        p, size = self.cta.t.p, self.cta.t.s.block_kv
        return visible(
            (WGMMA_ROWS, size),
            self.row(tile),
            (tile.last - j) * size,
            left=p.left,
            right=p.right,
            columns=tile.kv_len if self.cta.t.masks_end else None,
        )

    def seen_values(self, tile: Tile, first: Any) -> Any:
        """Returns the number of visible rows of values in a step; None if the problem pads no keys.

        Args:
          first: whether this is the first step of the tile, with the last block of keys.
        """
        t = self.cta.t
        return jnp.where(first, tile.kv_len - tile.last * t.s.block_kv, t.s.block_kv) if t.p.pads_keys else None

    def wait_for_keys(self, step: Any) -> None:
        plgpu.barrier_wait(self.cta.k_full.at[self.cta.stage(step)])

    def with_logits(self, use: Callable[[Any], Any]) -> Any:
        """Calls `use` with accumulators for products of keys, or with None if the products are values (untiled)."""
        if self.cta.t.untiled:
            return use(None)
        return pl.run_scoped(use, plgpu.ACC((WGMMA_ROWS, self.cta.t.s.block_kv), jnp.float32))

    def start_product_of_keys(self, acc: Any, step: Any) -> Any:
        """Starts ``q k^T`` and returns the operand of `wait_for_logits`."""
        t, q, k = self.cta.t, self.cta.q_smem.at[self.warpgroup], self.cta.k_smem.at[self.cta.stage(step)]
        if acc is None:
            return hopper.start_product(
                None,
                q,
                k,
                columns=t.s.block_kv,
                transforms=(t.q_tile.transforms, t.k_tile.transforms),
                transpose_a=False,
                transpose_b=True,
            )
        plgpu.wgmma(acc, q, k.transpose((1, 0)))
        return acc

    def wait_for_logits(self, started: Any, pending: int) -> Any:
        """Waits until at most `pending` later groups are in flight, and returns the products."""
        if self.cta.t.untiled:
            return synchronization.wait_wgmma(pending, started)
        return plgpu.wgmma_accumulator_load(started, wait_n=pending) if pending else started[...]

    def start_product_of_values(self, o: Any, p: Any, step: Any, seen_values: Any) -> Any:
        cta, stage = self.cta, self.cta.stage(step)
        plgpu.barrier_wait(cta.v_full.at[stage])
        if seen_values is not None:
            zero_rows_from(seen_values, cta.t.v_tile, cta.v_smem.at[stage])
        return hopper.start_register_wgmma(o, p, cta.v_smem.at[stage], cta.t.swizzle(cta.t.p.value_dim))

    def first_step(self, tile: Tile) -> Carry:
        """Runs the first step of the CTA, which has no previous product to overlap."""
        cta, p, s = self.cta, self.cta.t.p, self.cta.t.s
        plgpu.barrier_wait(cta.q_full.at[self.warpgroup])
        self.wait_for_keys(jnp.int32(0))

        def product(acc: Any) -> Any:
            return self.wait_for_logits(self.start_product_of_keys(acc, jnp.int32(0)), 0)

        logits = self.with_logits(product)
        plgpu.barrier_arrive(cta.k_empty.at[0])
        if s.persistent:
            self.load_next_q(tile.steps == 1, jnp.int32(1))

        @pl.when((tile.steps > 1) | (bool(s.persistent) & (cta.order.count > 1)))
        def wait() -> None:
            self.wait_for_keys(jnp.int32(1))

        softmax = cta.softmax
        exponentials, rows, rescale = softmax.step(logits, softmax.start(), self.seen(tile, jnp.int32(0)))
        o = plgpu.layout_cast(jnp.zeros((WGMMA_ROWS, p.value_dim), jnp.float32), plgpu.Layout.WGMMA)
        return Carry(o, rows, exponentials.astype(p.dtype), rescale if cta.t.early_rescale else None)

    def load_next_q(self, last_step: Any, position: Any) -> None:
        """Loads the queries of the tile at `position`, if it exists and `last_step` has read the current queries."""

        @pl.when(last_step & (position < self.cta.order.count))
        def load() -> None:
            synchronize_warpgroup()
            self.load_q(self.cta.order.tile(position))

    def later_steps(self, tile: Tile, carry: Carry, base: Any, following: Any = None) -> Carry:
        """Runs all steps of a tile except the first: masked blocks, then whole blocks, then masked blocks again.

        A warpgroup without queries only takes part in barriers, and leaves the tensor cores to the others.

        Args:
          base: index of the tile's first step among the steps of the CTA.
          following: position of the next tile, which may be beyond the last; None if CTAs have one tile each.
        """
        p = self.cta.t.p
        more = False if following is None else following < self.cta.order.count

        def step(masked: bool, idle: bool = False) -> Callable[[Any, Carry], Carry]:
            def one(j: Any, carry: Carry) -> Carry:
                last = j + 1 >= tile.steps
                keys_follow = jnp.logical_not(last) | more
                after_keys = None if following is None else lambda: self.load_next_q(last, following)
                if idle:
                    self.idle_step(base + j, keys_follow, after_keys)
                    return carry
                seen = self.seen(tile, j) if masked else None
                return self.step(
                    carry,
                    base + j,
                    seen=seen,
                    keys_follow=keys_follow,
                    seen_values=self.seen_values(tile, j == 1),
                    after_keys=after_keys,
                )

            return one

        masked, unmasked, steps = tile.masked, tile.unmasked, tile.steps
        if self.cta.t.idles:
            there = self.row(tile) < tile.q_len
            masked, unmasked, steps = (jnp.where(there, end, 1) for end in (masked, unmasked, steps))
        if p.right is not None:
            carry = lax.fori_loop(1, masked, step(True), carry)
        start = 1 if p.right is None else masked
        carry = lax.fori_loop(start, steps if p.left is None else unmasked, step(False), carry)
        if p.left is not None:
            carry = lax.fori_loop(unmasked, steps, step(True), carry)
        return lax.fori_loop(steps, tile.steps, step(False, idle=True), carry) if self.cta.t.idles else carry

    def idle_step(self, step: Any, keys_follow: Any, after_keys: Callable[[], None] | None) -> None:
        """Runs the barriers of a `step` that other warpgroups wait for, without its products."""
        cta = self.cta
        if self.turns:
            self.turns.take()
            self.turns.give()
        plgpu.barrier_arrive(cta.k_empty.at[cta.stage(step)])
        plgpu.barrier_wait(cta.v_full.at[cta.stage(step - 1)])
        plgpu.barrier_arrive(cta.v_empty.at[cta.stage(step - 1)])
        if after_keys:
            after_keys()

        @pl.when(keys_follow)
        def wait() -> None:
            self.wait_for_keys(step + 1)

    def step(
        self,
        carry: Carry,
        step: Any,
        *,
        seen: Any,
        keys_follow: Any,
        seen_values: Any,
        reads_keys: Any = True,
        new_tile: bool = False,
        after_keys: Callable[[], None] | None = None,
    ) -> Carry:
        """Multiplies this step's keys and the previous step's values; computes the softmax during the second product.

        Args:
          carry: from the previous step.
          step: index among the steps of the CTA. Its keys have arrived.
          seen: mask of visible keys; None means all.
          keys_follow: whether a step follows, so that this step waits for its keys.
          seen_values: of the previous step, see the method `seen_values`.
          reads_keys: whether the keys belong to a tile; if not, their stage is not released.
          new_tile: whether this is the first step of a tile. The returned `o` then belongs to the previous tile.
          after_keys: called when the products of keys are complete.
        """
        cta, early = self.cta, self.cta.t.early_rescale
        softmax = cta.softmax

        def both_products(acc: Any) -> tuple[Any, ...]:
            o = carry.o
            if self.turns:
                self.turns.take()
            started = self.start_product_of_keys(acc, step)
            if early:
                o, rescale = lax.optimization_barrier((o, carry.rescale))
                o = o * over_columns(rescale, o)
            o = self.start_product_of_values(o, carry.p, step - 1, seen_values)
            if self.turns:
                self.turns.give()
            s = self.wait_for_logits(started, 1)

            @pl.when(reads_keys)
            def release() -> None:
                plgpu.barrier_arrive(cta.k_empty.at[cta.stage(step)])

            if after_keys:
                after_keys()
            results = softmax.step(s, softmax.start() if new_tile else carry.rows, seen)
            exponentials, rows, rescale = lax.optimization_barrier(results)

            @pl.when(keys_follow)
            def wait() -> None:
                self.wait_for_keys(step + 1)

            o = hopper.finish_register_wgmma(o)
            plgpu.barrier_arrive(cta.v_empty.at[cta.stage(step - 1)])
            if not early and not new_tile:
                o = o * over_columns(rescale, o)
            return Carry(o, rows, exponentials.astype(cta.t.p.dtype), rescale if early else None)

        after: Carry = self.with_logits(both_products)
        return after

    def last_product(self, carry: Carry, step: Any, seen_values: Any) -> Any:
        """Adds the product of the last block and returns the complete `o`, if no tile follows."""
        o = carry.o
        if self.cta.t.early_rescale:
            o = o * over_columns(carry.rescale, o)
        o = hopper.finish_register_wgmma(self.start_product_of_values(o, carry.p, step, seen_values))
        plgpu.barrier_arrive(self.cta.v_empty.at[self.cta.stage(step)])
        return o

    def store(self, tile: Tile, o: Any, rows: RowState) -> None:
        """Starts to store the result and the log-sum-exp of a tile. TMA clips rows beyond the result."""
        cta, p = self.cta, self.cta.t.p
        row, there = self.row(tile), None
        if p.q_lengths:
            number = plgpu.broadcasted_iota(jnp.int32, (WGMMA_ROWS,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
            there = number < tile.q_len - row
        o, lse = cta.softmax.end(rows, o, there, p.every_query_sees)
        o = o.astype(p.dtype)
        staged, smem = cta.t.out_tile, (cta.q_smem if cta.t.out_in_q else cta.out_smem).at[self.warpgroup]
        width = staged.columns
        for first in range(0, p.value_dim, width):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            staged.store(smem, o if width == p.value_dim else o[:, first : first + width], transposed=False)
            if p.return_lse and first == 0:
                cta.lse_smem[self.warpgroup] = lse
            plgpu.commit_smem()
            hopper.store_head_rows(staged, cta.out, (tile.batch, row, tile.head), smem, column=first)
        if p.return_lse:
            rows_of_lse = cta.lse.at[tile.batch, tile.head, pl.ds(row, WGMMA_ROWS)]
            plgpu.copy_smem_to_gmem(cta.lse_smem.at[self.warpgroup], rows_of_lse)
