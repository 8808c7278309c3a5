"""The matmul on Hopper: supported problems, and the launch of one matmul.

**Split-K.** If the tiles of a result leave SMs idle, CTAs share a tile. With cluster split-K two CTAs reduce their
accumulators through DSMEM (dsmem_reduction.py). For more splits, `split_k` CTAs each write their accumulators to device
memory, and a reduction kernel adds them, first to last, and applies the epilogue. Both are deterministic. For results
of m x n and s splits, the reduction kernel costs ``4 s m n`` bytes written and the same number read (from L2, if they
fit), and one small launch, in which XLA fuses the reduction with the epilogue: 3 us more than DSMEM for 2048 x 576 x
7168 on an H200. The alternatives:

- One CTA adds the accumulators that the others leave, in the same launch, as for a split last wave (tail_reduction.py):
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

**Several results** are separate arrays, to which subtiles are stored (epilogue_stores.py). With split-K the reduction
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

from typing import Any

from search_spaces.footprint import Footprint
from search_spaces.hopper.operands import not_hopper, padded
from search_spaces.kernel import INDICES_OF_32_BITS, Kernel, Target, padded_elements
from search_spaces.matmul.hopper.footprint import footprint
from search_spaces.matmul.hopper.k_last import k_last, turned, with_turning
from search_spaces.matmul.hopper.persistent_launch import launched
from search_spaces.matmul.hopper.schedule import HopperSchedule
from search_spaces.matmul.hopper.space import LEAST_STEP, space
from search_spaces.matmul.hopper.tiling import Tiling
from search_spaces.matmul.problem import MatmulProblem
from search_spaces.matmul.split_k import reduced
from search_spaces.problem import Arrays
from search_spaces.space import Columns, Space


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
        return space(k_last(problem), target.cores)

    def footprint(self, problem: MatmulProblem, schedules: Columns, target: Target) -> Footprint:
        return with_turning(problem, footprint(k_last(problem), schedules))

    def run(
        self, problem: MatmulProblem, schedule: HopperSchedule, target: Target, /, *args: Any, **params: Any
    ) -> Arrays:
        p, s = k_last(problem), schedule
        args = turned(problem, args)
        # The reduction kernel of split-K applies the epilogue, and slices several results.
        inside = p if s.split_k == 1 else p.plain.joined
        extents = Tiling(inside, s).extents  # of a and b, for one split
        operands = [padded(x, each) for x, each in zip(args, extents, strict=False)]
        results = launched(inside, s, target, operands, posed=p)
        return p.pack(results) if s.split_k == 1 else reduced(p, s.split_k, results[0], args)
