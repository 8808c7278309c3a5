"""The gated matmul on Hopper: the matmul kernel with two factors, and its schedules."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from search_spaces.footprint import Footprint
from search_spaces.gated_matmul.problem import GatedMatmulProblem
from search_spaces.hopper import (
    ACCUMULATOR_BYTES,
    BARRIER_BYTES,
    SMEM_ALIGNMENT,
    TMA_GMEM_ALIGNMENT,
    WARPGROUP,
    not_hopper,
    padded,
)
from search_spaces.hopper.smem_layout import padded_bytes
from search_spaces.kernel import INDICES_OF_32_BITS, Kernel, padded_elements
from search_spaces.matmul.hopper.footprint import footprint as of_product
from search_spaces.matmul.hopper.footprint import registers_per_block
from search_spaces.matmul.hopper.kernel import launched
from search_spaces.matmul.hopper.schedule import Gate, HopperSchedule, Tiling
from search_spaces.matmul.hopper.space import space
from search_spaces.matmul.tiles import added
from search_spaces.space import Columns, Space, round_up
from search_spaces.target import Target

# ------------------------------------------------------------------------------
# The layout of a gated matmul's weights and biases, and whether the kernel reads them in place.


def read_joined(p: GatedMatmulProblem, t: Tiling) -> Any:
    """Returns whether TMA reads both halves of joined weights in place, for each schedule of a tiling.

    This requires that neither half is padded. In the tiled layout, the second half must also begin at a tile of 8
    swizzled rows.
    """
    rows, columns = half_extents(p)
    as_is = np.equal(t.extents[1][0], rows) & np.equal(t.extents[1][1], columns)
    unit = 8 if p.transpose_w else t.swizzle // jnp.dtype(p.dtype).itemsize
    return as_is & (t.untiled | np.equal(p.n % unit, 0))


def reads_joined_bias(p: GatedMatmulProblem) -> bool:
    """Returns whether the second half of a joined bias begins at a multiple of 16 bytes, as bulk copies require."""
    return not p.pair and bool(p.bias) and p.n * jnp.dtype(p.bias).itemsize % TMA_GMEM_ALIGNMENT == 0


def half_extents(p: GatedMatmulProblem) -> tuple[int, int]:
    """Returns the extents of one factor's weights."""
    return (p.n, p.k) if p.transpose_w else (p.k, p.n)


# ------------------------------------------------------------------------------
# The footprint of a launch: that of one factor, plus the demands of the other.


def footprint(p: GatedMatmulProblem, s: Columns) -> Footprint:
    """Returns the footprint; both factors multiply the same stages of `x`, each by stages of its own weights."""
    t = Tiling(p.gate, s)
    both = of_two_factors(of_product(p.gate, s), s, t, jnp.dtype(p.dtype).itemsize)
    names = ("bias", "up bias")
    biases = tuple(dataclasses.replace(load, name=name) for load in both.tile.loads for name in names)
    copied, launches = _copies(p, s, t)
    return dataclasses.replace(
        both,
        tile=dataclasses.replace(both.tile, loads=biases),
        onchip_bytes=both.onchip_bytes + _bias_bytes(p, s, t),
        copied_bytes=copied,
        launches=launches,
    )


def of_two_factors(one: Footprint, s: Columns, t: Tiling, itemsize: int) -> Footprint:
    """Returns the footprint of a launch with two factors from that of one; biases and copies are those of one."""
    x, weights = one.step.loads
    registers = one.registers + t.wg_m * t.wg_n // WARPGROUP
    whole = s.split_k == 1
    # The weights of both factors share one array.
    stage = s.stages * s.tile_k * s.tile_n * itemsize
    more = round_up(2 * stage, SMEM_ALIGNMENT) - round_up(stage, SMEM_ALIGNMENT)
    return dataclasses.replace(
        one,
        step=dataclasses.replace(
            one.step,
            loads=(
                dataclasses.replace(x, name="x"),
                dataclasses.replace(weights, name="gate"),
                dataclasses.replace(weights, name="up"),
            ),
            flops=2 * one.step.flops,
            # Each factor's wgmmas read the rows again.
            onchip_bytes_read=2 * one.step.onchip_bytes_read,
        ),
        tile=dataclasses.replace(
            one.tile,
            fp32_ops=one.tile.fp32_ops + whole * s.tile_m * s.tile_n / t.cluster_k,
            bytes_written=one.tile.bytes_written * np.where(whole, 1, 2),
        ),
        onchip_bytes=one.onchip_bytes + more,
        accumulators=2 * one.accumulators,
        registers=registers,
        registers_per_block=registers_per_block(t, registers),
        dsmem_bytes=2 * one.dsmem_bytes,
    )


def _bias_bytes(p: GatedMatmulProblem, s: Columns, t: Tiling) -> Any:
    """Returns the shared memory of the second factor's bias."""
    if not p.bias:
        return 0
    bias = round_up(t.consumers * t.bias_width * jnp.dtype(p.bias).itemsize, SMEM_ALIGNMENT)
    return (s.split_k == 1) * (bias + t.consumers * BARRIER_BYTES)


def _copies(p: GatedMatmulProblem, s: Columns, t: Tiling) -> tuple[Any, Any]:
    """Returns the bytes copied before and after the launch, and the number of launches."""
    itemsize, out = jnp.dtype(p.dtype).itemsize, p.result()
    x = padded_bytes((p.m, p.k), t.extents[0], itemsize)
    half = half_extents(p)
    size, extended = half[0] * half[1], t.extents[1][0] * t.extents[1][1]
    apart = np.logical_not(read_joined(p, t)) if not p.pair else extended > size
    weights = np.where(apart, 2 * (size + extended) * itemsize, 0)
    elements = p.m * p.n
    biases = 2 * p.n * jnp.dtype(p.bias).itemsize if p.bias else 0
    after = np.where(
        s.split_k > 1,
        elements * (2 * s.split_k * ACCUMULATOR_BYTES + out.dtype.itemsize) + biases,
        padded_bytes(out.shape, t.c_extents[0], out.dtype.itemsize),
    )
    halves = (s.split_k == 1) * (2 * biases if not p.pair and not reads_joined_bias(p) else 0)
    launches = 1 + (x > 0) + 2 * (weights > 0) + 2 * (halves > 0) + (after > 0)
    return x + weights + halves + after, launches


# ------------------------------------------------------------------------------
# The gated matmul on Hopper: supported problems, and the launch of one gated matmul.
#
# The kernel is that of the matmul (search_spaces/matmul/hopper), in a launch that multiplies the results of two
# factors. A tile of either factor has as many elements as the result's tile, so `HopperSchedule` has the same meaning
# as for the matmul, with twice the accumulators. With split-K the reduction kernel multiplies.
#
# **Joined weights** are read in place: the second factor's tiles begin n columns after the first's. If TMA cannot start
# there, or if arrays must be padded for TMA, each half is copied into a separate array.


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


__all__ = ["MosaicGpuGatedMatmul", "of_two_factors"]
