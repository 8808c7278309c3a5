"""The matmul on Hopper: supported problems and launches, with transposed operands and in float32.

**Split-K.** If the tiles of a result leave SMs idle, CTAs share a tile. With cluster split-K two CTAs reduce their
accumulators through DSMEM (plan.py). For more splits, `split_k` CTAs each write their accumulators to device
memory, and a reduction kernel adds them, first to last, and applies the epilogue. Both are deterministic. For results
of m x n and s splits, the reduction kernel costs ``4 s m n`` bytes written and the same number read (from L2, if they
fit), and one small launch, in which XLA fuses the reduction with the epilogue: 3 us more than DSMEM for 2048 x 576 x
7168 on an H200. The alternatives:

- One CTA adds the accumulators that the others leave, in the same launch, as for a split last wave (tile_scheduler.py):
  the same number of bytes and no second launch, but it adds the accumulators of all SMs, and XLA zeros semaphores
  before each call.
- Each split waits for the one before it and adds to its accumulators, using semaphores: half of the bytes and no second
  launch, but the splits finish one after another, and all waiting CTAs must be resident at once to avoid a deadlock.
- TMA reductions in device memory: half of the bytes, but the order is that of arrival, so the bits differ from run to
  run with three or more addends, and a launch must zero the array first.
- Stream-K, where splits end anywhere in k: also balances the last wave, but CTAs at different positions of k share
  nothing in the L2 cache (docs/kernels/matmul-hopper.md).

**The epilogue.** Bias, activation and residual are applied to complete accumulators, before the single rounding: in the
kernel (epilogue_loads.py), or in the reduction kernel.

**Several results** are separate arrays, to which subtiles are stored (kernel.py). With split-K the reduction
kernel slices them.

**Ragged rows.** TMA handles accesses beyond an array's edge at no cost. But Mosaic GPU tiles arrays in device memory by
8 rows, and TMA requests at most one swizzled row at a time: 128 bytes, or 64 or 32 if they divide the array. The
untiled swizzled layout (smem_layout.py) is used for all tiles if an array has more than 8 rows and their number is not
a multiple of 8, or if its rows are longer than 128 bytes and not a multiple of 128 bytes. TMA fills this layout from
any rows that start at multiples of 16 bytes. Operands with other rows are copied into padded arrays. Results with other
rows are stored by threads (untiled_swizzled.py), or, with split-K, sliced from the accumulators by the reduction
kernel.

JAX 0.10 does not support that layout: there narrow swizzles divide an array, or the array is copied into a padded one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces.footprint import Footprint
from search_spaces.hopper import not_hopper, padded
from search_spaces.kernel import INDICES_OF_32_BITS, Kernel, padded_elements
from search_spaces.matmul.hopper import footprint, space
from search_spaces.matmul.hopper.kernel import launched
from search_spaces.matmul.hopper.schedule import HopperSchedule, Tiling
from search_spaces.matmul.hopper.space import LEAST_STEP
from search_spaces.matmul.problem import MatmulProblem
from search_spaces.matmul.tiles import reduced
from search_spaces.problem import Arrays, nbytes
from search_spaces.space import Columns, Space, round_up
from search_spaces.target import Target

# ------------------------------------------------------------------------------
# Transposes operands that wgmma cannot read in place: before the launch, XLA makes k their last axis.


def k_last(p: MatmulProblem) -> MatmulProblem:
    """Returns the matmul that a launch computes for `p`: 16-bit operands in place, others with k as their last axis.

    wgmma reads operands that are not 16-bit from shared memory in that order only (PTX ISA, asynchronous warpgroup
    level matrix).
    """
    if jnp.dtype(p.dtype).itemsize == 2:
        return p
    return dataclasses.replace(p, transpose_a=False, transpose_b=True)


def transposed_operands(p: MatmulProblem, args: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
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


class MosaicGpuMatmul(Kernel[MatmulProblem, HopperSchedule]):
    backend = "mosaic_gpu"
    version = 2
    most_elements = INDICES_OF_32_BITS
    verified_on = frozenset({"sm_90"})  # tests/device on an NVIDIA H200

    def supports(self, problem: MatmulProblem, target: Target) -> str | None:
        if reason := not_hopper(target):
            return reason
        if problem.dtype == "float32" and problem.precision != "default":
            return f"multiplies float32 as TF32, not at precision {problem.precision!r}"
        if (step := problem.results_start) and step % LEAST_STEP:
            return f"writes results side by side that start at multiples of {LEAST_STEP} columns, not of {step}"
        return None

    def largest_array(self, problem: MatmulProblem) -> int:
        # Rows that are not whole swizzled rows of 128 bytes are copied into padded ones.
        return padded_elements((*problem.operands(), *problem.results()), -1, 128)

    def space(self, problem: MatmulProblem, target: Target) -> Space[HopperSchedule]:
        return space.space(k_last(problem), target.cores)

    def footprint(self, problem: MatmulProblem, schedules: Columns, target: Target) -> Footprint:
        return with_turning(problem, footprint.footprint(k_last(problem), schedules))

    def run(
        self, problem: MatmulProblem, schedule: HopperSchedule, target: Target, /, *args: Any, **params: Any
    ) -> Arrays:
        p, s = k_last(problem), schedule
        args = transposed_operands(problem, args)
        # The reduction kernel of split-K applies the epilogue, and slices several results.
        inside = p if s.split_k == 1 else p.plain.joined
        extents = Tiling(inside, s).extents  # of a and b, for one split
        operands = [padded(x, each) for x, each in zip(args, extents, strict=False)]
        results = launched(inside, s, target, operands, posed=p)
        return p.pack(results) if s.split_k == 1 else reduced(p, s.split_k, results[0], args)


# ------------------------------------------------------------------------------
# Float32 matmul on Hopper as three bfloat16 products, in one launch of the bfloat16 kernel.
#
# A float32 number is the sum of a high part, which is the number rounded to bfloat16, and a low part, which is the
# remainder rounded to bfloat16. Then ``a b`` is ``a_high b_high + a_high b_low + a_low b_high``, up to about 2^-16 of
# it (Henry, Tang, Heinecke, arXiv:1904.06376). The bfloat16 products are exact in float32, in which they are added.
# Concatenated along k, this is a product of ``[a_low, a_high, a_high]`` and ``[b_high, b_low, b_high]``. Every layout
# therefore has a kernel, and the epilogue is applied to the whole sum. Small terms come first, so that truncating
# accumulators lose nothing of them.
#
# XLA splits the operands in a pass before the launch, which reads 4 bytes and writes 6 per element.
#
# **Infinities, NaN and large values.** If the operand is infinite or NaN, its low part is 0, and so is the high part
# that multiplies a low part. inf and NaN thus enter the sum once, in the product of the high parts, and the result has
# them where the float32 product has them. The high part of a value that would round to infinity is the largest
# bfloat16 number. Below about 1e-33 low parts are subnormal and lose bits, as bfloat16 does.

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
        return _LAUNCH.supports(sum_of_parts(problem), target)

    def space(self, problem: MatmulProblem, target: Target) -> Space[HopperSchedule]:
        return _LAUNCH.space(sum_of_parts(problem), target)

    def footprint(self, problem: MatmulProblem, schedules: Columns, target: Target) -> Footprint:
        """Returns the footprint of the launch, plus one pass per operand that reads it and writes its parts."""
        inside = sum_of_parts(problem)
        launch = _LAUNCH.footprint(inside, schedules, target)
        split = sum(nbytes(x) for p in (problem, inside) for x in p.operands()[:2])
        return dataclasses.replace(
            launch, copied_bytes=launch.copied_bytes + float(split), launches=launch.launches + 2
        )

    def run(
        self, problem: MatmulProblem, schedule: HopperSchedule, target: Target, /, *args: Any, **params: Any
    ) -> Arrays:
        a, b, *added = args
        return _LAUNCH.run(sum_of_parts(problem), schedule, target, *split_bf16_3x(problem, a, b), *added)


def sum_of_parts(p: MatmulProblem) -> MatmulProblem:
    """Returns the bfloat16 matmul that is launched for `p`, with all parts concatenated along k."""
    return dataclasses.replace(
        p, k=3 * round_up(p.k, K_STEP), dtype="bfloat16", out_dtype=str(p.whole.dtype), precision="default"
    )


def split_bf16_3x(p: MatmulProblem, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
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


__all__ = ["HopperSchedule", "MosaicGpuBf16x3Matmul", "MosaicGpuMatmul"]
