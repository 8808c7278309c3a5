"""The reduction of split-K: XLA adds what a launch left of each split in device memory, with the epilogue."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import jax

from search_spaces.matmul.problem import MatmulProblem
from search_spaces.problem import Arrays


def reduced(p: MatmulProblem, split_k: int, splits: jax.Array, args: Sequence[jax.Array]) -> Arrays:
    """The results from the accumulators ``[split_k * batch, m, n]`` of all splits, added in order, rounded once."""
    acc = added(splits.reshape(split_k, *p.whole.shape))
    return p.cut(p.apply_epilogue(acc, args).astype(p.whole.dtype))


def added(splits: jax.Array) -> jax.Array:
    """The sum of ``[split_k, ...]`` over splits, first to last: the same bits each time."""
    return functools.reduce(operator.add, (splits[split] for split in range(splits.shape[0])))
