"""A doubled array by Mosaic GPU kernels, one of which is right: the others do what hardware punishes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from operations import DoubleLibrary, DoubleProblem

from search_spaces import Columns, Footprint, Kernel, Operand, Operation, Phase, Space, Target
from search_spaces.jax_compat import plgpu

TILE = 256
# Elements past the end where nothing is mapped: 4 GiB.
FAR = 2**30


@dataclasses.dataclass(frozen=True)
class DoubleSchedule:
    behave: str


class Double(Kernel[DoubleProblem, DoubleSchedule]):
    backend = "mosaic_gpu"

    def space(self, problem: DoubleProblem, target: Target) -> Space[DoubleSchedule]:
        return Space(DoubleSchedule, {"behave": ("right", "out_of_bounds", "endless", "skips_a_tile")}, {})

    def footprint(self, problem: DoubleProblem, schedules: Columns, target: Target) -> Footprint:
        return Footprint(
            arithmetic="float32",
            grid=(problem.n / TILE,),
            step=Phase(loads=(Operand(bytes=4.0 * TILE, axes=(0,)),), flops=1.0 * TILE),
            tile=Phase(bytes_written=4.0 * TILE),
            onchip_bytes=np.full(len(schedules), 8),
        )

    def run(
        self, problem: DoubleProblem, schedule: DoubleSchedule, target: Target, /, *args: Any, **params: Any
    ) -> jax.Array:
        behave = schedule.behave

        def body(x: Any, result: Any) -> None:
            tile = lax.axis_index("tile")
            if behave == "endless":
                pl.run_scoped(plgpu.barrier_wait, plgpu.Barrier())  # at which nobody arrives
            start = tile * TILE + (FAR if behave == "out_of_bounds" else 0)

            @pl.when(tile >= (1 if behave == "skips_a_tile" else 0))
            def store() -> None:
                result[pl.ds(start, TILE)] = x[pl.ds(tile * TILE, TILE)] * 2

        kernel = plgpu.kernel(body, out_type=problem.result(), grid=(problem.n // TILE,), grid_names=("tile",))
        doubled: jax.Array = kernel(*args)
        return doubled


DOUBLE = Operation("faulty_double", DoubleProblem, (Double(), DoubleLibrary()))
