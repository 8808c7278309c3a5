"""Operands that wgmma cannot read as they lie: XLA turns them, before the launch, so that k is their last axis."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from search_spaces.footprint import Footprint
from search_spaces.matmul.problem import MatmulProblem
from search_spaces.problem import nbytes


def k_last(p: MatmulProblem) -> MatmulProblem:
    """What a launch computes of `p`: 16-bit operands as they lie, of others only those whose last axis is k.

    wgmma reads these from shared memory in that order alone (PTX ISA, asynchronous warpgroup level matrix).
    """
    if jnp.dtype(p.dtype).itemsize == 2:
        return p
    return dataclasses.replace(p, transpose_a=False, transpose_b=True)


def turned(p: MatmulProblem, args: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """The operands of `k_last(p)`, of those of `p`."""
    a, b, *rest = args
    a, b = (jnp.swapaxes(x, -1, -2) if turns else x for x, turns in zip((a, b), _turns(p), strict=True))
    return a, b, *rest


def with_turning(p: MatmulProblem, launch: Footprint) -> Footprint:
    """The footprint of `launch` and of the copies before it, each read once and written once.

    Matrices of a single row or column lie the same either way.
    """
    copied: list[Any] = [
        2.0 * nbytes(x) for x, turns in zip(p.operands()[:2], _turns(p), strict=True) if turns and 1 not in x.shape[-2:]
    ]
    return dataclasses.replace(
        launch, copied_bytes=launch.copied_bytes + sum(copied), launches=launch.launches + len(copied)
    )


def _turns(p: MatmulProblem) -> tuple[bool, bool]:
    """Of `a` and of `b`, whether it is turned."""
    launch = k_last(p)
    return p.transpose_a != launch.transpose_a, p.transpose_b != launch.transpose_b
