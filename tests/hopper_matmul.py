"""The Hopper matmul as its tests see it: a schedule to start from, problems, and what JAX must have for some."""

import dataclasses
import functools

import hopper
import pytest

from search_spaces.jax_compat import HAS_GPU_INTERPRETER, HAS_UNTILED_SWIZZLE
from search_spaces.matmul.hopper import HopperSchedule, MosaicGpuMatmul
from search_spaces.matmul.problem import MatmulProblem

KERNEL = MosaicGpuMatmul()
TARGET = hopper.H200.target
BASE = HopperSchedule(
    tile_m=128,
    tile_n=128,
    tile_k=64,
    stages=3,
    consumers="cooperative_m",
    cluster="none",
    grid_minor_dim="n",
    grid_tile_width=4,
    epi_tile_n=64,
)
LARGE = [
    MatmulProblem(4096, 4096, 4096),
    MatmulProblem(8192, 8192, 8192, transpose_b=True),
    MatmulProblem(2048, 5120, 5120),
    MatmulProblem(2048, 14336, 4096, dtype="float16", out_dtype="float32"),
    MatmulProblem(4001, 4040, 4104, transpose_a=True),
    MatmulProblem(4096, 4096, 4096, dtype="float32", transpose_b=True),
    MatmulProblem(2048, 2048, 128, batch=16),
]
SMALL = [
    MatmulProblem(1, 1, 1),
    MatmulProblem(5, 16, 24, transpose_b=True),
    MatmulProblem(16, 8192, 8192),
    MatmulProblem(100, 72, 40, batch=3, transpose_a=True),
    MatmulProblem(128, 8192, 8192, transpose_b=True),
    MatmulProblem(512, 512, 65536, out_dtype="float32"),
    MatmulProblem(1024, 1024, 2048, transpose_a=True, transpose_b=True),
    MatmulProblem(30000, 64, 64),
    MatmulProblem(16, 4096, 14336, transpose_b=True),
    MatmulProblem(33, 4096, 4096, transpose_a=True, out_dtype="float32"),
    MatmulProblem(5, 1000, 2000, dtype="float32", transpose_b=True, out_dtype="bfloat16"),
    MatmulProblem(1000, 1000, 1000, transpose_b=True),
    MatmulProblem(200, 1000, 3000, batch=2),
    MatmulProblem(40, 4096, 4096, dtype="int8", out_dtype="int32", transpose_b=True),
    MatmulProblem(1024, 1024, 4096, dtype="float8_e4m3fn", out_dtype="bfloat16", transpose_b=True),
    MatmulProblem(1024, 5027, 768, transpose_b=True),
]
FUSED = [
    MatmulProblem(4096, 4096, 4096, bias="bfloat16", activation="gelu", residual="bfloat16"),
    MatmulProblem(4001, 1000, 512, batch=2, bias="float32", activation="silu", residual="float32"),
    MatmulProblem(1000, 1000, 2048, out_dtype="float32", residual="bfloat16"),
    MatmulProblem(33, 1000, 4096, batch=2, bias="float16", residual="float16"),
    MatmulProblem(
        200, 333, 2000, dtype="float32", transpose_b=True, bias="float32", activation="relu", out_dtype="bfloat16"
    ),
]


@functools.cache
def legal(problem):
    """The legal schedules of the space, as columns."""
    return KERNEL.space(problem, TARGET).legal()[0]


def schedule(**fields):
    return dataclasses.replace(BASE, **fields)


def footprint(problem, schedules):
    return KERNEL.footprint(problem, schedules, TARGET)


interpreted = pytest.mark.skipif(not HAS_GPU_INTERPRETER, reason="JAX interprets GPU kernels from 0.11 on")
untiled = pytest.mark.skipif(not HAS_UNTILED_SWIZZLE, reason="JAX swizzles without tiles from 0.11 on")


def fits(found):
    h200 = hopper.H200
    return (
        (found.onchip_bytes <= h200.onchip_bytes)
        & (found.registers <= h200.registers_per_thread)
        & (found.registers_per_block <= h200.registers_per_core)
    )
