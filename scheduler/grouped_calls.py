"""The public functions of grouped products, `tuned_ragged_dot` and `tuned_gated_ragged_dot`."""

from __future__ import annotations

from typing import Any, Unpack

import jax

from scheduler.dispatch import calls
from scheduler.tuned_calls import Selection, public, selected
from search_spaces.matmul.epilogue import Activation
from search_spaces.ragged_dot import GATED_RAGGED_DOT, RAGGED_DOT


@public(RAGGED_DOT)
def tuned_ragged_dot(
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    *,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: Any = None,
    transpose_rhs: bool = False,
    distribution: str = "",
    **selection: Unpack[Selection],
) -> jax.Array:
    """Multiplies the rows of each group by the matrix of that group (`jax.lax.ragged_dot`), with the best schedule.

    A group's rows are adjacent: group 0 has the first ``group_sizes[0]`` rows of `lhs`, and so on. Rows after the last
    group are zeros in the result. Sums are float32 and the result is rounded once.

    Works wherever `tuned_matmul` works. Products of the backward pass are tuned calls, too: of this operation for
    `lhs`, and of "ragged_dot_weights" for `rhs`. The call falls back to XLA for empty operands, for two dtypes, for
    float32 with a `precision` that is not the default, and for 8-bit operands without a `preferred_element_type` of 16
    or 32 bits. Kernels for NVIDIA GPUs take 8-bit operands with `transpose_rhs`. Under
    `jax.vmap`, one call has the groups of all elements of the batch if both operands have them; a batch with different
    groups and the same matrices runs one call for each element. Devices may divide n and k, not rows. XLA may multiply
    all rows by all matrices, so that NaN or infinity in a matrix reaches rows of other groups; other kernels do not.

    Args:
      lhs: ``[rows, k]``.
      rhs: ``[groups, k, n]``.
      group_sizes: integers ``[groups]``, none negative.
      precision: as in `tuned_matmul`.
      preferred_element_type: dtype of the result; None means the dtype of the operands.
      group_offset: an integer in an array of one element: `rhs` has the matrices of the groups from this one on, and
        rows of other groups are zeros in the result. `group_sizes` may then have more groups than `rhs`, for experts
        that devices divide. `jax.lax.ragged_dot` raises NotImplementedError.
      transpose_rhs: `rhs` is ``[groups, n, k]``. It is read in that layout without a copy if the hardware supports it.
      distribution: the sizes for which the schedule was tuned: "balanced", "skewed" (in proportion to 1/2, 1/3, ...),
        "half_empty", or recorded sizes, "256+0+128". "" means the mean time over the three names. It changes no result.
      on_miss, backends, schedule: as in `tuned_matmul`.

    Returns:
      An array ``[rows, n]``.

    Raises:
      TypeError: as in `jax.lax.ragged_dot`; also for a `group_offset` of another shape or dtype.
      ValueError: `distribution` is no name, and no sizes of so many groups and at most so many rows.
      NotImplementedError: as in `jax.lax.ragged_dot`, for arrays on a mesh with explicit axes, outside of `shard_map`.
      CacheMiss, NoCandidate, IllegalSchedule: as in `tuned_matmul`.
    """
    options = (precision, preferred_element_type, calls.flag("transpose_rhs", transpose_rhs), distribution)
    return calls.answer(
        _RAGGED_CALLED, (*selected(tuned_ragged_dot, selection), *options), lhs, rhs, group_sizes, group_offset
    )


_RAGGED_CALLED = calls.Signature(
    RAGGED_DOT, ("precision", "preferred_element_type", "transpose_rhs", "distribution"), last=("group_offset",)
)


@public(GATED_RAGGED_DOT)
def tuned_gated_ragged_dot(
    x: Any,
    w_gate: Any,
    w_up: Any,
    group_sizes: Any,
    *,
    activation: Activation = "silu",
    preferred_element_type: Any = None,
    group_offset: Any = None,
    transpose_rhs: bool = False,
    distribution: str = "",
    **selection: Unpack[Selection],
) -> jax.Array:
    """Computes ``activation(x @ w_gate[g]) * (x @ w_up[g])`` for the rows of each group g, with the best schedule.

    Groups are those of `tuned_ragged_dot`, and rows of no group are zeros in the result. Sums, activation and the
    product of both factors are float32, and the result is rounded once. An XLA program that rounds after each step, as
    users write it, is used if it was measured to be the fastest. Under a derivative, kernels of `tuned_ragged_dot`
    compute all products, and the backward pass saves those of the forward pass.

    Args:
      x: ``[rows, k]``.
      w_gate, w_up: ``[groups, k, n]`` each.
      group_sizes, preferred_element_type, group_offset, distribution: as in `tuned_ragged_dot`.
      activation: "silu", "gelu" (the tanh form) or "relu".
      transpose_rhs: `w_gate` and `w_up` are ``[groups, n, k]``.
      on_miss, backends, schedule: as in `tuned_matmul`.

    Returns:
      An array ``[rows, n]``.

    Raises:
      TypeError, ValueError: as in `tuned_ragged_dot`; also for an unknown activation, weights of two shapes, and
        integer, 8-bit or complex operands.
      CacheMiss, NoCandidate, IllegalSchedule: as in `tuned_matmul`.
    """
    options = (activation, preferred_element_type, calls.flag("transpose_rhs", transpose_rhs), distribution)
    call_options = (*selected(tuned_gated_ragged_dot, selection), *options)
    return calls.answer(_GATED_RAGGED_CALLED, call_options, x, w_gate, w_up, group_sizes, group_offset)


_GATED_RAGGED_CALLED = calls.Signature(
    GATED_RAGGED_DOT,
    ("activation", "preferred_element_type", "transpose_rhs", "distribution"),
    last=("group_offset",),
)
