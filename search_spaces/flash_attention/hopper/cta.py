"""The state of a CTA (arrays, barriers, tiles), and the online softmax of the rows of a warpgroup."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces.attention.hopper import LEAST
from search_spaces.flash_attention.hopper.schedule import TileOrder, Tiling
from search_spaces.hopper import WGMMA_ROWS
from search_spaces.hopper.smem_layout import SmemTile
from search_spaces.jax_compat import plgpu

# ------------------------------------------------------------------------------
# Online softmax of a warpgroup's rows. Maxima are reduced at every step, sums over lanes only at the end.

LOG2_E = math.log2(math.e)
# Columns of a sum that is spread over lanes: two for each of the four lanes of a row (PTX ISA, wgmma fragments).
COLUMNS = 8


class RowState(NamedTuple):
    """The softmax state of rows after some blocks of keys.

    Attributes:
      most: ``float32[64]``, the largest logit times log2(e).
      total: ``float32[64, 8]``; its row sums are the sums of exponentials relative to `most`.
    """

    most: Any
    total: Any


@dataclasses.dataclass(frozen=True)
class OnlineSoftmax:
    """Online softmax of logits ``scale * q k``, or of capped logits.

    Attributes:
      scale: of logits.
      cap: logits are ``cap * tanh(scale * q k / cap)``; None means no cap.
    """

    scale: float
    cap: float | None

    def start(self) -> RowState:
        layout = plgpu.Layout.WGMMA
        most = plgpu.layout_cast(jnp.full((WGMMA_ROWS,), LEAST, jnp.float32), layout.reduce(1))
        return RowState(most, plgpu.layout_cast(jnp.zeros((WGMMA_ROWS, COLUMNS), jnp.float32), layout))

    def step(self, s: Any, before: RowState, seen: Any) -> tuple[Any, RowState, Any]:
        """Returns the exponentials of a block's logits, the updated state, and the factor for previous sums of values.

        Args:
          s: ``float32[64, block_kv]``, products of queries and keys.
          before: state after the previous blocks.
          seen: mask of visible keys; None means all.
        """
        factor = self.scale * LOG2_E
        if self.cap is not None:
            s, factor = jnp.tanh(s * (self.scale / self.cap)), self.cap * LOG2_E
        elif self.scale <= 0:  # The maximum is taken before scaling, which requires a positive scale.
            s, factor = s * factor, 1.0
        if seen is not None:
            s = jnp.where(seen, s, -jnp.inf)
        most = jnp.maximum(before.most, s.max(axis=1) * factor)
        rescale = jnp.exp2(before.most - most)
        p = jnp.exp2(s * factor - over_columns(most, s))
        return p, RowState(most, before.total * over_columns(rescale, before.total) + _partial_sum(p)), rescale

    def end(self, state: RowState, o: Any, there: Any, all_see: bool) -> tuple[Any, Any]:
        """Returns the result and the log-sum-exp of each row; 0 and minus infinity for rows without visible keys.

        Args:
          state: after all blocks.
          o: ``float32[64, value_dim]``, the weighted sum of values.
          there: ``bool[64]``, mask of valid rows; None means all.
          all_see: whether each row sees a key. Otherwise `o` of the other rows may be NaN.
        """
        total = state.total.sum(axis=1)
        some = total != 0  # true for NaN, so that NaN logits give NaN results
        if there is not None:
            some = some & there
        inverse = jnp.where(some, 1.0 / total, 0.0)
        lse = jnp.where(some, (state.most + jnp.log2(total)) * (1 / LOG2_E), -jnp.inf)
        factor = over_columns(inverse, o)
        return o * factor if all_see else jnp.where(factor != 0, o * factor, 0.0), lse


def over_columns(x: jax.Array, like: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(x, like.shape, [0])


def _partial_sum(p: jax.Array) -> jax.Array:
    """Returns partial row sums ``[64, 8]``, without sums over lanes, by a tree of additions."""
    parts = [p[:, first : first + COLUMNS] for first in range(0, p.shape[1], COLUMNS)]
    while len(parts) > 1:
        pairs = [a + b for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[2 * len(pairs) :]
    return parts[0]


def scratch(t: Tiling) -> dict[str, Any]:
    """Returns the shared memory and barriers of a CTA, by the names of the fields of `Cta`."""
    p, s = t.p, t.s

    def tiles(count: int, tile: SmemTile) -> Any:
        return plgpu.SMEM((count, *tile.shape), tile.dtype, transforms=tile.transforms)

    types = {
        "q_smem": tiles(s.consumers, t.q_tile),
        "k_smem": tiles(s.stages, t.k_tile),
        "v_smem": tiles(s.stages, t.v_tile),
    }
    if not t.out_in_q:
        types["out_smem"] = tiles(s.consumers, t.out_tile)
    if p.return_lse:
        types["lse_smem"] = plgpu.SMEM((s.consumers, WGMMA_ROWS), jnp.float32)
    return types | {
        "q_full": plgpu.Barrier(num_arrivals=t.q_tile.copies, num_barriers=s.consumers),
        "k_full": plgpu.Barrier(num_arrivals=t.k_tile.copies, num_barriers=s.stages),
        "v_full": plgpu.Barrier(num_arrivals=t.v_tile.copies, num_barriers=s.stages),
        "k_empty": plgpu.Barrier(num_arrivals=s.consumers, num_barriers=s.stages),
        "v_empty": plgpu.Barrier(num_arrivals=s.consumers, num_barriers=s.stages),
    }


@dataclasses.dataclass(frozen=True)
class Cta:
    """A CTA of a launch.

    Attributes:
      t, softmax: of the launch.
      order: the tiles of this CTA.
      q, k, v, out, lse: arrays in device memory; `lse` is None without `return_lse`.
      the others: see `scratch`. A "full" barrier completes when TMA has filled a stage, an "empty" barrier when all
        consumers have read it.
    """

    t: Tiling
    softmax: OnlineSoftmax
    order: TileOrder
    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any
    q_smem: Any
    k_smem: Any
    v_smem: Any
    q_full: Any
    k_full: Any
    v_full: Any
    k_empty: Any
    v_empty: Any
    out_smem: Any = None
    lse_smem: Any = None

    def stage(self, step: Any) -> Any:
        return lax.rem(step, jnp.int32(self.t.s.stages))


def results(t: Tiling) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the outputs of the kernel: the result, and the log-sum-exp with `return_lse`.

    TMA clips the rows of a tile that lie beyond the result. The log-sum-exp is padded to whole tiles, because a bulk
    copy of one axis is not clipped.
    """
    p = t.p
    out = p.array(p.batch, t.q_rows, p.heads, p.value_dim)
    return (out, p.array(p.batch, p.heads, int(t.q_tiles * t.rows), dtype="float32")) if p.return_lse else (out,)
