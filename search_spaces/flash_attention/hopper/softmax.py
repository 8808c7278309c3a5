"""Online softmax of a warpgroup's rows. Maxima are reduced at every step, sums over lanes only at the end."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces.attention.hopper.visibility import LEAST
from search_spaces.hopper.limits import WGMMA_ROWS
from search_spaces.jax_compat import plgpu

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
