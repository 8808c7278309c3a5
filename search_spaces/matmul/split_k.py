"""The reduction of split-K: XLA adds the partial sums that a launch left in device memory, and applies the epilogue."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import jax

from search_spaces.matmul.problem import MatmulProblem
from search_spaces.problem import Arrays


def reduced(p: MatmulProblem, split_k: int, splits: jax.Array, args: Sequence[jax.Array]) -> Arrays:
    """Reduces the accumulators ``[split_k * batch, m, n]`` of all splits in order, and rounds the results once."""
    acc = added(splits.reshape(split_k, *p.whole.shape))
    return p.cut(p.apply_epilogue(acc, args).astype(p.whole.dtype))


def added(splits: jax.Array) -> jax.Array:
    """Sums ``[split_k, ...]`` over splits, first to last, so that the result is deterministic."""
    return functools.reduce(operator.add, (splits[split] for split in range(splits.shape[0])))
