"""The matmul by warp-level MMA as its tests see it: chips, a schedule to start from, and its numbers by `ptx.py`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scheduler.core import hardware
from search_spaces.jax_compat import HAS_MMA
from search_spaces.matmul.mma import MmaSchedule, MosaicGpuMmaMatmul
from search_spaces.matmul.problem import MatmulProblem

KERNEL = MosaicGpuMmaMatmul()
A100, A40, L40S, H200 = (hardware.find(kind) for kind in ("A100", "A40", "L40S", "H200"))
BASE = MmaSchedule(
    tile_m=64, tile_n=64, tile_k=32, stages=3, warps_m=2, warps_n=2, grid_minor_dim="n", grid_tile_width=1
)
EIGHT = {"tile_m": 128, "tile_n": 128}
CASES = {  # name: the problem, and fields of the schedule that differ
    "whole tiles": (MatmulProblem(128, 128, 128), {"tile_k": 64, "grid_minor_dim": "m", "grid_tile_width": 2}),
    "ragged": (MatmulProblem(100, 72, 72), {}),
    "a transposed, odd extents": (MatmulProblem(65, 71, 101, transpose_a=True), {"tile_k": 64}),
    "float16, float32 results, four warps along m": (
        MatmulProblem(130, 200, 72, dtype="float16", transpose_b=True, out_dtype="float32"),
        {"warps_m": 4, "warps_n": 1},
    ),
    "both transposed, epilogue, four warps along n": (
        MatmulProblem(
            130, 201, 72, transpose_a=True, transpose_b=True, bias="bfloat16", activation="gelu", residual="float32"
        ),
        {"warps_m": 1, "warps_n": 4},
    ),
    "a batch, epilogue, eight warps along n": (
        MatmulProblem(200, 151, 80, batch=2, bias="float32", activation="silu", residual="bfloat16"),
        EIGHT | {"warps_n": 4},
    ),
    "a batch, a transposed, eight warps along m": (
        MatmulProblem(200, 150, 80, batch=2, transpose_a=True, activation="relu"),
        EIGHT | {"warps_m": 4},
    ),
    "few rows, split-K": (
        MatmulProblem(20, 33, 600, transpose_a=True, transpose_b=True),
        {"tile_m": 16, "warps_m": 1, "warps_n": 4, "tile_k": 64, "split_k": 2},
    ),
    "splits of k that end beyond it, though tiles divide it": (
        MatmulProblem(20, 40, 640, batch=2, transpose_b=True),
        {"tile_m": 16, "warps_m": 1, "warps_n": 4, "tile_k": 64, "split_k": 3},
    ),
    "results side by side": (MatmulProblem(100, 201, 300, split_sizes="33+168"), {"tile_k": 64}),
    "int8": (MatmulProblem(70, 65, 200, dtype="int8", out_dtype="int32", transpose_b=True), {"tile_k": 64}),
    "int8, a batch, split-K": (
        MatmulProblem(70, 65, 600, dtype="int8", out_dtype="bfloat16", transpose_b=True, batch=2),
        {"tile_k": 64, "split_k": 2},
    ),
    "tiles of 192 rows": (MatmulProblem(300, 60, 90), {"tile_m": 192, "tile_k": 64, "stages": 2}),
    "one element": (MatmulProblem(1, 1, 1), {"tile_m": 16, "warps_m": 1, "warps_n": 4, "tile_k": 64, "stages": 2}),
}
needs_mma = pytest.mark.skipif(not HAS_MMA, reason="Mosaic GPU compiles for these chips from jax 0.11.2 on")


def case(name):
    problem, fields = CASES[name]
    return problem, dataclasses.replace(BASE, **fields)


def emulated(problem, schedule, chip, folder):
    """The answer of the compiled kernel's PTX, and what `absent_gpu` says of it; splits of k are reduced here."""
    import absent_gpu
    import ptx

    from search_spaces.hopper import padded
    from search_spaces.matmul.mma import launched
    from search_spaces.matmul.mma.space import Tiling
    from search_spaces.matmul.tiles import reduced

    inside = problem if schedule.split_k == 1 else problem.plain.joined
    tiling, args = Tiling(inside, schedule), problem.inputs(seed=0)
    arrays = list(args[: len(inside.operands())])
    arrays[:2] = map(padded, arrays, tiling.extents)
    found = absent_gpu.compiled(lambda *args: launched(inside, schedule, args), arrays, chip, folder)
    places = inside.batch * schedule.split_k
    dtype = inside.whole.dtype if schedule.split_k == 1 else inside.acc_dtype
    lead = (places,) if places > 1 else ()
    results = [np.full((*lead, inside.m, n), 99, dtype) for n in inside.columns]
    memory = [np.array(x).reshape(-1).view(np.uint8) for x in (*arrays, *results)]
    ptx.launch(found.ptx.read_text(), int(places * tiling.grid_m * tiling.grid_n), found.onchip_bytes, memory)
    held = zip(memory[len(arrays) :], results, strict=True)
    answers = [jnp.asarray(raw.view(like.dtype).reshape(like.shape)) for raw, like in held]
    answer = problem.pack(answers) if schedule.split_k == 1 else reduced(problem, schedule.split_k, answers[0], args)
    return answer, found


def check(problem, answer):
    """That it is the reference's, as far as the problem demands it."""
    tolerance = problem.tolerance()
    wanted = problem.reference(*problem.inputs(seed=0))
    for one, other in zip(jax.tree.leaves(answer), jax.tree.leaves(wanted), strict=True):
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        assert one.shape == other.shape
        assert np.all(np.abs(one - other) <= tolerance.absolute + tolerance.relative * np.abs(other))
