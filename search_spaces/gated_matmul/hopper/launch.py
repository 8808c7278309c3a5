"""The gated matmul on Hopper: supported problems, and the launch of one gated matmul.

The kernel is that of the matmul (search_spaces/matmul/hopper), in a launch that multiplies the results of two factors.
A tile of either factor has as many elements as the result's tile, so `HopperSchedule` has the same meaning as for the
matmul, with twice the accumulators. With split-K the reduction kernel multiplies.

**Joined weights** are read in place: the second factor's tiles begin n columns after the first's. If TMA cannot start
there, or if arrays must be padded for TMA, each half is copied into a separate array.
"""

from __future__ import annotations

from typing import Any

import jax

from search_spaces.footprint import Footprint
from search_spaces.gated_matmul.hopper.footprint import footprint
from search_spaces.gated_matmul.hopper.weights import read_joined, reads_joined_bias
from search_spaces.gated_matmul.problem import GatedMatmulProblem
from search_spaces.hopper.operands import not_hopper, padded
from search_spaces.kernel import INDICES_OF_32_BITS, Kernel, Target, padded_elements
from search_spaces.matmul.hopper.factors import Gate
from search_spaces.matmul.hopper.persistent_launch import launched
from search_spaces.matmul.hopper.schedule import HopperSchedule
from search_spaces.matmul.hopper.space import space
from search_spaces.matmul.hopper.tiling import Tiling
from search_spaces.matmul.split_k import added
from search_spaces.space import Columns, Space


class MosaicGpuGatedMatmul(Kernel[GatedMatmulProblem, HopperSchedule]):
    backend = "mosaic_gpu"
    version = 1
    most_elements = INDICES_OF_32_BITS
    verified_on = frozenset({"sm_90"})  # tests/device on an NVIDIA H200

    def supports(self, problem: GatedMatmulProblem, target: Target) -> str | None:
        return not_hopper(target)

    def largest_array(self, problem: GatedMatmulProblem) -> int:
        # Rows that are not whole swizzled rows of 128 bytes are copied into padded ones.
        return padded_elements((*problem.operands(), *problem.results()), -1, 128)

    def space(self, problem: GatedMatmulProblem, target: Target) -> Space[HopperSchedule]:
        return space(problem.gate, target.cores, factors=2)

    def footprint(self, problem: GatedMatmulProblem, schedules: Columns, target: Target) -> Footprint:
        return footprint(problem, schedules)

    def run(
        self, problem: GatedMatmulProblem, schedule: HopperSchedule, target: Target, /, *args: Any, **params: Any
    ) -> jax.Array:
        p, s = problem, schedule
        whole = s.split_k == 1
        inside = p.gate if whole else p.gate.plain  # With split-K, the reduction kernel applies the epilogue.
        t = Tiling(inside, s)
        joined = not p.pair and bool(read_joined(p, t))
        x, weights, _ = p.named(args) if joined else p.apart(args)
        biases = (p.named(args) if reads_joined_bias(p) else p.apart(args)).biases
        operands = [padded(x, t.extents[0]), *(w if joined else padded(w, t.extents[1]) for w in weights)]
        gate = Gate(joined, reads_joined_bias(p))
        (c,) = launched(inside, s, target, [*operands, *(biases if whole else ())], posed=p, gate=gate)
        return c if whole else _reduce(p, s, c, args)


def _reduce(p: GatedMatmulProblem, s: HopperSchedule, splits: jax.Array, args: Any) -> jax.Array:
    """Computes the result from all splits' accumulators ``[2 * split_k, m, n]``, added in order and rounded once."""
    factors = splits.reshape(2, s.split_k, p.m, p.n)
    return p.gated([added(factor) for factor in factors], p.apart(args).biases).astype(p.result().dtype)
