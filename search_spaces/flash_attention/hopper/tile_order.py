"""The tiles that a CTA computes, and the blocks of keys of each tile."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from search_spaces.attention.problem import Lengths
from search_spaces.flash_attention.hopper.tiling import Tiling, round_heads

WHOLE = Lengths()


class Tile(NamedTuple):
    """A tile of queries, and its blocks of keys in descending order, so that causally masked blocks come first.

    Attributes:
      batch, head: of the queries.
      row: index of the first query.
      last: the block of the first step.
      steps: number of steps of all consumers, at least one. In a step without visible keys, all keys are masked.
      masked, unmasked: steps from `masked` to before `unmasked` need no mask: all queries see the whole block.
      q_len, kv_len: number of queries of the sequence that see a key, and of keys that a query sees.
    """

    batch: Any
    head: Any
    row: Any
    last: Any
    steps: Any
    masked: Any
    unmasked: Any
    q_len: Any
    kv_len: Any


@dataclasses.dataclass(frozen=True)
class TileOrder:
    """The tiles of one CTA.

    Attributes:
      t: the tiling.
      cta, ctas: index of this CTA in the grid, and number of CTAs.
      lengths: references to the lengths in device memory.
    """

    t: Tiling
    cta: Any
    ctas: int
    lengths: Lengths = WHOLE

    @property
    def count(self) -> Any:
        """Number of tiles of this CTA."""
        rounds, rest = divmod(self.t.tiles, self.ctas)
        return rounds + (self._place(rounds) < rest).astype(jnp.int32) if rest else jnp.int32(rounds)

    def tile(self, position: Any) -> Tile:
        """Returns the tile at `position` in the order of this CTA, clamped to the last tile of the launch."""
        t, s = self.t, self.t.s
        number = jnp.minimum(position * self.ctas + self._place(position), t.tiles - 1)
        if s.order == "plain":
            head, q_tile = lax.div(number, t.q_tiles), lax.rem(number, t.q_tiles)
            if s.persistent and t.idles:  # Distributes the last tiles of heads, which take less time, over all CTAs.
                q_tile = lax.rem(q_tile + lax.div(head, int(round_heads(self.ctas, t.q_tiles))), t.q_tiles)
        else:
            section, within = lax.div(number, s.section * t.q_tiles), lax.rem(number, s.section * t.q_tiles)
            first, heads = section * s.section, s.section
            if t.heads % s.section:  # The last section has the remaining heads.
                heads = jnp.minimum(heads, t.heads - first)
            head = first + lax.rem(within, heads)
            q_tile = t.q_tiles - 1 - lax.div(within, heads)
        return self._blocks(lax.div(head, t.p.heads), lax.rem(head, t.p.heads), q_tile * t.rows)

    def _place(self, position: Any) -> Any:
        """Returns the index of this CTA among the CTAs in the round `position`."""
        if self.t.s.order != "snake":
            return self.cta
        return jnp.where(lax.rem(position, 2) == 0, self.cta, self.ctas - 1 - self.cta)

    def _blocks(self, batch: Any, head: Any, row: Any) -> Tile:
        p, size, end = self.t.p, self.t.s.block_kv, row + self.t.rows
        q_len, kv_len = p.counted(Lengths(*(None if x is None else x[batch] for x in self.lengths)))
        # Some query sees blocks in [first, last]; all queries see blocks in [whole, whole_end).
        keys = kv_len if p.right is None else jnp.minimum(end + p.right, kv_len)
        last = jnp.maximum(_blocks_up_to(keys, size) - 1, 0)
        first = jnp.int32(0) if p.left is None else jnp.clip(lax.div(jnp.maximum(row - p.left, 0), size), 0, last)
        whole_keys = kv_len if p.right is None else jnp.minimum(row + p.right + 1, kv_len)
        whole_end = lax.div(jnp.int32(whole_keys), size)
        whole = jnp.int32(0) if p.left is None else _blocks_up_to(jnp.maximum(end - 1 - p.left, 0), size)
        steps = last - first + 1
        if p.q_lengths:
            steps = jnp.where(row < q_len, steps, 1)
        masked = jnp.clip(last + 1 - whole_end, 1, steps)
        unmasked = jnp.clip(last + 1 - whole, masked, steps)
        return Tile(batch, head, row, last, steps, masked, unmasked, q_len, kv_len)


def _blocks_up_to(keys: Any, size: int) -> Any:
    return lax.div(jnp.int32(keys) + (size - 1), size)
