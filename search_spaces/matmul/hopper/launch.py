"""The matrix product on Hopper: what it supports, and how one product is launched.

**Split-K.** Where the tiles of a result leave SMs idle, CTAs share a tile. Two of them, a cluster in split-K, reduce
their accumulators through DSMEM (dsmem_reduction.py). For more splits, `split_k` CTAs write theirs to places of their
own in device memory, and a reduction kernel adds them up, first to last, and applies the epilogue. Either way the bits
are the same each time. For results of m x n and s splits the latter costs ``4 s m n`` bytes written and as many read
(from L2, where they fit), and one small launch, in which XLA fuses the reduction with the epilogue: 3 us more than
DSMEM for 2048 x 576 x 7168 on an H200. The alternatives:

- One CTA adds up what the others leave, in the same launch, as a last wave does that is split (tail_reduction.py): as
  many bytes, no second launch; but it adds what all SMs leave, and XLA zeroes semaphores before each call.
- Each split waits for the one before it and adds to its accumulators, by semaphores: half of the bytes, no second
  launch; but the splits finish one after the other, and CTAs that wait must all be resident at once, or none ends.
- TMA reductions in device memory: half of the bytes, but the order is that of arrival, so the bits differ from run to
  run as soon as there are three addends, and a launch must zero the array before.
- Stream-K, where splits end anywhere in k: evens out a last wave, too; CTAs at different places of k share nothing in
  the L2 cache (docs/kernels/matmul-hopper.md).

**The epilogue.** Bias, activation and residual are applied to complete accumulators, before their one rounding: in the
kernel (epilogue_loads.py), or in the reduction kernel.

**Several results** side by side are arrays of their own, to which subtiles are stored (epilogue_stores.py); from splits
of k the reduction kernel cuts them out.

**Ragged rows.** TMA reaches beyond an array's edge at no cost, but Mosaic GPU lays tiles of 8 rows over arrays in
device memory, and TMA asks for no more at a time than a swizzled row: 128 bytes, or the 64 or 32 that divide an array.
Where one has more than 8 rows that are no multiple of 8, or rows that are over 128 bytes long and no multiple of that,
all tiles have the untiled swizzled layout (smem_layout.py), which TMA fills from any rows that start at multiples of 16
bytes. Operands whose rows do not are copied into padded ones; a result's are stored by threads (untiled_swizzled.py),
and the reduction kernel of split-K cuts the result out of the accumulators.

JAX 0.10 does not know that layout: there narrow swizzles divide an array, or it is copied into a padded one.
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
        # Rows are copied into ones of whole swizzled rows, of 128 bytes, where theirs are not.
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
        # The reduction kernel of a split applies the epilogue, and cuts out several results.
        inside = p if s.split_k == 1 else p.plain.joined
        extents = Tiling(inside, s).extents  # of a split: a and b
        operands = [padded(x, each) for x, each in zip(args, extents, strict=False)]
        results = launched(inside, s, target, operands, posed=p)
        return p.pack(results) if s.split_k == 1 else reduced(p, s.split_k, results[0], args)
