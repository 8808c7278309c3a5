"""The footprint of a launch: that of one factor, plus the demands of the other."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from search_spaces.footprint import Footprint
from search_spaces.gated_matmul.hopper.weights import half_extents, read_joined, reads_joined_bias
from search_spaces.gated_matmul.problem import GatedMatmulProblem
from search_spaces.hopper.limits import ACCUMULATOR_BYTES, BARRIER_BYTES, SMEM_ALIGNMENT, WARPGROUP
from search_spaces.hopper.smem_layout import padded_bytes
from search_spaces.matmul.hopper.footprint import footprint as of_product
from search_spaces.matmul.hopper.footprint import registers_per_block
from search_spaces.matmul.hopper.tiling import Tiling
from search_spaces.space import Columns, round_up


def footprint(p: GatedMatmulProblem, s: Columns) -> Footprint:
    """Returns the footprint; both factors multiply the same stages of `x`, each by stages of its own weights."""
    gate = p.gate
    one, t = of_product(gate, s), Tiling(gate, s)
    x, weights = one.step.loads
    registers = one.registers + t.wg_m * t.wg_n // WARPGROUP
    whole = s.split_k == 1
    copied, launches = _copies(p, s, t)
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
            loads=tuple(
                dataclasses.replace(load, name=name) for load in one.tile.loads for name in ("bias", "up bias")
            ),
            fp32_ops=one.tile.fp32_ops + whole * s.tile_m * s.tile_n / t.cluster_k,
            bytes_written=one.tile.bytes_written * np.where(whole, 1, 2),
        ),
        onchip_bytes=one.onchip_bytes + _onchip_bytes(p, s, t),
        accumulators=2 * one.accumulators,
        registers=registers,
        registers_per_block=registers_per_block(t, registers),
        dsmem_bytes=2 * one.dsmem_bytes,
        copied_bytes=copied,
        launches=launches,
    )


def _onchip_bytes(p: GatedMatmulProblem, s: Columns, t: Tiling) -> Any:
    """Returns the shared memory of the second factor; its weights share one array with those of the first."""
    stage = s.stages * s.tile_k * s.tile_n * jnp.dtype(p.dtype).itemsize
    more = round_up(2 * stage, SMEM_ALIGNMENT) - round_up(stage, SMEM_ALIGNMENT)
    if not p.bias:
        return more
    bias = round_up(t.consumers * t.bias_width * jnp.dtype(p.bias).itemsize, SMEM_ALIGNMENT)
    return more + (s.split_k == 1) * (bias + t.consumers * BARRIER_BYTES)


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
