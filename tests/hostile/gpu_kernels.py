"""Random problems of the Hopper kernels in JAX's interpreter of GPU kernels, against float64."""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Any

import formulas
import hopper
import jax
import numpy as np
from attack import Tried, seeded
from random_problems import _differs

from scheduler.model.pruning import illegal
from search_spaces import load
from search_spaces.attention.problem import AttentionProblem
from search_spaces.jax_compat import gpu_interpreter
from search_spaces.problem import Problem, as_tuple

OPERATIONS = ("matmul", "softmax", "rms_norm", "add_rms_norm", "silu_and_mul", "flash_attention")
# Of two cores: every persistent kernel has several tiles for each.
TARGET = dataclasses.replace(hopper.H200.target, cores=2)


def a_matmul(draw: random.Random) -> Problem:
    m, n, k = (8 * draw.randint(1, 24) for _ in range(3))
    first = 32 * draw.randint(1, 5)
    how = {"split_sizes": f"{first}+{n - first}"} if first < n and draw.random() < 0.3 else {}
    dtype, transpose_b = draw.choice(("bfloat16", "float16")), draw.random() < 0.5
    return load("matmul").problem(m, n, k, dtype=dtype, transpose_b=transpose_b, **how)


def rows(draw: random.Random) -> Problem:
    name = draw.choice(("softmax", "rms_norm", "add_rms_norm", "silu_and_mul"))
    columns = draw.choice((draw.randint(1, 600), 8 * draw.randint(1, 300)))
    return load(name).problem(draw.randint(1, 9), columns, draw.choice(("bfloat16", "float16", "float32")))


def an_attention(draw: random.Random) -> Problem:
    kv_heads = draw.choice((1, 2))
    return load("flash_attention").problem(
        1, draw.randint(1, 150), draw.randint(1, 200), kv_heads * draw.choice((1, 2)), kv_heads, draw.choice((64, 128)),
        causal=draw.random() < 0.5, return_lse=draw.random() < 0.5,
    )  # fmt: skip


def tries(seed: int, count: int) -> Tried:
    tried = Tried()
    for number, draw in seeded(seed, count):
        problem = draw.choice((a_matmul, rows, rows, an_attention))(draw)
        tried.run(f"{number}, {type(problem).__name__} {problem}", functools.partial(_wrong, problem, draw))
    return tried


def _wrong(problem: Problem, draw: random.Random) -> str | None:
    kernels = [
        (operation, kernel)
        for operation in map(load, OPERATIONS)
        if operation.problem is type(problem)
        for kernel in operation.kernels
        if kernel.backend.startswith("mosaic") and kernel.supports(problem, TARGET) is None
    ]
    if not kernels:
        return None
    _, kernel = draw.choice(kernels)
    space = kernel.space(problem, TARGET)
    points, _ = space.legal()
    chip = dataclasses.replace(hopper.H200, cores=2)
    for _ in range(200):
        fields = points.row(draw.randrange(len(points)))
        if illegal(kernel, problem, chip, fields) is None:
            break
    else:
        return None
    schedule = space.decode(fields)
    args = problem.inputs(seed=draw.randrange(1000))
    with gpu_interpreter():
        actual = jax.jit(lambda *args: kernel.results(problem, schedule, TARGET, *args))(*args)
    right = _right(problem, [np.asarray(x, np.float64) for x in args])
    reason = _differs(as_tuple(actual), right, kernel.tolerance(problem, schedule))
    return reason and f"{schedule}: {reason}"


def _right(problem: Any, args: list[Any]) -> tuple[Any, ...]:
    if isinstance(problem, AttentionProblem):
        visible = formulas.seen(problem.q_len, problem.kv_len, causal=problem.causal)
        found = formulas.attention(*args, visible, scale=problem.default_scale(), softcap=None)
        return (found["out"], found["lse"]) if len(problem.results()) > 1 else (found["out"],)
    match type(problem).__name__:
        case "MatmulProblem":
            right = formulas.matmul(np, *args, transpose_b=problem.transpose_b)
            return tuple(np.split(right, np.cumsum(problem.columns)[:-1], axis=-1))
        case "SoftmaxProblem":
            return (formulas.softmax(np, *args),)
        case "RmsNormProblem":
            return (formulas.rms_norm(np, *args),)
        case "AddRmsNormProblem":
            return formulas.add_rms_norm(np, *args)
        case _:
            return (formulas.silu_and_mul(np, *args),)
