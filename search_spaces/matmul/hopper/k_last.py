"""Transposes operands that wgmma cannot read in place: before the launch, XLA makes k their last axis."""

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
    """Returns the matmul that a launch computes for `p`: 16-bit operands in place, others with k as their last axis.

    wgmma reads operands that are not 16-bit from shared memory in that order only (PTX ISA, asynchronous warpgroup
    level matrix).
    """
    if jnp.dtype(p.dtype).itemsize == 2:
        return p
    return dataclasses.replace(p, transpose_a=False, transpose_b=True)


def turned(p: MatmulProblem, args: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Converts the operands of `p` to those of `k_last(p)`."""
    a, b, *rest = args
    a, b = (jnp.swapaxes(x, -1, -2) if turns else x for x, turns in zip((a, b), _turns(p), strict=True))
    return a, b, *rest


def with_turning(p: MatmulProblem, launch: Footprint) -> Footprint:
    """Adds the copies before the launch to its footprint, each read once and written once.

    Matrices of a single row or column need no copy.
    """
    copied: list[Any] = [
        2.0 * nbytes(x) for x, turns in zip(p.operands()[:2], _turns(p), strict=True) if turns and 1 not in x.shape[-2:]
    ]
    return dataclasses.replace(
        launch, copied_bytes=launch.copied_bytes + sum(copied), launches=launch.launches + len(copied)
    )


def _turns(p: MatmulProblem) -> tuple[bool, bool]:
    """Whether `a` and `b` are transposed."""
    launch = k_last(p)
    return p.transpose_a != launch.transpose_a, p.transpose_b != launch.transpose_b
