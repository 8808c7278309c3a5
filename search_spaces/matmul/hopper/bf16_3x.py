"""Products of float32 on Hopper as three products of bfloat16, in one launch of the kernel for bfloat16.

A float32 number is the sum of a high part, itself rounded to bfloat16, and a low part, what is left, rounded likewise:
``a b`` is ``a_high b_high + a_high b_low + a_low b_high``, but for some 2^-16 of it (Henry, Tang, Heinecke,
arXiv:1904.06376). The products of bfloat16 are exact in float32, in which they are added up. Along k that is a product
of ``[a_low, a_high, a_high]`` and ``[b_high, b_low, b_high]``: any layout has a kernel, the epilogue is applied to the
whole sum, and small terms come first, so that accumulators which truncate lose nothing of them.

XLA splits the operands in a pass before the launch: 4 bytes read and 6 written for each element.

**What is no number, and what is large.** The high part that meets a low one is 0 where the operand is infinite or NaN,
and so is its low part: inf and NaN come into the sum once, in the product of the high parts, and the result has them
where that of float32 has them. What bfloat16 would round to infinity has its largest number for a high part. Below some
1e-33 low parts are no normal numbers any more, and bits are lost as bfloat16 loses them.
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

# Parts of k are padded up to multiples of these: rows of three of them, in bfloat16, are then whole sectors, which the
# tiled layout wants. It costs nothing, as operands are copied anyway.
K_STEP = 16
_LAUNCH = MosaicGpuMatmul()


class MosaicGpuBf16x3Matmul(Kernel[MatmulProblem, HopperSchedule]):
    """More exact than TF32, so that it competes where that is allowed, too."""

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
        """That of the launch, and the operands, read by a pass each that writes their parts."""
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
    """The product that is launched for `p`, along all parts of k."""
    return dataclasses.replace(
        p, k=3 * round_up(p.k, K_STEP), dtype="bfloat16", out_dtype=str(p.whole.dtype), precision="default"
    )


def split(p: MatmulProblem, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The operands of `of_parts(p)`."""
    k_of_a, k_of_b = (-2 if p.transpose_a else -1), (-1 if p.transpose_b else -2)
    a_low, a_high, a_whole = _parts(a, k_of_a)
    b_low, b_high, b_whole = _parts(b, k_of_b)
    return jnp.concatenate((a_low, a_high, a_whole), k_of_a), jnp.concatenate((b_high, b_low, b_whole), k_of_b)


def _parts(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The low part, the high part that meets a low one, and the one that meets a high one; k lies along `axis`."""
    k = round_up(x.shape[axis], K_STEP)
    x = padded(x, (k,) if axis == -1 else (k, None))
    largest = float(jnp.finfo(jnp.bfloat16).max)
    finite, zeros = jnp.isfinite(x), jnp.zeros_like(x)
    # XLA may drop a conversion to bfloat16 and back (xla_allow_excess_precision), but not this.
    high = lax.reduce_precision(lax.clamp(-largest, x, largest), exponent_bits=8, mantissa_bits=7)
    parts = (jnp.where(finite, x - high, zeros), jnp.where(finite, high, zeros), jnp.where(finite, high, x))
    low, meets_low, meets_high = (part.astype(jnp.bfloat16) for part in parts)
    return low, meets_low, meets_high
