"""The schedule of flash attention forward on Hopper, and its derived extents, tiles and numbers of steps."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from search_spaces.attention import hopper
from search_spaces.attention.problem import Lengths
from search_spaces.flash_attention.problem import FlashAttentionProblem
from search_spaces.hopper import WGMMA_ROWS
from search_spaces.hopper.smem_layout import SmemTile, Untiled
from search_spaces.space import cdiv


@dataclasses.dataclass(frozen=True)
class FlashAttentionSchedule:
    """How attention is divided among CTAs, warpgroups and pipeline steps.

    Attributes:
      consumers: consumer warpgroups per CTA, each with 64 rows of queries. A tile is ``64 * consumers`` rows of one
        head of one sequence.
      block_kv: keys and values per pipeline stage and per step of the main loop.
      stages: stages of the pipeline of keys, and of the pipeline of values. Loads run up to this many steps ahead; in a
        CTA with several tiles they continue into the next tile.
      ping_pong: consumers take turns to issue products, so that the softmax of one overlaps the products of another.
      persistent: the grid has one CTA per core, and each CTA computes a sequence of tiles. The last products of a tile
        are issued with the first products of the next tile, and overlap the store of the result.
      order: order of tiles. "plain": all tiles of a head, starting at its first query. "longest_first": within each
        section of heads, in descending order of visible keys. "snake": the same order, assigned to persistent CTAs
        alternately forwards and backwards, so that each CTA gets about the same work.
      section: number of heads, over all sequences, that share one order of tiles. The last section may be smaller.
      epi_tile_n: columns of the result that a consumer stages in shared memory at a time.
    """

    consumers: int
    block_kv: int
    stages: int
    ping_pong: bool
    persistent: bool
    order: str
    section: int
    epi_tile_n: int


# ------------------------------------------------------------------------------
# Extents of a launch, for one schedule or for columns of schedules.

# Registers per thread of a consumer and of the producer, by the number of consumers. The values are those of
# FlashAttention-3 (hopper/flash_fwd_kernel_sm90.h). Each thread of a CTA of n + 1 warpgroups starts with
# 65,536 / (128 n + 128) registers; the consumers share those that the producer releases.
REGISTERS = {1: (240, 56), 2: (240, 24), 3: (160, 32)}
# Above this head size, the result is rescaled between the issue of Q K^T and of P V, as in FlashAttention-3.
EARLY_RESCALE_ABOVE = 128


def round_heads(ctas: int, q_tiles: Any) -> Any:
    """Returns the fewest heads of `q_tiles` tiles each that give each of `ctas` persistent CTAs equally many tiles."""
    return ctas // np.gcd(ctas, q_tiles)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The tiling of a problem by a schedule, or by columns of schedules.

    Attributes:
      p, s: the problem and the schedule.
    """

    p: FlashAttentionProblem
    s: Any

    @property
    def itemsize(self) -> int:
        return int(jnp.dtype(self.p.dtype).itemsize)

    @property
    def rows(self) -> Any:
        """Queries per tile."""
        return self.s.consumers * WGMMA_ROWS

    @property
    def q_tiles(self) -> Any:
        """Tiles per head."""
        return cdiv(self.p.q_len, self.rows)

    @property
    def computed_rows(self) -> Any:
        """Mean rows per tile that consumers compute. In the last tile of a head, consumers without queries are idle."""
        return cdiv(self.p.q_len, WGMMA_ROWS) * WGMMA_ROWS / self.q_tiles

    @property
    def idles(self) -> bool:
        """Whether a tile may have consumers without a query."""
        return bool(self.p.q_lengths or self.computed_rows < self.rows)

    @property
    def kv_blocks(self) -> Any:
        """Blocks of keys per sequence."""
        return cdiv(self.p.kv_len, self.s.block_kv)

    @property
    def heads(self) -> int:
        """Number of heads of all sequences."""
        return self.p.batch * self.p.heads

    @property
    def tiles(self) -> Any:
        return self.heads * self.q_tiles

    @property
    def out_in_q(self) -> Any:
        """Whether the result is staged in the shared memory of q, which is then unused."""
        return (self.s.persistent == 0) & (self.p.value_dim == self.p.head_dim)

    @property
    def layout(self) -> type[SmemTile]:
        """Layout of all tiles in shared memory."""
        return hopper.head_layout(self.p.q_len, self.p.kv_len)

    @property
    def untiled(self) -> bool:
        return self.layout is Untiled

    @property
    def q_rows(self) -> int:
        """Rows of q and the result in device memory, padded as TMA requires."""
        return hopper.head_length(self.layout, self.p.q_len)

    @property
    def kv_rows(self) -> int:
        return hopper.head_length(self.layout, self.p.kv_len)

    def smem_tile(self, rows: int, columns: int) -> SmemTile:
        return self.layout(rows, columns, jnp.dtype(self.p.dtype), self.swizzle(columns))

    @property
    def q_tile(self) -> SmemTile:
        """The queries of one consumer."""
        return self.smem_tile(WGMMA_ROWS, self.p.head_dim)

    @property
    def k_tile(self) -> SmemTile:
        """The keys of one stage."""
        return self.smem_tile(self.s.block_kv, self.p.head_dim)

    @property
    def v_tile(self) -> SmemTile:
        return self.smem_tile(self.s.block_kv, self.p.value_dim)

    @property
    def out_tile(self) -> SmemTile:
        """The part of the result that a consumer stages at a time."""
        return self.q_tile if self.out_in_q else self.smem_tile(WGMMA_ROWS, self.s.epi_tile_n)

    @property
    def masks_end(self) -> bool:
        """Whether to mask keys beyond the last one.

        With tiled layouts this is also true if no query sees beyond the last key.
        """
        p = self.p
        unseen = self.untiled and p.right is not None and p.q_len + p.right <= p.kv_len
        return p.kv_lengths or (p.kv_len % self.s.block_kv > 0 and not unseen)

    @property
    def early_rescale(self) -> bool:
        return self.p.head_dim > EARLY_RESCALE_ABOVE

    def swizzle(self, columns: int) -> int:
        """Returns the bytes of the widest swizzled row that divides `columns` columns: 128, 64 or 32."""
        return next(width for width in (128, 64, 32) if columns * self.itemsize % width == 0)


# ------------------------------------------------------------------------------
# The tiles that a CTA computes, and the blocks of keys of each tile.

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


# ------------------------------------------------------------------------------
# Numbers of steps per tile and per CTA of a launch, for columns of schedules.

Array = npt.NDArray[np.float64]


def of_tiles(p: FlashAttentionProblem, rows: int, block_kv: int) -> Array:
    """Returns the number of blocks of keys of each tile of a head, in the order of its queries; see `TileOrder`."""
    row = np.arange(0, p.q_len, rows)
    keys = np.full_like(row, p.kv_len) if p.right is None else np.minimum(row + rows + p.right, p.kv_len)
    last = np.maximum(-(-keys // block_kv) - 1, 0)
    first = np.zeros_like(row) if p.left is None else np.clip(np.maximum(row - p.left, 0) // block_kv, 0, last)
    return np.asarray(last - first + 1, np.float64)


def mean_steps(p: FlashAttentionProblem, s: Any) -> Any:
    """Returns the mean number of steps of a tile."""
    return _each(lambda rows, block: float(of_tiles(p, rows, block).mean()), Tiling(p, s).rows, s.block_kv)


def shortest_steps(p: FlashAttentionProblem, s: Any) -> Any:
    """Returns the number of steps of the shortest tile."""
    return _each(lambda rows, block: float(of_tiles(p, rows, block).min()), Tiling(p, s).rows, s.block_kv)


def longest_steps_of_last(p: FlashAttentionProblem, s: Any, cores: int) -> Any:
    """Returns the number of steps of the longest tile among the last tiles, one per core; at least the mean.

    A section ends with the shortest tiles of all of its heads. With few heads per section, long tiles are among the
    last.
    """
    heads = p.batch * p.heads

    def count(rows: int, block: int, section: int, in_order: bool) -> float:
        steps = of_tiles(p, rows, block)
        last = steps.size if in_order else min(-(-cores // (heads % section or section)), steps.size)
        return max(float(np.sort(steps)[:last].max()), float(steps.mean()))

    return _each(count, Tiling(p, s).rows, s.block_kv, s.section, s.order == "plain")


def step_imbalance(p: FlashAttentionProblem, s: Any, cores: int, section: Any = None) -> Any:
    """Returns the steps of the busiest persistent CTA over the mean, if tiles are assigned in "snake" order.

    Args:
      cores: number of CTAs.
      section: heads per section; None means that of the schedule.
    """
    heads = p.batch * p.heads

    def ratio(rows: int, block: int, section: int) -> float:
        # A section has the tiles of a head, last tile first, each repeated once per head.
        longest_first = of_tiles(p, rows, block)[::-1]
        whole, left = np.tile(np.repeat(longest_first, section), heads // section), heads % section
        steps = np.concatenate([whole, np.repeat(longest_first, left)])
        rounds = -(-steps.size // cores)
        dealt = np.pad(steps, (0, rounds * cores - steps.size)).reshape(rounds, cores)
        dealt[1::2] = dealt[1::2, ::-1]
        return float(dealt.sum(axis=0).max() / dealt.sum(axis=0).mean())

    return _each(ratio, Tiling(p, s).rows, s.block_kv, s.section if section is None else section)


def _each(function: Any, *columns: Any) -> Any:
    """Maps a function of scalar fields over broadcast columns, with one call per distinct combination."""
    arrays = np.broadcast_arrays(*columns)
    keys = list(zip(*(array.ravel().tolist() for array in arrays), strict=True))
    known = {key: function(*key) for key in dict.fromkeys(keys)}
    return np.array([known[key] for key in keys]).reshape(arrays[0].shape)
