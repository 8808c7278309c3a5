"""The GPU kernels of the matrix product, compiled and run: every sampled legal schedule is right."""

import os
import subprocess
import sys

import pytest
from samples import of_each_part, parts_without_any

from scheduler.search.tuner import tune
from search_spaces.matmul import MATMUL, MatmulProblem
from search_spaces.matmul.hopper.schedule import PING_PONG

PROBLEMS = [
    MatmulProblem(1024, 1024, 1024),
    MatmulProblem(1024, 1024, 1024, dtype="float16", out_dtype="float32"),
    MatmulProblem(640, 384, 512, transpose_a=True),
    MatmulProblem(640, 384, 512, transpose_b=True),
    MatmulProblem(640, 384, 512, transpose_a=True, transpose_b=True),
    MatmulProblem(16, 4096, 2048),
    MatmulProblem(1, 4096, 2048, transpose_b=True),
    MatmulProblem(1000, 1000, 1000),
    MatmulProblem(777, 333, 555, out_dtype="float32"),
    MatmulProblem(5, 7, 3),
    MatmulProblem(333, 777, 129, transpose_a=True, transpose_b=True),
    MatmulProblem(256, 192, 320, batch=5),
    MatmulProblem(4096, 64, 8192),
    MatmulProblem(512, 640, 384, dtype="float32", transpose_b=True),
    MatmulProblem(1384, 2600, 512, transpose_b=True),
    MatmulProblem(16, 8192, 8192),
    MatmulProblem(33, 4096, 4096, transpose_a=True, out_dtype="float32"),
    MatmulProblem(64, 1000, 4104, batch=2),
    MatmulProblem(9, 2600, 4096, dtype="float32", transpose_b=True, out_dtype="bfloat16"),
    MatmulProblem(64, 64, 65536, out_dtype="float32"),
    MatmulProblem(512, 512, 8192),
    MatmulProblem(1000, 1000, 1000, transpose_b=True),
    MatmulProblem(1024, 1024, 2048, dtype="float8_e4m3fn", out_dtype="bfloat16", transpose_b=True),
    MatmulProblem(16, 4096, 4096, dtype="float8_e5m2", out_dtype="float32", transpose_b=True),
    MatmulProblem(1024, 1024, 2048, dtype="int8", out_dtype="int32", transpose_b=True),
    MatmulProblem(40, 4096, 4096, dtype="int8", out_dtype="bfloat16", transpose_b=True),
    MatmulProblem(333, 200, 777, dtype="int8", out_dtype="int32", transpose_b=True),
    MatmulProblem(2048, 2048, 1024, bias="bfloat16", activation="gelu", residual="bfloat16"),
    MatmulProblem(777, 333, 555, batch=2, bias="bfloat16", activation="silu", residual="float32"),
    MatmulProblem(1000, 1000, 1000, transpose_b=True, out_dtype="bfloat16", bias="float32", residual="bfloat16"),
    MatmulProblem(16, 8192, 8192, bias="bfloat16", activation="relu", residual="bfloat16"),
    MatmulProblem(33, 4104, 4096, transpose_b=True, out_dtype="float32", bias="float16", residual="float32"),
    MatmulProblem(64, 64, 65536, bias="float32", activation="gelu", residual="bfloat16"),
    MatmulProblem(512, 640, 384, dtype="float32", transpose_b=True, bias="float32", activation="silu"),
    MatmulProblem(1, 4096, 2048, residual="float32"),
    MatmulProblem(2048, 576, 2048),
    MatmulProblem(1000, 3000, 128, batch=4),
    MatmulProblem(2048, 5120, 512, transpose_b=True, bias="bfloat16", activation="gelu", residual="bfloat16"),
    MatmulProblem(1000, 1000, 1000, transpose_a=True),
    MatmulProblem(1000, 1000, 1000, transpose_a=True, transpose_b=True),
    MatmulProblem(4001, 4040, 1032),
    MatmulProblem(1001, 1000, 1000, dtype="float16", out_dtype="float32"),
    MatmulProblem(1001, 1000, 1000, dtype="float32", transpose_b=True),
    MatmulProblem(1001, 1001, 1000, bias="bfloat16", activation="gelu", residual="bfloat16"),
    MatmulProblem(301, 203, 1000, batch=3, transpose_b=True),
    MatmulProblem(1024, 5027, 768, transpose_b=True),
    MatmulProblem(33, 1001, 4104, transpose_b=True),
    MatmulProblem(1001, 1000, 1008, dtype="float8_e4m3fn", out_dtype="bfloat16", transpose_b=True),
    MatmulProblem(2560, 5120, 2048, bias="bfloat16", residual="bfloat16"),
    MatmulProblem(1736, 5512, 2048),
    # Rows of 32 and of 64 bytes more than multiples of 128.
    MatmulProblem(1024, 1040, 1056),
    MatmulProblem(784, 4304, 1120, bias="bfloat16", activation="gelu", residual="bfloat16"),
    MatmulProblem(1024, 1040, 2080, dtype="float8_e4m3fn", out_dtype="bfloat16", transpose_b=True),
]
# Of other than 16-bit operands, those that are copied before the launch.
TURNED = [
    MatmulProblem(512, 640, 384, dtype="float32"),
    MatmulProblem(1001, 1000, 999, dtype="float32", transpose_a=True),
    MatmulProblem(301, 203, 1000, batch=3, dtype="float32", transpose_a=True, transpose_b=True, bias="float32"),
    MatmulProblem(1024, 1024, 2048, dtype="int8", out_dtype="int32", transpose_a=True),
    MatmulProblem(333, 200, 777, dtype="float8_e4m3fn", out_dtype="bfloat16"),
]
THREE_PRODUCTS = [
    MatmulProblem(512, 640, 384, dtype="float32", precision="high"),
    MatmulProblem(1000, 1000, 1000, dtype="float32", precision="high", transpose_a=True),
    MatmulProblem(777, 333, 555, dtype="float32", precision="high", transpose_a=True, transpose_b=True),
    MatmulProblem(16, 4096, 4096, dtype="float32", precision="high", transpose_b=True),
    MatmulProblem(301, 203, 1000, batch=3, dtype="float32", precision="high"),
    MatmulProblem(64, 64, 16384, dtype="float32", precision="high", bias="float32", activation="gelu"),
    MatmulProblem(1024, 768, 512, dtype="float32", precision="high", bias="bfloat16", residual="float32"),
    MatmulProblem(1024, 1536, 512, dtype="float32", precision="high", split_sizes="1024+512"),
    MatmulProblem(1024, 1024, 1024, dtype="float32"),
]
# Parts of the space: of each that a problem has, the model's first and some others run.
PARTS = {
    "plain": lambda s: (
        not ({"swap_ab", "split_k", "delay_release"} & set(s)) and s["consumers"] not in ("one", *PING_PONG)
    ),
    "swap_ab": lambda s: "swap_ab" in s,
    "split-K": lambda s: "split_k" in s,
    "swap_ab, split-K": lambda s: {"swap_ab", "split_k"} <= set(s),
    "one consumer": lambda s: s["consumers"] == "one",
    "ping-pong": lambda s: s["consumers"] in PING_PONG,
    "ordered ping-pong, swap_ab": lambda s: s["consumers"] == "ordered_ping_pong" and "swap_ab" in s,
    "delay_release": lambda s: "delay_release" in s and s["consumers"] not in PING_PONG,
    "a last wave that is split": lambda s: "tail_split_k" in s,
    "swap_ab, tiles that quantize": lambda s: "swap_ab" in s and s["tile_m"] % 64 != 0 and s["tile_n"] == 192,
}


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_sampled_schedules_agree_with_the_reference(pool, all_right, problem):
    all_right(of_each_part(MATMUL, problem, pool.hardware, PARTS, first=4, others=12))


@pytest.mark.parametrize("problem", TURNED, ids=str)
def test_operands_are_turned_as_the_kernel_reads_them(pool, all_right, problem):
    all_right(of_each_part(MATMUL, problem, pool.hardware, PARTS, first=1, others=2))


@pytest.mark.parametrize("problem", THREE_PRODUCTS, ids=str)
def test_three_products_of_bfloat16_are_as_exact_as_their_problem_asks(pool, all_right, problem):
    backend = "mosaic_gpu_bf16_3x"
    all_right(of_each_part(MATMUL, problem, pool.hardware, PARTS, first=2, others=3, backend=backend))


SPLIT = """
import jax
import jax.numpy as jnp
import numpy as np
from search_spaces.matmul import MatmulProblem
from search_spaces.matmul.hopper import split_bf16_3x

problem = MatmulProblem(1000, 1000, 1000, dtype="float32", precision="high", transpose_a=True)
a, b = problem.inputs(seed=0)
parts, _ = jax.jit(lambda *args: split_bf16_3x(problem, *args))(a, b)
low, high, whole = np.split(np.asarray(parts.astype(jnp.float32)), 3, axis=0)
assert np.array_equal(high, whole) and np.count_nonzero(low[:1000]) > 0.9e6
np.testing.assert_allclose((high + low)[:1000], np.asarray(a), rtol=2.0**-16)
"""


def test_xla_for_gpus_keeps_the_low_parts_of_operands(pool):
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    ended = subprocess.run([sys.executable, "-c", SPLIT], capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr[-2000:]


def test_every_part_of_the_space_has_schedules_among_the_problems(pool):
    assert not parts_without_any(MATMUL, PROBLEMS, pool.hardware, PARTS)


SAME_BITS = """
import jax
import numpy as np
from scheduler.core import hardware
from search_spaces.matmul import MATMUL, MatmulProblem

kernel, target = MATMUL.kernel("mosaic_gpu"), hardware.detect().target
for field, problem in (
    ("split_k", MatmulProblem(16, 4096, 14336)),
    ("split_k", MatmulProblem(512, 512, 8192, out_dtype="float32")),
    ("tail_split_k", MatmulProblem(1736, 5512, 2048)),
):
    args = problem.inputs(seed=0)
    space = kernel.space(problem, target)
    points, _ = space.legal()
    for parts in sorted(set(getattr(points, field).tolist()) - {1}):
        fits = getattr(points, field) == parts
        fits &= kernel.footprint(problem, points, target).onchip_bytes <= hardware.detect().onchip_bytes
        schedule = next(space.schedules(points.take(fits)))
        run = jax.jit(lambda *args: kernel.run(problem, schedule, target, *args))
        first = np.asarray(run(*args))
        for _ in range(50):
            assert np.array_equal(first, np.asarray(run(*args))), (problem, schedule)
        print(field, parts)
"""


def test_parts_of_k_give_the_same_bits_each_time(pool):
    # Beside the workers, which hold their share of the memory.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    ended = subprocess.run(
        [sys.executable, "-c", SAME_BITS], capture_output=True, text=True, check=False, env=environment
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.count("\nsplit_k ") >= 3, ended.stdout
    assert ended.stdout.count("tail_split_k ") >= 2, ended.stdout


def test_a_search_ends_with_a_schedule_near_the_librarys_time(pool):
    record = tune(MATMUL, MatmulProblem(4096, 4096, 4096), budget=64, runner=pool)
    library = record.best(frozenset({"xla"})).measurement.median_s
    pallas = record.best(frozenset({"mosaic_gpu"})).measurement.median_s
    assert pallas <= 1.03 * library
