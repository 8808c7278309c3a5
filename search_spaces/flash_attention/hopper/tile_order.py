"""Which tiles a CTA computes, and which blocks of keys each of them takes."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from search_spaces.attention.problem import Lengths
from search_spaces.flash_attention.hopper.tiling import Tiling, round_heads

WHOLE = Lengths()


class Tile(NamedTuple):
    """A tile of queries, and the blocks of keys that it takes: from the last one down, as masked ones come first.

    Attributes:
      batch, head: whose queries they are.
      row: number of the first query.
      last: the block of the first step.
      steps: that all consumers make, at least one. A query that sees no key sees none in there either.
      masked, unmasked: blocks of steps from `masked` to `unmasked`, first included, are seen by all queries as a whole.
      q_len, kv_len: of the sequence, queries that see a key, and keys that a query sees.
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
      cta, ctas: its number in the grid, and how many there are.
      lengths: in device memory.
    """

    t: Tiling
    cta: Any
    ctas: int
    lengths: Lengths = WHOLE

    @property
    def count(self) -> Any:
        """Tiles of this CTA."""
        rounds, rest = divmod(self.t.tiles, self.ctas)
        return rounds + (self._place(rounds) < rest).astype(jnp.int32) if rest else jnp.int32(rounds)

    def tile(self, position: Any) -> Tile:
        """The one that is computed at this position; beyond the last one that one again."""
        t, s = self.t, self.t.s
        number = jnp.minimum(position * self.ctas + self._place(position), t.tiles - 1)
        if s.order == "plain":
            head, q_tile = lax.div(number, t.q_tiles), lax.rem(number, t.q_tiles)
            if s.persistent and t.idles:  # Each CTA gets its share of last tiles, which take less time.
                q_tile = lax.rem(q_tile + lax.div(head, int(round_heads(self.ctas, t.q_tiles))), t.q_tiles)
        else:
            section, within = lax.div(number, s.section * t.q_tiles), lax.rem(number, s.section * t.q_tiles)
            first, heads = section * s.section, s.section
            if t.heads % s.section:  # The last section has what is left.
                heads = jnp.minimum(heads, t.heads - first)
            head = first + lax.rem(within, heads)
            q_tile = t.q_tiles - 1 - lax.div(within, heads)
        return self._blocks(lax.div(head, t.p.heads), lax.rem(head, t.p.heads), q_tile * t.rows)

    def _place(self, position: Any) -> Any:
        """Of this CTA among those that get a tile in that round."""
        if self.t.s.order != "snake":
            return self.cta
        return jnp.where(lax.rem(position, 2) == 0, self.cta, self.ctas - 1 - self.cta)

    def _blocks(self, batch: Any, head: Any, row: Any) -> Tile:
        p, size, end = self.t.p, self.t.s.block_kv, row + self.t.rows
        q_len, kv_len = p.counted(Lengths(*(None if x is None else x[batch] for x in self.lengths)))
        # Blocks in [first, last] are seen by some query, those in [whole, whole_end) by all of them.
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
