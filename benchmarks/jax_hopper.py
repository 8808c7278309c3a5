"""JAX's own Hopper matmul as a rival: a kernel with a space, timed by the same workers as ours.

The kernel is `jax.experimental.pallas.ops.gpu.hopper_matmul_mgpu`, the same file in jax 0.10.2, 0.11.2 and 0.12.0.1.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from search_spaces import Columns, Footprint, Kernel, Operand, Operation, Phase, Space, Target
from search_spaces.matmul import MATMUL, MatmulProblem

# Two warpgroups compute, a third one copies and keeps 40 registers for each of its threads (`memory_registers`).
WARPGROUPS, THREADS, COPY_REGISTERS = 2, 128, 40
# What a computing thread holds besides its accumulators: 128 x 128 of them spill nothing, 256 x 128 do (ptxas).
OTHER_REGISTERS = 40
# Mosaic GPU gives each on-chip array whole kibibytes, and each barrier 8 bytes.
ALIGNMENT, BARRIER_BYTES = 1024, 8
# Extents of the pieces in which a warpgroup hands over its result: `epi_tile_m` and `epi_tile_n` as they come.
PIECE = 64


@dataclasses.dataclass(frozen=True)
class JaxHopperSchedule:
    """The fields of that kernel's `TuningConfig`, but for the extents of its epilogue, which keep their defaults.

    Attributes:
      tile_m, tile_n: extents of what one of the two warpgroups computes.
      tile_k: extent of k that one step loads and multiplies.
      max_concurrent_steps: steps whose operands have room on chip.
      grid_minor_dim, grid_tile_width: the axis, "M" or "N", along which neighbouring tiles follow each other, and how
        many of them before the other axis advances.
      wg_dimension: the axis along which the warpgroups lie side by side.
      cluster_dimension: the axis along which two blocks pair up, or "none".
    """

    tile_m: int
    tile_n: int
    tile_k: int
    max_concurrent_steps: int
    grid_minor_dim: str
    grid_tile_width: int
    wg_dimension: str
    cluster_dimension: str


class JaxHopperMatmul(Kernel[MatmulProblem, JaxHopperSchedule]):
    backend = "jax_hopper"

    def supports(self, problem: MatmulProblem, target: Target) -> str | None:
        p = problem
        if target.platform != "cuda" or target.architecture != "sm_90":
            return f"is written for NVIDIA Hopper (sm_90), not for {target.kind} ({target.architecture})"
        if p.dtype == "float32":
            return "multiplies 16-bit operands"
        if p != MatmulProblem(p.m, p.n, p.k, dtype=p.dtype):
            return (
                "multiplies [m, k] by [k, n], nothing transposed and no batch, into a result of their type, and no more"
            )
        if p.m % 64 or p.n % 64 or p.k % 64:
            return "needs m, n and k that are multiples of its least tile, 64"
        if (p.m // 64) % 2 and (p.n // 64) % 2:
            return "needs 128 rows or columns for its two warpgroups, and tiles that divide m and n"
        try:
            _hopper()
        except ImportError as error:
            return f"cannot be imported from jax {jax.__version__}: {error}"
        return None

    def space(self, problem: MatmulProblem, target: Target) -> Space[JaxHopperSchedule]:
        p = problem

        def divides(axis: str, extent: int) -> Any:
            def rule(s: Any) -> Any:
                tile = s.tile_m if axis == "M" else s.tile_n
                return extent % (tile * _doubled(s.wg_dimension, axis) * _doubled(s.cluster_dimension, axis)) == 0

            return rule

        return Space(
            JaxHopperSchedule,
            choices={
                "tile_m": (128, 64, 256),
                "tile_n": (128, 64, 256),
                "tile_k": (64, 128),
                "max_concurrent_steps": (4, 3, 5, 6),
                "grid_minor_dim": ("M", "N"),
                "grid_tile_width": (8, 4, 16, 1),
                "wg_dimension": ("N", "M"),
                "cluster_dimension": ("none", "M", "N"),
            },
            rules={
                "the tiles of a cluster divide m": divides("M", p.m),
                "the tiles of a cluster divide n": divides("N", p.n),
                "tile_k divides k": lambda s: p.k % s.tile_k == 0,
                "no more stages than steps": lambda s: s.max_concurrent_steps * s.tile_k <= p.k,
            },
        )

    def footprint(self, problem: MatmulProblem, schedules: Columns, target: Target) -> Footprint:
        p, s = problem, schedules
        itemsize = jnp.dtype(p.dtype).itemsize
        block_m, block_n = s.tile_m * _doubled(s.wg_dimension, "M"), s.tile_n * _doubled(s.wg_dimension, "N")
        slots = np.minimum(2, s.tile_m * s.tile_n // PIECE**2)
        registers = s.tile_m * s.tile_n // THREADS + OTHER_REGISTERS
        return Footprint(
            arithmetic=p.arithmetic,
            grid=(p.m // block_m, p.n // block_n),
            step=Phase(
                loads=(
                    Operand(block_m * s.tile_k * itemsize, axes=(0,), multicast=_doubled(s.cluster_dimension, "N")),
                    Operand(s.tile_k * block_n * itemsize, axes=(1,), multicast=_doubled(s.cluster_dimension, "M")),
                ),
                flops=2.0 * block_m * block_n * s.tile_k,
                # Each 64-row instruction of each warpgroup reads its rows of a and all the columns it multiplies of b.
                onchip_bytes_read=WARPGROUPS * (s.tile_m // 64) * (64 + s.tile_n) * s.tile_k * itemsize,
            ),
            tile=Phase(bytes_written=block_m * block_n * itemsize),
            onchip_bytes=_whole(s.max_concurrent_steps * block_m * s.tile_k * itemsize)
            + _whole(s.max_concurrent_steps * s.tile_k * block_n * itemsize)
            + _whole(WARPGROUPS * slots * PIECE**2 * itemsize)
            + 2 * s.max_concurrent_steps * BARRIER_BYTES,
            steps=p.k // s.tile_k,
            minor=np.where(s.grid_minor_dim == "M", 0, 1),
            group=s.grid_tile_width,
            stages=s.max_concurrent_steps,
            consumers=WARPGROUPS,
            threads=WARPGROUPS * THREADS,
            registers=registers,
            registers_per_block=THREADS * (WARPGROUPS * registers + COPY_REGISTERS),
            cluster=np.where(s.cluster_dimension == "none", 1, 2),
            persistent=True,
        )

    def run(
        self, problem: MatmulProblem, schedule: JaxHopperSchedule, target: Target, /, *args: Any, **params: Any
    ) -> jax.Array:
        hopper = _hopper()
        axes = {"none": None, "M": hopper.MatmulDimension.M, "N": hopper.MatmulDimension.N}
        fields = {name: axes.get(value, value) for name, value in vars(schedule).items()}
        # It asks the default device how many cores there are, which need not be the chip it is lowered for.
        with mock.patch.object(hopper, "get_num_sms", return_value=target.cores):
            product: jax.Array = hopper.matmul(*args, None, hopper.TuningConfig(**fields))
        return product


def _hopper() -> Any:
    return importlib.import_module("jax.experimental.pallas.ops.gpu.hopper_matmul_mgpu")


def _doubled(dimension: Any, axis: str) -> Any:
    """2 where two warpgroups, or two blocks, lie along this axis."""
    return np.where(dimension == axis, 2, 1)


def _whole(nbytes: Any) -> Any:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


JAX_HOPPER = JaxHopperMatmul()
# Ours and the rival as one operation: timed by one bench, on the same buffers.
RIVALS = Operation("matmul_and_rivals", MatmulProblem, (*MATMUL.kernels, JAX_HOPPER))
