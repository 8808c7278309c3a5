"""The gated matmul on TPUs: supported problems, and the launch of one gated matmul.

The kernel is that of the matmul (search_spaces/matmul/tpu) with two factors: each step multiplies a block of `x` by
a block of each factor's weights, and the epilogue of a tile multiplies both results in float32.

**Joined weights** are read in place if the second factor's begin at a tile; otherwise each half is copied into a
separate array.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from search_spaces.contrib.tpu.matmul import Factor, TpuSchedule, footprint, launched, space, unsupported, vmem_limit
from search_spaces.contrib.tpu.vmem import LANES
from search_spaces.footprint import Footprint
from search_spaces.gated_matmul.problem import GatedMatmulProblem
from search_spaces.kernel import INDICES_OF_32_BITS, Kernel
from search_spaces.space import Columns, Space
from search_spaces.target import Target


class MosaicTpuGatedMatmul(Kernel[GatedMatmulProblem, TpuSchedule]):
    backend = "mosaic_tpu"
    version = 1
    most_elements = INDICES_OF_32_BITS

    def supports(self, problem: GatedMatmulProblem, target: Target) -> str | None:
        return unsupported(target, problem.dtype, *filter(None, (problem.bias,)))

    def space(self, problem: GatedMatmulProblem, target: Target) -> Space[TpuSchedule]:
        return space(problem.gate, factors=2)

    def footprint(self, problem: GatedMatmulProblem, schedules: Columns, target: Target) -> Footprint:
        p, s = problem, schedules
        found = footprint(p.gate, s, target, factors=2)
        names = iter(("x", "gate", "up"))
        halves = 2 * p.n * (p.k * jnp.dtype(p.dtype).itemsize + (jnp.dtype(p.bias).itemsize if p.bias else 0))
        copied = np.where(read_joined(p, s) | p.pair, 0, 2 * halves)
        return dataclasses.replace(
            found,
            step=dataclasses.replace(
                found.step, loads=tuple(dataclasses.replace(load, name=next(names)) for load in found.step.loads)
            ),
            tile=dataclasses.replace(
                found.tile,
                loads=tuple(
                    dataclasses.replace(load, name=name)
                    for load, name in zip(found.tile.loads, ("bias", "up bias"), strict=False)
                ),
                fp32_ops=found.tile.fp32_ops + s.tile_m * s.tile_n,
            ),
            copied_bytes=copied,
            launches=1 + np.where(copied > 0, 2 + 2 * bool(p.bias), 0),
        )

    def run(
        self, problem: GatedMatmulProblem, schedule: TpuSchedule, target: Target, /, *args: Any, **params: Any
    ) -> jax.Array:
        p, s = problem, schedule
        where_they_lie = not p.pair and bool(read_joined(p, s))
        x, weights, biases = p.named(args) if where_they_lie else p.apart(args)
        if where_they_lie:
            weights, biases = weights * 2, biases * 2
        first = (0, p.n // s.tile_n if where_they_lie else 0)
        rows = [b[None, None] for b in biases] or [None, None]
        factors = [Factor(w[None], b, at) for w, b, at in zip(weights, rows, first, strict=True)]

        def finish(accs: Sequence[jax.Array], biases: Sequence[Any], residual: Any) -> jax.Array:
            return p.gated(accs, biases)

        limit = int(vmem_limit(p.gate, Columns.of([s]), target, factors=2)[0])
        return launched(p.gate, s, x[None], factors, None, finish, name="gated_matmul", vmem_limit_bytes=limit)[0]


def read_joined(p: GatedMatmulProblem, s: Any) -> Any:
    """Returns whether the second half of joined weights and biases begins at a tile, for one schedule or many.

    If a tile of all columns is not a multiple of the lanes, it is not a valid block of a joined array, because it is
    not the whole axis either.
    """
    return np.equal(p.n % s.tile_n, 0) & np.equal(s.tile_n % LANES, 0)
