"""Random bits in functions of one row: the bits of `jax.random`, in each kernel, its gradient and its machine code.

This file as a program writes the PTX of one schedule.
"""

import functools
import json
import re
import sys

import hopper
import jax
import jax.numpy as jnp
import machine_code
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import scheduler
from scheduler import NoCandidate
from scheduler.core.hardware import find
from scheduler.model.cost import CostModel
from scheduler.model.pruning import prune
from search_spaces.jax_compat import HAS_GPU_INTERPRETER, gpu_interpreter
from search_spaces.problem import as_tuple
from search_spaces.random_bits import threefry2x32
from search_spaces.rows.hopper import HopperRows
from search_spaces.rows.hopper.space import RowSchedule
from search_spaces.rows.operation import ROWS
from search_spaces.rows.program import parse
from search_spaces.rows.tpu import TpuRows

pytestmark = pytest.mark.slow_but_first

ROWS_, COLUMNS, RATE = 5, 333, 0.25
X = jax.random.uniform(jax.random.key(1), (ROWS_, COLUMNS), jnp.float32, 0.5, 1.5)
IMPLS = {"JAX's": "threefry2x32", "13 rounds": scheduler.threefry13}
every = pytest.mark.parametrize("impl", IMPLS.values(), ids=IMPLS)


@pytest.fixture(autouse=True)
def _no_answers(_own_cache):
    scheduler.reload()


def dropout(x, key, *, rate=RATE):
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


def two_draws(x, key):
    first, second = jax.random.split(key)
    kept = jax.random.uniform(first, x.shape) < jax.random.uniform(jax.random.fold_in(second, 7), x.shape)
    small = jax.random.bits(first, x.shape, "uint8").astype(jnp.int32)
    return jnp.where(kept, x, 0), small, jax.random.bits(second, x.shape) < jax.random.bits(key), jax.random.uniform(key)


def keys_of(impl, seed=0, rows=ROWS_):
    return jax.random.split(jax.random.key(seed, impl=impl), rows)


def equal_bits(actual, expected):
    """Zeros at the same elements, and elsewhere numbers that round alike."""
    for a, b in zip(as_tuple(actual), as_tuple(expected), strict=True):
        np.testing.assert_array_equal(a == 0, b == 0)
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=1e-6)


@every
def test_the_bits_are_those_of_vmap(impl):
    keys = keys_of(impl)
    for function in (dropout, two_draws):
        tuned, wanted = scheduler.rows(function), jax.vmap(function)(X, keys)
        equal_bits(tuned(X, keys, backends="interpret"), wanted)
        equal_bits(jax.jit(tuned)(X, keys), wanted)
    assert 0.5 < jnp.mean(dropout(X, keys[0]) != 0) < 0.9


@every
def test_vmap_and_leading_axes_draw_of_the_key_of_each_row(impl):
    tuned = functools.partial(scheduler.rows(dropout), backends="interpret")
    x, keys = jnp.stack([X, 2 * X]), keys_of(impl, rows=(2, ROWS_))
    wanted = jax.vmap(jax.vmap(dropout))(x, keys)
    equal_bits(tuned(x, keys), wanted)
    equal_bits(jax.vmap(tuned)(x, keys), wanted)


@every
def test_the_backward_pass_draws_the_mask_of_the_forward_pass_and_saves_no_vector_for_it(impl):
    def total(x, residual, key):
        return jnp.tanh(residual) + dropout(x, key)

    keys, tuned = keys_of(impl), functools.partial(scheduler.rows(total), backends="interpret")
    residual = jnp.zeros_like(X)
    result, back = jax.vjp(lambda x: tuned(x, residual, keys), X)
    (gradient,) = back(jnp.ones_like(X))
    np.testing.assert_array_equal(gradient != 0, result != 0)
    wanted = jax.grad(lambda x: jnp.sum(jax.vmap(total)(x, residual, keys)))(X)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-6)

    def pullback(x):
        return jax.vjp(lambda x: scheduler.rows(dropout)(x, keys), x)[1](x)

    (backward,) = (row.problem.program for row in scheduler.problems(pullback, X).tuned)
    assert sorted((x.kind, x.dtype) for x in backward.operands) == [
        ("row", "float32"),  # the cotangent
        ("scalar", "int32"),
        ("scalar", "int32"),
    ]


# ------------------------------------------------------------------------------
# Kernels.

KERNEL, TPU = HopperRows(), TpuRows()


def drawn(function, columns, impl, rows=ROWS_):
    """A problem and its arguments, with keys that are not small numbers."""
    x = jnp.resize(X, (rows, columns))
    keys = keys_of(impl, rows=rows)
    words = jax.lax.bitcast_convert_type(jax.random.key_data(keys), jnp.int32)
    return scheduler.rows(function).problem(x, keys), (x, words[:, 0], words[:, 1]), jax.vmap(function)(x, keys)


SCHEDULES = {
    "odd columns": (333, RowSchedule("registers", 4, 1, blocks=1)),
    "a warp a row": (328, RowSchedule("registers", 1, 8, blocks=1)),
}


@pytest.mark.skipif(not HAS_GPU_INTERPRETER, reason="JAX interprets Mosaic GPU kernels from 0.11 on")
@every
@pytest.mark.parametrize("name", SCHEDULES)
def test_mosaic_gpu_draws_the_same_bits(name, impl):
    columns, schedule = SCHEDULES[name]
    problem, args, wanted = drawn(dropout, columns, impl)
    with gpu_interpreter():
        found = jax.jit(lambda *args: KERNEL.run(problem, schedule, hopper.H200.target, *args))(*args)
    equal_bits(found, wanted)


@every
def test_mosaic_tpu_draws_the_same_bits(impl):
    problem, args, wanted = drawn(dropout, 333, impl, rows=16)
    target = find("v5e").target
    space = TPU.space(problem, target)
    schedule = space.schedule(**space.legal()[0].row(0))
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        found = jax.block_until_ready(jax.jit(lambda *args: TPU.run(problem, schedule, target, *args))(*args))
    equal_bits(found, wanted)


def main(text: str) -> None:
    problem = ROWS.problem(4096, text)
    schedule = prune(KERNEL, problem, hopper.H200, CostModel(hopper.H200)).candidates()[0].schedule
    one = KERNEL.space(problem, hopper.H200.target).decode(dict(schedule))
    machine_code.compile_for_h200(lambda *args: KERNEL.run(problem, one, hopper.H200.target, *args), problem.operands())


if __name__ == "__main__":
    main(*sys.argv[1:])
