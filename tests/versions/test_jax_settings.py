"""Public calls, searches and comparisons under JAX's settings: debugging modes, promotion, guards, numbers."""

import contextlib
import functools
import os
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify, jet

import scheduler
from scheduler import (
    optimize,
    tuned_flash_attention,
    tuned_gated_matmul,
    tuned_matmul,
    tuned_rms_norm,
    tuned_scaled_matmul,
    tuned_silu_and_mul,
    tuned_softmax,
)
from scheduler.core.hardware import find
from search_spaces import load
from search_spaces.fingerprint import digest
from search_spaces.matmul import MatmulProblem

pytestmark = pytest.mark.slow


def array(*shape, dtype="float32"):
    values = np.random.default_rng(sum(shape)).standard_normal(shape)
    return jnp.asarray(values.astype(np.float32)).astype(dtype)


X, WEIGHT = array(2, 4, 8), array(8)
A, B = array(4, 8), array(8, 6)
Q, K = array(1, 4, 2, 8), array(1, 4, 1, 8)
LENGTHS = jnp.array([3], jnp.int32)


def scaled(a, b, a_scale, b_scale):
    return tuned_scaled_matmul(a.astype(jnp.float8_e4m3fn), b.astype(jnp.float8_e4m3fn), a_scale, b_scale)


CALLS = {
    "matmul": (tuned_matmul, (X, B)),
    "matmul_epilogue": (
        lambda a, b, bias, residual: tuned_matmul(a, b, bias=bias, activation="gelu", residual=residual),
        (A.astype("bfloat16"), B.astype("bfloat16"), array(6), array(4, 6)),
    ),
    "matmul_split": (functools.partial(tuned_matmul, split_sizes=(2, 4)), (A, B)),
    "gated": (tuned_gated_matmul, (A.astype("bfloat16"), B.astype("bfloat16"))),
    "gated_formula": (lambda x, w, bias: tuned_gated_matmul(x, w, bias=bias), (A, B, array(6))),
    "scaled": (scaled, (A, B, array(4), array(6))),
    "softmax": (tuned_softmax, (X,)),
    "softmax_first_axis": (lambda x: tuned_softmax(x, 0), (X,)),
    "softmax_lse": (functools.partial(tuned_softmax, return_lse=True), (X,)),
    "rms_norm": (tuned_rms_norm, (X, WEIGHT)),
    "rms_norm_mixed": (tuned_rms_norm, (X.astype("bfloat16"), WEIGHT)),
    "add_rms_norm": (lambda x, weight, residual: tuned_rms_norm(x, weight, residual=residual), (X, WEIGHT, X + 1)),
    "silu_and_mul": (tuned_silu_and_mul, (X,)),
    "attention": (functools.partial(tuned_flash_attention, causal=True), (Q, K, K)),
    "attention_options": (
        lambda q, k, v: tuned_flash_attention(
            q, k, v, scale=0.3, window=(3, None), softcap=5.0, kv_lengths=LENGTHS, return_lse=True
        ),
        (Q, K, K),
    ),
}


@contextlib.contextmanager
def together(*contexts):
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


# Of the thread, as a `with` statement sets them.
SETTINGS = {
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "dtype promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "NaN": lambda: jax.debug_nans(True),
    "infinities": lambda: jax.debug_infs(True),
    "checks": lambda: together(jax.checking_leaks(), jax.enable_checks(True), jax.debug_key_reuse(True)),
    "no jit": jax.disable_jit,
    "transfers": lambda: jax.transfer_guard("disallow"),
    "64 bits": lambda: jax.enable_x64(True),
    "precision": lambda: jax.default_matmul_precision("highest"),
    "random numbers": lambda: jax.default_prng_impl("rbg"),
}


def loss(call):
    def of(*args):
        return sum(jnp.sum(x, dtype=jnp.float32) for x in jax.tree.leaves(call(*args)))

    return of


def gradients(call, args):
    return jax.grad(loss(call), tuple(range(len(args))))


@pytest.fixture(autouse=True)
def _anew():
    scheduler.reload()


@functools.cache
def expected(name):
    call, args = CALLS[name]
    return call(*args), jax.jit(gradients(call, args))(*args)


DIFFERENTIATED = ("rank promotion", "dtype promotion", "NaN", "transfers")


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_call_computes_the_same_under_the_settings_of_jax(setting):
    for name, (call, args) in CALLS.items():
        wanted = expected(name)
        with SETTINGS[setting]():
            found = [call(*args)]
            if setting in DIFFERENTIATED:
                found.append(jax.jit(gradients(call, args))(*args))
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted[: len(found)]), strict=True):
            assert x.dtype == y.dtype, name
            np.testing.assert_allclose(x.astype("float32"), y.astype("float32"), rtol=2e-2, atol=2e-2, err_msg=name)


@pytest.mark.parametrize("setting", ["rank promotion", "dtype promotion"])
def test_batches_are_computed_under_the_settings_of_jax(setting):
    for call, args in CALLS.values():
        stacked = [jax.jit(lambda x: jnp.stack([x, x]))(x) for x in args]
        with SETTINGS[setting]():
            jax.jit(jax.vmap(call))(*stacked)


def test_what_strict_promotion_forbids_of_a_users_operands_is_refused_as_jax_refuses_it():
    narrow = A.astype("bfloat16")
    with jax.numpy_dtype_promotion("strict"):
        for call in (jnp.matmul, tuned_matmul, tuned_gated_matmul):
            with pytest.raises(ValueError, match="no available implicit dtype promotion path"):
                call(narrow, B)
        assert tuned_matmul(narrow, B, preferred_element_type="float32").dtype == jnp.float32


# Where NaN is made: infinities of both signs in a row.
def with_infinities(x):
    return x.at[(0,) * x.ndim].set(jnp.inf).at[(*(0,) * (x.ndim - 1), 1)].set(-jnp.inf)


NAN_MAKERS = ["matmul", "gated", "softmax", "softmax_lse", "rms_norm", "add_rms_norm", "silu_and_mul", "attention"]


@pytest.mark.parametrize("name", NAN_MAKERS)
def test_nan_of_a_tuned_call_is_a_floating_point_error_that_names_it(name):
    call, (first, *others) = CALLS[name]
    args = with_infinities(first), *others
    derivative = jax.value_and_grad(loss(call))
    runs = [call, jax.jit(call), derivative, jax.jit(derivative)]
    with jax.debug_nans(True):
        for run in runs:
            with pytest.raises(FloatingPointError, match=r"invalid value \(nan\) encountered in tuned_"):
                run(*args)


def test_an_infinity_of_a_tuned_call_is_a_floating_point_error():
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match=r"\(inf\) encountered in tuned_matmul"):
        tuned_matmul(jnp.full((2, 2), 3e38, jnp.float32), jnp.ones((2, 2), jnp.float32))


@pytest.mark.parametrize("name", NAN_MAKERS)
def test_checkify_sees_nan_of_a_tuned_call(name):
    call, (first, *others) = CALLS[name]
    bad = with_infinities(first), *others
    checked = checkify.checkify(call, errors=checkify.float_checks)
    for run in (checked, jax.jit(checked)):
        assert "nan generated by primitive: tuned_" in run(*bad)[0].get()
        assert run(first, *others)[0].get() is None
    derivative = checkify.checkify(gradients(call, bad), errors=checkify.float_checks)
    assert "nan generated by primitive: tuned_" in derivative(*bad)[0].get()


def test_checkify_sees_nan_within_batches_and_scans():
    bad = jnp.stack([X, with_infinities(X)])

    def scanned(xs):
        return jax.lax.scan(lambda carry, x: (carry, tuned_softmax(x)), 0, xs)[1]

    for run in (jax.vmap(tuned_softmax), scanned):
        error, _ = checkify.checkify(run, errors=checkify.nan_checks)(bad)
        assert "nan generated by primitive: tuned_softmax" in error.get()


@pytest.mark.parametrize("name", ["matmul", "softmax", "attention"])
def test_jet_expands_a_tuned_call_by_its_formula(name):
    call, (x, *others) = CALLS[name]

    def along(t):
        return call(x + t, *others)

    first, second = (jnp.ones_like(x), jnp.zeros_like(x))
    value, (slope, curvature) = jet.jet(lambda x: call(x, *others), (x,), ((first, second),))
    steps = [along(step) for step in (-1e-2, 1e-2)]
    np.testing.assert_allclose(value, call(x, *others), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(slope, (steps[1] - steps[0]) / 2e-2, rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(curvature, (steps[1] + steps[0] - 2 * value) / 1e-4, rtol=0.2, atol=0.2)


# Searches and comparisons

SEARCHED = ["rank promotion", "dtype promotion", "NaN", "infinities", "no jit", "transfers", "checks"]


def search():
    record = scheduler.tune(tuned_matmul, MatmulProblem(4, 6, 8, dtype="float32"), budget=2, force=True)
    assert {entry.backend for entry in record.entries} == {"interpret", "xla"}


@pytest.mark.parametrize("setting", SEARCHED)
def test_a_search_and_an_optimized_function_meet_no_setting_of_the_caller(setting):
    with warnings.catch_warnings(), SETTINGS[setting]():
        warnings.simplefilter("error")
        search()
        best = optimize(lambda a, b: jnp.matmul(a, b), backends=["interpret"], keep="tuned")
        best(A, B)
        if setting != "no jit":  # there the function itself runs, operation by operation
            (decided,) = best.decisions
            assert decided.compiled is not None or "no kernel can be used" in decided.reason


def test_nan_of_an_optimized_function_is_a_floating_point_error():
    best = optimize(lambda a, b: jnp.matmul(a, b), backends=["interpret"], keep="tuned")
    bad = with_infinities(A)
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        best(bad, B)


PROGRAM = """
import scheduler
from scheduler import tuned_matmul
from scheduler.measure.runner import RunnerOptions
from scheduler.core.hardware import find
from search_spaces import load
from search_spaces.fingerprint import digest
from search_spaces.matmul import MatmulProblem
problem = MatmulProblem(4, 6, 8, dtype="float32")
for options in (None, RunnerOptions(workers=1)):
    record = scheduler.tune(tuned_matmul, problem, budget=2, force=True, options=options)
    print(sorted(entry.backend for entry in record.entries))
"""


@pytest.mark.parametrize(
    "variables",
    [
        {
            "JAX_DEBUG_NANS": "1",
            "JAX_DEBUG_INFS": "1",
            "JAX_TRANSFER_GUARD": "disallow",
            "JAX_NUMPY_RANK_PROMOTION": "raise",
            "JAX_NUMPY_DTYPE_PROMOTION": "strict",
        },
        {"JAX_DISABLE_JIT": "1"},
    ],
    ids=["debugging", "no jit"],
)
def test_a_search_meets_no_variable_of_jax_here_or_in_workers(variables):
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | variables | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.splitlines() == 2 * ["['interpret', 'xla']"]


@pytest.mark.parametrize("precision", ["highest", "BF16_BF16_F32", "F32_F32_F32"])
def test_kernels_are_the_same_programs_under_any_default_precision(precision):
    def program(kernel, problem, target):
        space = kernel.space(problem, target)
        schedule = space.schedule(**space.legal()[0].row(0))
        run = functools.partial(kernel.results, problem, schedule, target)
        return digest(jax.make_jaxpr(run)(*problem.operands()))

    extents = {"m": 256, "n": 256, "k": 256, "rows": 256, "groups": 2}
    for name, chip in (("matmul", "v6e"), ("matmul", "H200"), ("ragged_dot", "v6e")):
        operation, target = load(name), find(chip).target
        for dtype in ("bfloat16", "float32"):
            named = [field for field in extents if field in operation.problem.__dataclass_fields__]
            problem = operation.problem(**{name: extents[name] for name in named}, dtype=dtype)
            for kernel in operation.kernels:
                if kernel.library or kernel.supports(problem, target):
                    continue
                wanted = program(kernel, problem, target)
                with jax.default_matmul_precision(precision):
                    assert program(kernel, problem, target) == wanted, (name, chip, dtype, kernel.backend)
