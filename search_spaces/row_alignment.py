"""Alignment of the rows of arrays in memory, and whether a product contracts rows: both decide how fast they load."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

if TYPE_CHECKING:
    from search_spaces.problem import Problem

# TMA and vector loads need rows that begin at multiples of these bytes (CUDA driver API, cuTensorMapEncodeTiled).
ROW_BYTES = 16


def row_alignment(array: Any) -> int:
    """Returns the largest power of two, up to `ROW_BYTES`, that divides the bytes of a row of an array or its shape."""
    return math.gcd(array.shape[-1] * jnp.dtype(array.dtype).itemsize, ROW_BYTES) if len(array.shape) > 1 else ROW_BYTES


def contracts_rows(problem: Problem, index: int) -> bool:
    """Returns whether a product contracts the last axis of its operand `index`; True for other problems."""
    numbers = problem.dimension_numbers
    return numbers is None or len(problem.operands()[index].shape) - 1 in numbers[0][index]
