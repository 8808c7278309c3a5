"""The matmul of scaled operands by XLA: the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces.kernel import Library, LibraryKernel
from search_spaces.problem import Tolerance
from search_spaces.scaled_matmul.problem import BLOCK, LARGEST_SCALE, ScaledMatmulProblem
from search_spaces.space import round_up
from search_spaces.target import Target


class XlaScaledMatmul(LibraryKernel[ScaledMatmulProblem]):
    """Two programs, "float32" and "plain".

    "float32" multiplies each block of k as stored, scales it and adds it up in float32; if no operand has scales by
    blocks, it is one product over all of k. "plain" is the program that users write: one product of operands that were
    scaled in bfloat16.
    """

    version = 1

    def programs(self, problem: ScaledMatmulProblem) -> tuple[str, ...]:
        return (Library.program, "plain")

    def tolerance(self, problem: ScaledMatmulProblem, schedule: Library) -> Tolerance:
        """Widens the tolerance of "plain" by the rounding of operands to bfloat16: up to 2^-9, relative, each."""
        exact = problem.tolerance()
        if schedule.program != "plain":
            return exact
        deviation = problem.k**0.5 * LARGEST_SCALE**2
        return Tolerance(absolute=exact.absolute + 6 * deviation * 2.0**-8, relative=exact.relative)

    def run(
        self, problem: ScaledMatmulProblem, schedule: Library, target: Target, /, *args: Any, **params: Any
    ) -> jax.Array:
        p = problem
        if schedule.program == "plain":
            a, b = (x.astype(jnp.bfloat16) for x in p.dequantized(args))
            out = jnp.dtype(p.out_dtype)
            return lax.dot_general(a, b, p.product.dimension_numbers, preferred_element_type=jnp.float32).astype(out)
        return _by_blocks(p, args).astype(p.out_dtype)


def _by_blocks(p: ScaledMatmulProblem, args: Sequence[jax.Array]) -> jax.Array:
    """Sums the scaled products of blocks of k, in float32; one block if no operand has scales by blocks."""
    a, b, a_scale, b_scale = args
    by_row = a_scale[:, None] if p.a_scales == "rows" else None
    by_column = b_scale[None, :] if p.b_scales == "rows" else None
    if by_row is not None and by_column is not None:
        whole = lax.dot_general(a, b, p.product.dimension_numbers, preferred_element_type=jnp.float32)
        return whole * by_row * by_column
    along = 1 if p.transpose_b else 0
    more = round_up(p.k, BLOCK) - p.k
    a = jnp.pad(a, ((0, 0), (0, more)))
    b = jnp.pad(b, ((0, 0), (0, more)) if p.transpose_b else ((0, more), (0, 0)))

    def add(total: jax.Array, block: Any) -> tuple[jax.Array, None]:
        parts = (
            lax.dynamic_slice_in_dim(a, block * BLOCK, BLOCK, axis=1),
            lax.dynamic_slice_in_dim(b, block * BLOCK, BLOCK, axis=along),
        )
        product = lax.dot_general(*parts, p.product.dimension_numbers, preferred_element_type=jnp.float32)
        rows = by_row if by_row is not None else a_scale[:, block, None]
        columns = by_column
        if columns is None:
            of_block = lax.dynamic_index_in_dim(b_scale, block, axis=along, keepdims=False)
            columns = jnp.repeat(of_block, BLOCK)[None, : p.n]
        return total + product * rows * columns, None

    blocks = jnp.arange(round_up(p.k, BLOCK) // BLOCK)
    total, _ = lax.scan(add, jnp.zeros((p.m, p.n), jnp.float32), blocks)
    return total
