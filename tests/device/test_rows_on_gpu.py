"""The GPU kernels of row programs, compiled and run: every sampled legal schedule is right."""

import random

import jax
import jax.numpy as jnp
import pytest

import scheduler
from scheduler.measure.runner import Task
from scheduler.model.cost import CostModel
from scheduler.model.pruning import prune
from search_spaces import load


def softmax(x):
    return jax.nn.softmax(x)


def log_softmax(x):
    return jax.nn.log_softmax(x)


def channel_norm(x):
    y = x.astype(jnp.float32)
    return ((y - jnp.mean(y)) * jax.lax.rsqrt(jnp.var(y) + 1e-6)).astype(x.dtype)


def quantized_and_back(x):
    scale = jnp.max(jnp.abs(x)) / 448
    return (x / scale).astype(jnp.float8_e4m3fn).astype(x.dtype) * scale


EXTENTS = [
    (4096, 1024, "bfloat16"),
    (4096, 4096, "bfloat16"),
    (1000, 8192, "float16"),
    (1001, 1000, "float32"),
    (37, 4095, "bfloat16"),
    (5, 129, "float16"),
    (600, 32768, "bfloat16"),
    (300, 131072, "bfloat16"),
    (133, 151936, "bfloat16"),
    (1000, 65536, "bfloat16"),
    (140, 65536, "float32"),
    (7, 262144, "bfloat16"),
    (70, 524288, "bfloat16"),
    # Rows that start anywhere.
    (133, 50257, "bfloat16"),
    (1, 50257, "bfloat16"),
    (300, 32001, "float16"),
    (301, 24577, "bfloat16"),
    (140, 65537, "float32"),
    (67, 128257, "bfloat16"),
    (9, 262145, "bfloat16"),
    (133, 50264, "bfloat16"),
]
# Several operands, several results, and sums over rows.
SEVERAL = [
    (16, 4096, "bfloat16"),
    (4096, 4096, "bfloat16"),
    (1001, 1000, "float32"),
    (37, 4095, "float16"),
    (300, 8192, "bfloat16"),
    (301, 32768, "bfloat16"),
    (5, 129, "float16"),
    (133, 50257, "bfloat16"),
    (67, 100000, "bfloat16"),
    (9, 262145, "float16"),
]
ALONE = ("softmax", "rms_norm", "silu_and_mul", "log_softmax", "cross_entropy_saving", "quantize_rows")
OTHERS = (
    "add_rms_norm",
    "layer_norm",
    "silu_and_mul_backward",
    "softmax_backward",
    "cross_entropy_backward",
    "layer_norm_backward",
    "rms_norm_backward",
    "add_rms_norm_backward",
)
PROBLEMS = [(name, load(name).problem(*extents)) for name in ALONE for extents in EXTENTS]
PROBLEMS += [(name, load(name).problem(*extents)) for name in OTHERS for extents in SEVERAL]
PROBLEMS += [
    (name, load(name).problem(*extents, weight_dtype="float32"))
    for name in ("rms_norm", "add_rms_norm", "layer_norm_backward")
    for extents in SEVERAL
    if extents[2] != "float32"
]
PROBLEMS += [
    ("group_norm", load("group_norm").problem(*extents))
    for extents in [(64, 3136, 256, 8), (3, 1001, 64, 2, "float32"), (5, 785, 512, 16, "float16"), (2, 50, 128, 1)]
]
ALONG = [
    (softmax, (5, 3136, 256), "bfloat16"),
    (softmax, (2, 21, 65536), "float16"),
    (softmax, (3, 1001, 128), "float32"),
    (log_softmax, (7, 1000, 64), "bfloat16"),
    (channel_norm, (16, 256, 3136), "bfloat16"),
    (channel_norm, (3, 77, 512), "float32"),
]
PROBLEMS += [
    ("rows_along", scheduler.rows(function, axis=1).problem(jax.ShapeDtypeStruct(shape, dtype)))
    for function, shape, dtype in ALONG
]
PROBLEMS.append(("rows", scheduler.rows(quantized_and_back).problem(jax.ShapeDtypeStruct((4096, 1024), "float32"))))


@pytest.mark.parametrize("name", dict.fromkeys(name for name, _ in PROBLEMS))
def test_sampled_schedules_agree_with_the_reference(pool, all_right, name):
    operation, tasks = load(name), []
    kernel = operation.kernel("mosaic_gpu")
    for problem in (problem for of, problem in PROBLEMS if of == name):
        if kernel.supports(problem, pool.hardware.target) is None:
            # Sums over rows too long for registers have no candidates.
            candidates = prune(kernel, problem, pool.hardware, CostModel(pool.hardware)).candidates()
            sample = candidates[:4] + random.Random(0).sample(candidates, min(16, len(candidates)))
            tasks += [Task(operation, problem, c.backend, c.schedule, 3) for c in sample]
    assert tasks
    all_right(tasks)
