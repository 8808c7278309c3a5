"""The public function of norms over positions and channels, `tuned_group_norm`."""

from __future__ import annotations

from typing import Any, Unpack

import jax

from scheduler.dispatch import calls
from scheduler.tuned_calls import Selection, public, selected
from search_spaces.rows.channels import GROUP_NORM
from search_spaces.rows.formulas import EPS


@public(GROUP_NORM)
def tuned_group_norm(
    x: Any, weight: Any, bias: Any, *, groups: int, eps: float = EPS, **selection: Unpack[Selection]
) -> jax.Array:
    """Computes a group norm of arrays with channels last, with the best known schedule.

    The channels are divided into groups of adjacent ones. Mean and variance are those of a group at all positions of a
    sample. The computation is in float32 and the result is rounded once (Wu, He, arXiv:1803.08494).

    Works wherever `tuned_matmul` works. Derivatives are computed by XLA, and devices may divide the samples. The call
    falls back to XLA for dtypes other than float32, bfloat16 or float16, for empty arrays, and if `weight` and `bias`
    have different dtypes.

    Args:
      x: ``[samples, ..., channels]``.
      weight, bias: ``[channels]``, of the dtype of `x` or float32.
      groups: number of groups, which divides the channels.
      eps: a number, not an array; keeps groups of equal elements finite.
      on_miss, backends, schedule: as in `tuned_matmul`.

    Returns:
      An array of the shape and dtype of `x`.

    Raises:
      ValueError: `weight` or `bias` do not have one element for each channel, or `groups` does not divide the channels.
      CacheMiss, NoCandidate, IllegalSchedule, TypeError: as in `tuned_matmul`.
    """
    options = (*selected(tuned_group_norm, selection), groups, calls.number("eps", eps))
    return calls.answer(_GROUP_NORM, options, x, weight, bias)


_GROUP_NORM = calls.Signature(GROUP_NORM, ("groups", "eps"))
