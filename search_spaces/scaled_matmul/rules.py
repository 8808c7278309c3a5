"""The batching and sharding rules of a scaled matmul; its derivative is that of XLA's program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from search_spaces.scaled_matmul.problem import ScaledMatmulProblem
from search_spaces.sharding import Sharding
from search_spaces.unfolded import in_front


def batch(call: Callable[..., Any], p: ScaledMatmulProblem, args: Any, dims: Any) -> tuple[jax.Array, int] | None:
    """Merges batched rows into m, with batched or shared scales; returns None if `b` or its scales are batched."""
    a_dim, b_dim, a_scale_dim, b_scale_dim = dims
    if a_dim is None or b_dim is not None or b_scale_dim is not None:
        return None
    a, b, a_scale, b_scale = args
    size = a.shape[a_dim]
    many = dataclasses.replace(p, m=size * p.m)
    return call(many, in_front(a, a_dim, size), b, in_front(a_scale, a_scale_dim, size), b_scale), 0


def shard(p: ScaledMatmulProblem) -> Sharding[ScaledMatmulProblem]:
    """Returns the sharding rule: rows, and columns of `b` with scales by rows; blocks of 128 stay on one device."""
    b = "n k" if p.transpose_b else "k n"
    blocks = "blocks_n blocks_k" if p.transpose_b else "blocks_k blocks_n"
    a_scale = "m blocks_k" if p.a_scales == "blocks" else "m"
    by_rows = p.b_scales == "rows"
    return Sharding(
        f"m k, {b}, {a_scale}, {'n' if by_rows else blocks} -> m n", divided=("m", "n") if by_rows else ("m",)
    )
