"""Random bits in functions of one row: the bits of `jax.random`, in each kernel, its gradient and its machine code.

This file as a program writes the PTX of one schedule.
"""

import functools
import re
import sys
from pathlib import Path

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
from search_spaces.contrib.tpu.rows import TpuRows
from search_spaces.jax_compat import HAS_GPU_INTERPRETER, gpu_interpreter
from search_spaces.problem import as_tuple
from search_spaces.random_bits import threefry2x32, threefry2x32_13, threefry2x32_20
from search_spaces.rows.hopper import HopperRows
from search_spaces.rows.hopper.space import RowSchedule
from search_spaces.rows.operation import ROWS

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
    return (
        jnp.where(kept, x, 0),
        small,
        jax.random.bits(second, x.shape) < jax.random.bits(key),
        jax.random.uniform(key),
    )


def drop_path(x, key):
    first, second = jax.random.split(key)
    kept = jax.random.bernoulli(jax.random.fold_in(first, 3), 0.5)
    return jnp.where(kept & (jax.random.bits(second, x.shape) < jnp.uint32(0x90000000)), x, 0)


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
    jitted = jax.jit(jax.grad(lambda x: jnp.sum(tuned(x, residual, keys))))(X)
    for found in (gradient, jitted):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)

    def pullback(x):
        return jax.vjp(lambda x: scheduler.rows(dropout)(x, keys), x)[1](x)

    (backward,) = (row.problem.program for row in scheduler.problems(pullback, X).tuned)
    assert sorted((x.kind, x.dtype) for x in backward.operands) == [
        ("row", "float32"),  # the cotangent
        ("scalar", "int32"),
        ("scalar", "int32"),
    ]


def test_the_example_of_the_guide_is_short_and_draws_as_vmap_does():
    guide = (Path(__file__).parents[2] / "docs" / "use" / "own-kernels.md").read_text()
    (code,) = re.findall(r"```python\n(@scheduler.rows\ndef dropout.*?)```", guide, re.DOTALL)
    assert len(code.splitlines()) < 12
    names = {"jax": jax, "jnp": jnp, "scheduler": scheduler}
    exec(code, names)
    tuned, args = names["dropout_add_norm"], (X, 1 - X, jnp.ones(COLUMNS), keys_of(scheduler.threefry13))
    wanted = jax.vmap(tuned.__wrapped__, in_axes=(0, 0, None, 0))(*args)
    for found in (tuned(*args, backends="interpret"), tuned(*args)):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6), found, wanted)


def test_keys_that_kernels_do_not_take_are_refused_with_a_reason():
    tuned = scheduler.rows(dropout)
    with pytest.raises(
        ValueError, match=r"each row draws from a key of its own, as of jax.random.split\(key, \(5,\)\)"
    ):
        tuned(X, jax.random.key(0))
    with jax.threefry_partitionable(False), pytest.raises(NoCandidate, match="jax_threefry_partitionable is False"):
        tuned(X, keys_of("threefry2x32"), backends="pallas")
    with pytest.raises(NoCandidate, match="uses rng_bit_generator"):
        tuned(X, keys_of("rbg"), backends="pallas")
    captured = jax.random.key(0)
    for function in (lambda x: dropout(x, captured), lambda x: dropout(x, jax.random.key(0))):
        with pytest.raises(ValueError, match="take a key for each row as an argument"):
            scheduler.rows(function).problem(X)


def test_what_unsigned_integers_mean_beyond_their_bits_is_refused():
    def posed(of_bits):
        function = lambda x, key: x + of_bits(jax.random.bits(key, x.shape))  # noqa: E731
        return scheduler.rows(function).problem(X, keys_of("threefry2x32"))

    with pytest.raises(ValueError, match="converts uint32 to float32: convert to int32 between"):
        posed(lambda bits: bits.astype(jnp.float32))
    with pytest.raises(ValueError, match="uses max of uint32: convert to int32 first"):
        posed(lambda bits: jnp.maximum(bits, 7).astype(jnp.int32))


# ------------------------------------------------------------------------------
# Generators.

# tests/kat_vectors of Random123: rounds, counter, key, words.
MOST = 2**32 - 1
KNOWN = [
    (13, (0, 0), (0, 0), (0x9D1C5EC6, 0x8BD50731)),
    (13, (MOST, MOST), (MOST, MOST), (0xFD36D048, 0x2D17272C)),
    (13, (0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xBA3E4725, 0xF27D669E)),
    (20, (0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    (20, (MOST, MOST), (MOST, MOST), (0x1CB996FC, 0xBB002BE7)),
    (20, (0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]


@pytest.mark.parametrize("dtype", [np.uint32, np.int32])
def test_words_are_the_published_ones(dtype):
    for rounds, count, key, words in KNOWN:
        args = [jnp.asarray(np.uint32(x).view(dtype)) for x in (*key, *count)]
        for of in (functools.partial(threefry2x32, rounds=rounds), (threefry2x32_13, threefry2x32_20)[rounds > 13]):
            assert tuple(int(np.asarray(x).view(np.uint32)) for x in of(*args)) == words


def deviations(uniform):
    """By how many standard deviations the mean, and correlations of neighbours in a row and in a column, are not 0."""
    centred = (np.asarray(uniform, np.float64) - 0.5) * 12**0.5
    along, across = centred[:, 1:] * centred[:, :-1], centred[1:] * centred[:-1]
    return [abs(float(np.mean(x))) * x.size**0.5 for x in (centred, along, across)]


def test_elements_are_uniform_and_uncorrelated_and_those_of_few_rounds_are_not():
    keys = keys_of(scheduler.threefry13, rows=256)
    for shape in ((4096,), (64, 64)):
        uniform = np.asarray(jax.vmap(lambda key, shape=shape: jax.random.uniform(key, shape))(keys)).reshape(256, -1)
        assert max(deviations(uniform)) < 4
        assert abs(np.mean(uniform < 0.1) - 0.1) < 4 * (0.09 / uniform.size) ** 0.5
    key = np.arange(256, dtype=np.uint32)[:, None]
    for rounds, correlated in ((13, False), (3, True)):
        args = key, key + np.uint32(256), np.uint32(0), np.arange(4096, dtype=np.uint32)[None]
        words, _ = threefry2x32(*map(jnp.asarray, args), rounds=rounds)
        assert (max(deviations(np.asarray(words) / 2**32)) > 10) == correlated


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
    "odd columns": (dropout, 333, RowSchedule("registers", 4, 1, blocks=1)),
    "a warp a row, whose keys are derived": (drop_path, 328, RowSchedule("registers", 1, 8, blocks=1)),
}


@pytest.mark.skipif(not HAS_GPU_INTERPRETER, reason="JAX interprets Mosaic GPU kernels from 0.11 on")
@every
@pytest.mark.parametrize("name", SCHEDULES)
def test_mosaic_gpu_draws_the_same_bits(name, impl):
    function, columns, schedule = SCHEDULES[name]
    problem, args, wanted = drawn(function, columns, impl)
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


def test_a_draw_is_one_equation_whose_cost_the_model_counts():
    x = jax.ShapeDtypeStruct((65536, 8192), jnp.bfloat16)
    seconds = []
    for impl in IMPLS.values():
        keys = jax.eval_shape(functools.partial(keys_of, impl, rows=65536))
        problem = scheduler.rows(dropout).problem(x, keys)
        assert len(problem.text) < 800
        seconds.append(float(prune(KERNEL, problem, hopper.H200, CostModel(hopper.H200)).predicted_s[0]))
    memory_s = 2 * x.size * 2 / hopper.H200.hbm_bytes_per_s
    assert seconds[0] > 1.3 * seconds[1] > 1.3 * memory_s


@machine_code.needed()
@pytest.mark.slow
@every
def test_a_rotation_is_one_instruction_and_nothing_spills(impl, tmp_path):
    problem = scheduler.rows(dropout).problem(jnp.zeros((4096, 4096), jnp.bfloat16), keys_of(impl, rows=4096))
    said, file, _ = machine_code.compiled(__file__, tmp_path, problem.text)
    assert "0 bytes spill stores" in said
    (elements,) = {int(n) for n in re.findall(r"ld\.global\.v(\d)\.b16", file.read_text())}
    # The last of 13 rotations is of the word that is not drawn.
    assert file.read_text().count("shf.l.wrap.b32") == elements * (12 if impl is scheduler.threefry13 else 20)


def main(text: str) -> None:
    problem = ROWS.problem(4096, text)
    schedule = prune(KERNEL, problem, hopper.H200, CostModel(hopper.H200)).candidates()[0].schedule
    one = KERNEL.space(problem, hopper.H200.target).decode(dict(schedule))
    machine_code.compile_for_h200(lambda *args: KERNEL.run(problem, one, hopper.H200.target, *args), problem.operands())


if __name__ == "__main__":
    main(*sys.argv[1:])
