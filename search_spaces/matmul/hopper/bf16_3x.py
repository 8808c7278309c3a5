"""Float32 matmul on Hopper as three bfloat16 products, in one launch of the bfloat16 kernel.

A float32 number is the sum of a high part, which is the number rounded to bfloat16, and a low part, which is the
remainder rounded to bfloat16. Then ``a b`` is ``a_high b_high + a_high b_low + a_low b_high``, up to about 2^-16 of it
(Henry, Tang, Heinecke, arXiv:1904.06376). The bfloat16 products are exact in float32, in which they are added.
Concatenated along k, this is a product of ``[a_low, a_high, a_high]`` and ``[b_high, b_low, b_high]``. Every layout
therefore has a kernel, and the epilogue is applied to the whole sum. Small terms come first, so that truncating
accumulators lose nothing of them.

XLA splits the operands in a pass before the launch, which reads 4 bytes and writes 6 per element.

**Infinities, NaN and large values.** If the operand is infinite or NaN, its low part is 0, and so is its high part that
multiplies a low part. inf and NaN thus enter the sum once, in the product of the high parts, and the result has them
where the float32 product has them. The high part of a value that would round to infinity is the largest bfloat16
number. Below about 1e-33 low parts are subnormal and lose bits, as bfloat16 does.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces.footprint import Footprint
from search_spaces.hopper.operands import not_hopper, padded
from search_spaces.kernel import INDICES_OF_32_BITS, Kernel, Target
from search_spaces.matmul.hopper.launch import MosaicGpuMatmul
from search_spaces.matmul.hopper.schedule import HopperSchedule
from search_spaces.matmul.problem import MatmulProblem
from search_spaces.problem import Arrays, nbytes
from search_spaces.space import Columns, Space, round_up

# Each part of k is padded to a multiple of this, so that rows of three bfloat16 parts are whole sectors, as the tiled
# layout requires. Padding is free, because operands are copied anyway.
K_STEP = 16
_LAUNCH = MosaicGpuMatmul()


class MosaicGpuBf16x3Matmul(Kernel[MatmulProblem, HopperSchedule]):
    """Is more accurate than TF32, and therefore also a candidate where TF32 is allowed."""

    backend = "mosaic_gpu_bf16_3x"
    version = 1
    most_elements = INDICES_OF_32_BITS
    verified_on = frozenset({"sm_90"})  # tests/device on an NVIDIA H200

    def supports(self, problem: MatmulProblem, target: Target) -> str | None:
        if reason := not_hopper(target):
            return reason
        if problem.dtype != "float32":
            return f"multiplies float32, not {problem.dtype}"
        if problem.precision == "highest":
            return "multiplies float32 as three products of bfloat16, not at precision 'highest'"
        return _LAUNCH.supports(of_parts(problem), target)

    def space(self, problem: MatmulProblem, target: Target) -> Space[HopperSchedule]:
        return _LAUNCH.space(of_parts(problem), target)

    def footprint(self, problem: MatmulProblem, schedules: Columns, target: Target) -> Footprint:
        """Returns the footprint of the launch, plus one pass per operand that reads it and writes its parts."""
        inside = of_parts(problem)
        launch = _LAUNCH.footprint(inside, schedules, target)
        split = sum(nbytes(x) for p in (problem, inside) for x in p.operands()[:2])
        return dataclasses.replace(
            launch, copied_bytes=launch.copied_bytes + float(split), launches=launch.launches + 2
        )

    def run(
        self, problem: MatmulProblem, schedule: HopperSchedule, target: Target, /, *args: Any, **params: Any
    ) -> Arrays:
        a, b, *added = args
        return _LAUNCH.run(of_parts(problem), schedule, target, *split(problem, a, b), *added)


def of_parts(p: MatmulProblem) -> MatmulProblem:
    """Returns the bfloat16 matmul that is launched for `p`, with all parts concatenated along k."""
    return dataclasses.replace(
        p, k=3 * round_up(p.k, K_STEP), dtype="bfloat16", out_dtype=str(p.whole.dtype), precision="default"
    )


def split(p: MatmulProblem, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the operands of `of_parts(p)`."""
    k_of_a, k_of_b = (-2 if p.transpose_a else -1), (-1 if p.transpose_b else -2)
    a_low, a_high, a_whole = _parts(a, k_of_a)
    b_low, b_high, b_whole = _parts(b, k_of_b)
    return jnp.concatenate((a_low, a_high, a_whole), k_of_a), jnp.concatenate((b_high, b_low, b_whole), k_of_b)


def _parts(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the low part, the high part that multiplies a low part, and the high part that multiplies a high part.

    k lies along `axis`.
    """
    k = round_up(x.shape[axis], K_STEP)
    x = padded(x, (k,) if axis == -1 else (k, None))
    largest = float(jnp.finfo(jnp.bfloat16).max)
    finite, zeros = jnp.isfinite(x), jnp.zeros_like(x)
    # XLA may remove a conversion to bfloat16 and back (xla_allow_excess_precision), but not `reduce_precision`.
    high = lax.reduce_precision(lax.clamp(-largest, x, largest), exponent_bits=8, mantissa_bits=7)
    parts = (jnp.where(finite, x - high, zeros), jnp.where(finite, high, zeros), jnp.where(finite, high, x))
    low, meets_low, meets_high = (part.astype(jnp.bfloat16) for part in parts)
    return low, meets_low, meets_high
