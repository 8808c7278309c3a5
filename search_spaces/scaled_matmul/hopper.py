"""The matmul of scaled operands on Hopper."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from search_spaces.footprint import Footprint, Operand
from search_spaces.hopper import WARPGROUP, not_hopper, padded
from search_spaces.kernel import INDICES_OF_32_BITS, Kernel, padded_elements
from search_spaces.matmul.hopper.footprint import footprint as footprint_of_product
from search_spaces.matmul.hopper.footprint import registers_per_block
from search_spaces.matmul.hopper.kernel import launched
from search_spaces.matmul.hopper.main_loop import Scaling
from search_spaces.matmul.hopper.schedule import PING_PONG, HopperSchedule, Tiling
from search_spaces.matmul.hopper.space import space as space_of_product
from search_spaces.scaled_matmul.problem import BLOCK, ScaledMatmulProblem
from search_spaces.space import Columns, Space, cdiv
from search_spaces.target import Target

# ------------------------------------------------------------------------------
# The search space of a scaled matmul on Hopper: the matmul's schedules, restricted to those that can scale.


def scaling(problem: ScaledMatmulProblem) -> Scaling:
    """Returns the kernel's view of the problem's scales."""
    return Scaling(problem.a_scales, problem.b_scales, BLOCK)


# Per thread; with 192 it spills 8 registers (ptxas).
MOST_ACCUMULATORS = 160


def space(problem: ScaledMatmulProblem, cores: int) -> Space[HopperSchedule]:
    """Returns the schedules without swap_ab and without split-K; with scales by blocks, a step is one block."""
    product = space_of_product(problem.product, cores)
    kept: dict[str, tuple[Any, ...]] = {
        "swap_ab": (False,),
        "split_k": (1,),
        "cluster": ("none", "m", "n"),
        "tail_split_k": (1,),
    }
    if not scaling(problem).by_steps:
        rules = {
            f"beside scales a thread holds {MOST_ACCUMULATORS} accumulators": lambda s: (
                s.tile_m * s.tile_n // np.where(np.isin(s.consumers, ("cooperative_m", "cooperative_n")), 2, 1)
                <= MOST_ACCUMULATORS * WARPGROUP
            )
        }
        choices = {**product.choices, **kept}
        return dataclasses.replace(product, choices=choices, rules={**product.rules, **rules})
    kept |= {
        "tile_m": tuple(tile for tile in (128, 64, 256) if tile in product.choices["tile_m"]),
        "tile_n": tuple(tile for tile in (128, 256, 64) if tile in product.choices["tile_n"]),
        "tile_k": (BLOCK,),
        # Each step is waited for, so consumers alternate without explicit turns.
        "consumers": tuple(each for each in product.choices["consumers"] if each not in PING_PONG),
        "delay_release": (0,),
    }
    return dataclasses.replace(
        product,
        choices={**product.choices, **kept},
        rules={
            **product.rules,
            f"a consumer's columns have one scale a step, as {BLOCK} do": lambda s: (
                BLOCK % (s.tile_n // np.where(s.consumers == "cooperative_n", 2, 1)) == 0
            ),
        },
    )


# ------------------------------------------------------------------------------
# The footprint of a launch: that of the matmul, plus the demands of its scales.


def footprint(p: ScaledMatmulProblem, s: Columns) -> Footprint:
    """Returns the footprint; with scales by blocks, a consumer holds two sets of accumulators."""
    product, t = footprint_of_product(p.product, s), Tiling(p.product, s)
    by_steps, results = scaling(p).by_steps, s.tile_m * s.tile_n
    registers = product.registers + by_steps * (t.wg_m * t.wg_n // WARPGROUP)
    a_scale, b_scale = (x.size * x.dtype.itemsize for x in p.operands()[2:])
    rows = Operand(bytes=4.0 * s.tile_m, axes=(0, 1), name="a_scale")
    # The scales of a are transposed, so that a warpgroup's are adjacent, and padded together with those of b.
    return dataclasses.replace(
        product,
        step=dataclasses.replace(
            product.step,
            loads=(*product.step.loads, *((rows,) if p.a_scales == "blocks" else ())),
            fp32_ops=2.0 * results if by_steps else 0.0,
        ),
        tile=dataclasses.replace(
            product.tile, fp32_ops=product.tile.fp32_ops + results * ((p.a_scales == "rows") + (p.b_scales == "rows"))
        ),
        # While one consumer scales, the other one multiplies.
        ping_pong=product.ping_pong | (by_steps & (np.asarray(t.consumers) > 1)),
        registers=registers,
        registers_per_block=registers_per_block(t, registers),
        copied_bytes=product.copied_bytes + 2.0 * (a_scale + b_scale),
        launches=product.launches + 1,
    )


# ------------------------------------------------------------------------------
# The scaled matmul on Hopper: supported problems, and the launch of one scaled matmul.
#
# The kernel is that of the matmul (search_spaces/matmul/hopper), with a main loop that scales (main_loop.py). With
# scales by blocks, a step is a block of k: its accumulators start from zero, and are scaled and added to the sums.
# This doubles the registers, so tiles are half as large. Consumers read scales from device memory directly, before
# they wait for the step's operands.


class MosaicGpuScaledMatmul(Kernel[ScaledMatmulProblem, HopperSchedule]):
    backend = "mosaic_gpu"
    version = 1
    most_elements = INDICES_OF_32_BITS
    verified_on = frozenset({"sm_90"})  # tests/device on an NVIDIA H200

    def supports(self, problem: ScaledMatmulProblem, target: Target) -> str | None:
        if reason := not_hopper(target):
            return reason
        if not problem.transpose_b:  # PTX ISA, asynchronous warpgroup level matrix: 8-bit operands have one order
            return f"multiplies {problem.dtype} only where k is the last axis of both operands (transpose_b)"
        return None

    def largest_array(self, problem: ScaledMatmulProblem) -> int:
        # Rows that are not whole swizzled rows of 128 bytes are copied into padded ones.
        return padded_elements((*problem.operands(), *problem.results()), -1, 128)

    def space(self, problem: ScaledMatmulProblem, target: Target) -> Space[HopperSchedule]:
        return space(problem, target.cores)

    def footprint(self, problem: ScaledMatmulProblem, schedules: Columns, target: Target) -> Footprint:
        return footprint(problem, schedules)

    def run(
        self, problem: ScaledMatmulProblem, schedule: HopperSchedule, target: Target, /, *args: Any, **params: Any
    ) -> jax.Array:
        p, s = problem, schedule
        a, b, a_scale, b_scale = args
        t = Tiling(p.product, s)
        rows, columns = s.tile_m * t.grid_m * t.cluster_m, s.tile_n * t.grid_n * t.cluster_n
        # A tile may extend beyond the edges, and so do the scales that it reads.
        by_blocks = p.a_scales == "blocks"
        a_scale = _extended(a_scale.T, (a_scale.shape[1], rows)) if by_blocks else _extended(a_scale, (rows,))
        by_blocks = p.b_scales == "blocks"
        b_scale = _extended(b_scale, (cdiv(columns, BLOCK), b_scale.shape[1]) if by_blocks else (columns,))
        operands = [padded(x, extents) for x, extents in zip((a, b), t.extents, strict=True)]
        (c,) = launched(p.product, s, target, [*operands, a_scale, b_scale], posed=p, scaling=scaling(p))
        return c


def _extended(x: jax.Array, shape: tuple[Any, ...]) -> jax.Array:
    """Pads the ends of the axes with zeros."""
    return jnp.pad(x, [(0, int(extent) - have) for extent, have in zip(shape, x.shape, strict=True)])
