"""The matrix product as XLA computes it (cuBLAS on NVIDIA GPUs): the answer to beat, and a legal one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces.kernel import Library, LibraryKernel, Target
from search_spaces.matmul.problem import MatmulProblem


class XlaMatmul(LibraryKernel[MatmulProblem]):
    version = 1

    def run(self, problem: MatmulProblem, schedule: Library, target: Target, /, *args: Any, **params: Any) -> jax.Array:
        a, b = args
        return lax.dot_general(
            a,
            b,
            problem.dimension_numbers,
            precision=problem.lax_precision,
            preferred_element_type=jnp.dtype(problem.out_dtype or problem.dtype),
        )
