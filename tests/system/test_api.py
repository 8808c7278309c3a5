"""The public calls: one meaning however they are transformed, what answers a miss, and what survives a bad cache."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import re
import runpy
import socket
import sqlite3
import subprocess
import sys
import textwrap
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from modes import frozen

import scheduler
from scheduler import tuned, tuned_matmul
from scheduler.core import hardware
from scheduler.core.records import key_of
from scheduler.dispatch import dispatch
from scheduler.search import tuner
from scheduler.store.store import Store, default_url
from search_spaces import LibraryKernel, Operation, Problem, load
from search_spaces.matmul import MATMUL, MatmulProblem
from search_spaces.matmul.interpret import InterpretSchedule

pallas = functools.partial(tuned_matmul, backends="interpret")
P64 = MatmulProblem(64, 48, 32, dtype="float32")


@pytest.fixture(autouse=True)
def _no_answers(_own_cache):
    scheduler.reload()


def normal(seed: int, *shape: int, dtype="float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)).astype(dtype)


def close(actual, expected, tolerance=1e-4):
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_allclose(
        np.asarray(actual, np.float64), np.asarray(expected, np.float64), rtol=tolerance, atol=tolerance
    )


def interpret_calls(function, *args) -> int:
    """How many interpreted kernels (loops over a grid) the lowered program has."""
    return jax.jit(function).lower(*args).as_text().count("stablehlo.while")


@contextlib.contextmanager
def caught_compilations():
    """The names of what JAX compiles meanwhile."""
    names = []
    handler = logging.Handler()
    handler.emit = lambda record: (
        "Finished XLA compilation" in record.getMessage() and names.append(record.getMessage())
    )
    logger = logging.getLogger("jax")
    logger.addHandler(handler)
    try:
        with jax.log_compiles():
            yield names
    finally:
        logger.removeHandler(handler)


def squares(product):
    return lambda a, b: (product(a, b) ** 2).sum()


# One meaning everywhere


A, B = normal(0, 40, 24), normal(1, 24, 56)


def test_eager_and_jitted_calls_give_the_product():
    close(pallas(A, B), A @ B)
    close(jax.jit(pallas)(A, B), A @ B)
    assert interpret_calls(pallas, A, B) == 1


def test_vmap_over_one_operand_is_one_larger_product():
    a = normal(2, 3, 40, 24)
    close(jax.vmap(pallas, (0, None))(a, B), a @ B)
    traced = jax.make_jaxpr(jax.vmap(pallas, (0, None)))(a, B)
    problems = [e.params["problem"] for e in traced.eqns if e.primitive.name == "tuned_call"]
    assert problems == [MatmulProblem(120, 56, 24, dtype="float32")]


@pytest.mark.parametrize("axes", [(0, 0), (1, 0), (None, 2), (0, None)])
def test_vmap_agrees_with_jnp_matmul(axes):
    a, b = (x if axis is None else jnp.stack([x, 2 * x, -x], axis) for x, axis in zip((A, B), axes, strict=True))
    close(jax.vmap(pallas, axes)(a, b), jax.vmap(jnp.matmul, axes)(a, b))
    close(
        jax.jit(jax.vmap(jax.vmap(pallas, axes), (None, None), axis_size=2))(a, b)[1], jax.vmap(jnp.matmul, axes)(a, b)
    )


def test_vmap_over_an_axis_without_elements_is_empty():
    assert jax.vmap(pallas, (0, None))(jnp.zeros((0, 4, 3)), jnp.ones((3, 5))).shape == (0, 4, 5)


@pytest.mark.parametrize("jitted", [True, False])
def test_gradients_are_tuned_products_with_the_numbers_of_jnp_matmul(jitted):
    gradient = jax.grad(squares(pallas), (0, 1))
    for ours, theirs in zip(
        (jax.jit(gradient) if jitted else gradient)(A, B), jax.grad(squares(jnp.matmul), (0, 1))(A, B), strict=True
    ):
        close(ours, theirs, 1e-3)
    assert interpret_calls(gradient, A, B) == 3


@pytest.mark.slow
def test_forward_mode_and_second_derivatives_agree_with_jnp_matmul():
    da, db = normal(3, 40, 24), normal(4, 24, 56)
    for ours, theirs in zip(jax.jvp(pallas, (A, B), (da, db)), jax.jvp(jnp.matmul, (A, B), (da, db)), strict=True):
        close(ours, theirs)

    def second(product):
        return jax.jvp(jax.grad(squares(product), (0, 1)), (A, B), (da, db))[1]

    for ours, theirs in zip(second(pallas), second(jnp.matmul), strict=True):
        close(ours, theirs, 1e-2)
    small = normal(5, 2, 3), normal(6, 3, 2)
    close(jax.hessian(squares(pallas))(*small), jax.hessian(squares(jnp.matmul))(*small))


def test_scan_checkpoint_and_donation_keep_the_numbers():
    w = jnp.stack([normal(i, 24, 24) / 5 for i in range(3)])

    def loss(product):
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(product(x, w)), None))
        return lambda w: jax.lax.scan(layer, A, w)[0].sum()

    close(jax.jit(jax.grad(loss(pallas)))(w), jax.grad(loss(jnp.matmul))(w))
    square = normal(1, 24, 24)
    expected = A @ square
    close(jax.jit(pallas, donate_argnums=0)(jnp.array(A), square), expected)


def test_a_constant_operand_needs_no_derivative():
    close(jax.grad(lambda a: pallas(a, B).sum())(A), jax.grad(lambda a: (a @ B).sum())(A))
    assert interpret_calls(jax.grad(lambda a: (pallas(a, B) * pallas(jax.lax.stop_gradient(a), B)).sum()), A) <= 3
    tangents = (np.zeros((40, 24), jax.dtypes.float0), normal(4, 24, 56))
    whole = jnp.ones((40, 24), jnp.int32)
    _, tangent = jax.jvp(lambda i, b: pallas(i.astype(jnp.float32), b), (whole, B), tangents)
    close(tangent, jnp.ones((40, 24)) @ tangents[1])


def test_linear_transpose_of_a_product_is_the_backward_product():
    (da,) = jax.linear_transpose(lambda a: pallas(a, B), A)(A @ B)
    close(da, (A @ B) @ B.T, 1e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_operands_accumulate_in_float32(dtype):
    a, b = normal(0, 24, 300, dtype=dtype), normal(1, 300, 16, dtype=dtype)
    exact = a.astype(jnp.float32) @ b.astype(jnp.float32)
    close(pallas(a, b, preferred_element_type=jnp.float32), exact, 1e-4)
    assert pallas(a, b).dtype == dtype
    gradient = jax.grad(lambda a: pallas(a, b, preferred_element_type="float32").sum())(a)
    close(gradient, jax.grad(lambda a: jnp.matmul(a, b, preferred_element_type="float32").sum())(a), 0.02)


# The meaning of jnp.matmul


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((3,), (3,)),
        ((3,), (3, 4)),
        ((2, 3), (3,)),
        ((5, 2, 3), (3,)),
        ((3,), (5, 3, 4)),
        ((5, 2, 3), (3, 4)),
        ((2, 3), (5, 3, 4)),
        ((5, 1, 2, 3), (7, 3, 4)),
        ((1, 2, 3), (1, 1, 3, 4)),
        ((6, 5, 2, 3), (1, 3, 4)),
    ],
)
def test_vectors_and_leading_axes_mean_what_they_mean_to_jnp_matmul(a, b):
    a, b = normal(0, *a), normal(1, *b)
    close(pallas(a, b), jnp.matmul(a, b))
    assert interpret_calls(pallas, a, b) == 1


@pytest.mark.parametrize("transpose_a", [True, False])
@pytest.mark.parametrize("transpose_b", [True, False])
@pytest.mark.parametrize("lead", [((), ()), ((3,), ()), ((), (3,)), ((2, 1), (3,))])
def test_a_transpose_swaps_the_last_two_axes_first(transpose_a, transpose_b, lead):
    a, b = normal(0, *lead[0], 8, 12), normal(1, *lead[1], 12, 20)
    expected = jnp.matmul(a, b)
    a, b = (jnp.swapaxes(x, -1, -2) if t else x for x, t in ((a, transpose_a), (b, transpose_b)))
    close(pallas(a, b, transpose_a=transpose_a, transpose_b=transpose_b), expected)


shapes = st.lists(st.integers(0, 3), min_size=0, max_size=4).map(tuple)
dtypes = st.sampled_from(["float32", "float32", "bfloat16", "int32", "bool", "complex64"])


@pytest.mark.slow
@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(shapes, shapes, dtypes, dtypes)
def test_any_operands_give_what_jnp_matmul_gives_or_raise_what_it_raises(a_shape, b_shape, a_dtype, b_dtype):
    a, b = jnp.ones(a_shape, a_dtype), jnp.full(b_shape, 2).astype(b_dtype)
    try:
        expected = jnp.matmul(a, b)
    except (TypeError, ValueError) as error:
        with pytest.raises(type(error)):
            tuned_matmul(a, b)
    else:
        result = tuned_matmul(a, b)
        assert (result.shape, result.dtype, result.weak_type) == (expected.shape, expected.dtype, expected.weak_type)
        np.testing.assert_array_equal(result, expected)


def test_wrong_operands_raise_one_sentence():
    with pytest.raises((TypeError, ValueError), match=r"3.*4"):
        tuned_matmul(jnp.ones((2, 3)), jnp.ones((4, 5)))
    with pytest.raises(ValueError, match="transpose_a needs an operand of at least 2 axes"):
        tuned_matmul(jnp.ones(3), jnp.ones((3, 5)), transpose_a=True)
    with pytest.raises(TypeError):
        tuned_matmul([[1.0]], jnp.ones((1, 5)))


def test_numpy_operands_and_weak_types_follow_jnp_matmul():
    a, b = np.ones((2, 3)), np.ones((3, 4), np.float32)
    close(tuned_matmul(a, b), jnp.matmul(a, b))
    close(jax.jit(lambda b: pallas(a, b))(b), jnp.matmul(a, b))
    weak = jnp.full((2, 3), 1.5)
    half = jnp.ones((3, 4), jnp.bfloat16)
    assert tuned_matmul(weak, half).dtype == jnp.matmul(weak, half).dtype
    with jax.enable_x64(True):
        wide = tuned_matmul(jnp.ones((2, 3)), jnp.ones((3, 4)))
        assert wide.dtype == jnp.float64


@pytest.mark.parametrize(
    ("precision", "posed"),
    [
        (None, "default"),
        ("highest", "highest"),
        ("float32", "highest"),
        ("tensorfloat32", "high"),
        (jax.lax.Precision.HIGH, "high"),
        (("high", "high"), "high"),
        (("high", "default"), None),
        ("BF16_BF16_F32", None),
    ],
)
def test_precision_is_part_of_the_problem_where_it_can_be(precision, posed):
    traced = jax.make_jaxpr(functools.partial(tuned_matmul, precision=precision))(A, B)
    problems = [e.params["problem"] for e in traced.eqns if e.primitive.name == "tuned_call"]
    assert [p.precision for p in problems] == ([] if posed is None else [posed])


def test_no_precision_follows_the_configuration_and_an_eager_answer_does_not_outlive_it():
    seen = []
    for context in ("highest", "bfloat16", None):
        with jax.default_matmul_precision(context):
            tuned_matmul(A, B, on_miss="xla")
            traced = jax.make_jaxpr(tuned_matmul)(A, B)
            seen.append(next(e.params["problem"].precision for e in traced.eqns if e.primitive.name == "tuned_call"))
    assert seen == ["highest", "default", "default"]
    answered = {problem.precision for _, problem, _, _ in dispatch._decisions.decisions}
    assert answered == {"highest", "default"}


# What follows the product


BIAS, RESIDUAL = normal(2, 56), normal(3, 40, 56)
ACTIVATIONS = {None: lambda x: x, "relu": jax.nn.relu, "gelu": jax.nn.gelu, "silu": jax.nn.silu}


def layer(matmul=pallas, activation="gelu"):
    return lambda a, b, bias, residual: matmul(a, b, bias=bias, activation=activation, residual=residual)


def formula(a, b, bias=None, activation=None, residual=None):
    """What `tuned_matmul` promises of float32 operands, by JAX alone."""
    c = ACTIVATIONS[activation](jnp.matmul(a, b) + (0 if bias is None else bias))
    return c if residual is None else c + residual


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_fused_call_is_one_kernel_with_the_numbers_of_the_formula(activation):
    args = A, B, BIAS, RESIDUAL
    ours, theirs = layer(activation=activation), layer(formula, activation)
    close(ours(*args), theirs(*args))
    close(jax.jit(ours)(*args), theirs(*args))
    assert interpret_calls(ours, *args) == 1


@pytest.mark.parametrize("axes", [(0, None, None, 1), (None, 2, None, None), (0, 1, 0, 0), (None, None, 0, None)])
def test_vmap_of_a_fused_call_agrees_with_that_of_the_formula(axes):
    args = [
        x if axis is None else jnp.stack([x, 2 * x, -x], axis)
        for x, axis in zip((A, B, BIAS, RESIDUAL), axes, strict=True)
    ]
    close(jax.jit(jax.vmap(layer(), axes))(*args), jax.vmap(layer(formula), axes)(*args))


def test_every_operand_of_a_fused_call_has_its_gradient_by_tuned_products():
    args = A, B, BIAS, RESIDUAL
    gradient, expected = (jax.grad(lambda *x, f=f: (f(*x) ** 2).sum(), (0, 1, 2, 3)) for f in (layer(), layer(formula)))
    for ours, theirs in zip(jax.jit(gradient)(*args), expected(*args), strict=True):
        close(ours, theirs, 1e-3)
    assert interpret_calls(gradient, *args) == 3
    of_bias = jax.grad(lambda bias: pallas(A, B, bias=bias).sum())
    close(of_bias(BIAS), jnp.full(56, 40.0))
    assert interpret_calls(of_bias, BIAS) == 0


def test_forward_mode_and_second_derivatives_of_a_fused_call_are_those_of_the_formula():
    args, tangents = (A, B, BIAS, RESIDUAL), (A / 2, -B, BIAS, 2 * RESIDUAL)
    for ours, theirs in zip(jax.jvp(layer(), args, tangents), jax.jvp(layer(formula), args, tangents), strict=True):
        close(ours, theirs, 1e-3)
    small = normal(0, 2, 3), normal(1, 3, 2), normal(2, 2), normal(3, 2, 2)
    hessians = (jax.jit(jax.hessian(lambda *x, f=f: (f(*x) ** 2).sum(), (0, 2))) for f in (layer(), layer(formula)))
    for ours, theirs in zip(*(jax.tree.leaves(hessian(*small)) for hessian in hessians), strict=True):
        close(ours, theirs, 1e-3)


def test_a_backward_pass_keeps_the_slope_in_the_dtype_of_the_result_and_no_sums():
    args = [x.astype("bfloat16") for x in (A, B, BIAS, RESIDUAL)]
    _, backward = jax.vjp(jax.jit(layer()), *args)
    kept = [str(x.dtype) for x in jax.tree.leaves(backward) if getattr(x, "shape", ()) == (40, 56)]
    assert kept == ["bfloat16"]


def test_a_fused_call_without_activation_is_transposed():
    ct = normal(5, 40, 56)
    ours, theirs = (
        jax.linear_transpose(lambda a, bias, f=f: f(a, B, bias=bias), A, BIAS)(ct) for f in (pallas, formula)
    )
    for one, other in zip(ours, theirs, strict=True):
        close(one, other, 1e-3)


def test_scan_and_checkpoint_of_fused_calls_keep_the_numbers():
    w = jnp.stack([normal(i, 24, 24) / 5 for i in range(3)])
    bias = normal(7, 3, 24)

    def loss(f):
        block = jax.checkpoint(lambda x, w: (f(x, w[0], bias=w[1], activation="silu", residual=x), None))
        return lambda w, bias: jax.lax.scan(block, A, (w, bias))[0].sum()

    ours, theirs = (jax.jit(jax.grad(loss(f), (0, 1)))(w, bias) for f in (pallas, formula))
    for one, other in zip(ours, theirs, strict=True):
        close(one, other, 1e-2)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((3,), (3,)),
        ((3,), (3, 4)),
        ((5, 2, 3), (3,)),
        ((2, 3), (5, 3, 4)),
        ((5, 1, 2, 3), (7, 3, 4)),
    ],
)
def test_a_bias_goes_along_n_and_a_residual_with_the_whole_result(a, b):
    a, b = normal(0, *a), normal(1, *b)
    shape = jnp.matmul(a, b).shape
    bias, residual = normal(2, *(shape[-1:] if b.ndim > 1 else ())), normal(3, *shape)
    close(layer()(a, b, bias, residual), layer(formula)(a, b, bias, residual))
    assert interpret_calls(layer(), a, b, bias, residual) == 1


KINDS = {"bool": 0, "int32": 1, "bfloat16": 2, "float32": 2, "complex64": 3}  # each holds those below


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(shapes, shapes, dtypes, dtypes, st.sampled_from([*KINDS]), st.booleans(), st.booleans())
def test_any_operands_take_an_epilogue_or_say_why_not(a_shape, b_shape, a_dtype, b_dtype, dtype, relu, only_bias):
    a, b = jnp.ones(a_shape, a_dtype), jnp.full(b_shape, 2).astype(b_dtype)
    call = functools.partial(tuned_matmul, a, b, activation="relu" if relu else None)
    try:
        product = jnp.matmul(a, b)
    except (TypeError, ValueError) as error:
        with pytest.raises(type(error)):
            call(bias=jnp.ones(3))
        return
    bias = jnp.ones(product.shape[-1:] if b.ndim > 1 else (), dtype)
    residual = None if only_bias else jnp.ones(product.shape, dtype)
    kind = KINDS[str(product.dtype)]
    if KINDS[dtype] > kind or (relu and kind != 2):
        with pytest.raises(TypeError, match="set preferred_element_type"):
            call(bias=bias, residual=residual)
    else:
        result = call(bias=bias, residual=residual)
        assert (result.shape, result.dtype) == (product.shape, product.dtype)
        added = product + bias + (0 if only_bias else residual)  # nothing is negative, so relu changes nothing
        np.testing.assert_array_equal(result, added.astype(product.dtype))


@pytest.mark.parametrize("how", [{"precision": "BF16_BF16_F32"}, {}])
def test_xla_rounds_once_where_no_problem_says_what_was_asked(how):
    a, b = jnp.ones((1, 257), "bfloat16"), jnp.ones((257, 4), "bfloat16")
    b = b if how else b.astype("float16")
    with jax.disable_jit():  # XLA leaves out a rounding that it finds between two operations of one program
        c = tuned_matmul(a, b, bias=jnp.full(4, -256.0), preferred_element_type="bfloat16", **how)
    close(c, jnp.ones((1, 4), "bfloat16"))


@pytest.mark.parametrize("option", ["jax_numpy_rank_promotion", "jax_numpy_dtype_promotion"])
def test_what_a_user_forbids_of_ranks_and_types_does_not_reach_into_a_fused_call(option):
    before = getattr(jax.config, option)
    args = [
        x.astype(dtype) for x, dtype in zip((A, B, BIAS, RESIDUAL), ["bfloat16"] * 2 + ["float32"] * 2, strict=True)
    ]
    expected = layer(formula)(*args)
    jax.config.update(option, {"jax_numpy_rank_promotion": "raise", "jax_numpy_dtype_promotion": "strict"}[option])
    try:
        for how in ({"backends": "interpret"}, {"precision": "BF16_BF16_F32"}):
            wide = layer(functools.partial(tuned_matmul, preferred_element_type="float32", **how))
            close(wide(*args), expected, 2e-2)
            assert layer(functools.partial(tuned_matmul, **how))(*args).dtype == "bfloat16"
        wide = layer(functools.partial(pallas, preferred_element_type="float32"))
        assert jax.grad(lambda *x: wide(*x).sum())(*args).dtype == "bfloat16"
    finally:
        jax.config.update(option, before)


def test_a_wrong_epilogue_is_answered_in_a_sentence():
    with pytest.raises(ValueError, match="activation='tanh' is not None or one of relu, gelu, silu"):
        tuned_matmul(A, B, activation="tanh")
    with pytest.raises(ValueError, match=r"bias has shape \(40,\) where a result of shape \(40, 56\) wants \(56,\)"):
        tuned_matmul(A, B, bias=A[:, 0])
    with pytest.raises(
        ValueError, match=r"residual has shape \(56,\) where a result of shape \(40, 56\) wants \(40, 56\)"
    ):
        jax.jit(lambda r: tuned_matmul(A, B, residual=r))(BIAS)
    with pytest.raises(TypeError, match="bias must be an array, not list"):
        tuned_matmul(A, B, bias=[0.0] * 56)
    whole = jnp.ones((2, 2), jnp.int32)
    with pytest.raises(TypeError, match="activation='gelu' wants a floating result, not int32"):
        tuned_matmul(whole, whole, activation="gelu")
    with pytest.raises(TypeError, match="residual is float32, which a result of int32 cannot hold"):
        tuned_matmul(whole, whole, residual=jnp.ones((2, 2)))
    narrow = jnp.ones((2, 2), jnp.float8_e4m3fn)
    with pytest.raises(TypeError, match="float8_e4m3fn is too narrow for an epilogue: set preferred_element_type"):
        tuned_matmul(narrow, narrow, bias=jnp.ones(2))
    fused = tuned_matmul(narrow, narrow, bias=jnp.ones(2), preferred_element_type=jnp.float32)
    assert (fused == 3).all()
    with pytest.raises(TypeError):
        tuned_matmul(None, B, bias=BIAS)


def test_an_epilogue_of_numpy_arrays_and_weak_types_is_fused_too():
    weak = jnp.full(56, 1.5)
    traced = jax.make_jaxpr(lambda a: tuned_matmul(a, B, bias=weak, residual=np.asarray(RESIDUAL)))(A)
    (problem,) = [e.params["problem"] for e in traced.eqns if e.primitive.name == "tuned_call"]
    assert (problem.bias, problem.residual) == ("float32", "float32")
    close(pallas(A, B, bias=weak, residual=np.asarray(RESIDUAL)), A @ B + 1.5 + RESIDUAL)


def test_a_fused_call_is_tuned_stored_and_found_as_a_problem_of_its_own():
    a, b, bias = normal(0, 8, 8), normal(1, 8, 8), normal(2, 8)
    fused = functools.partial(tuned_matmul, bias=bias, activation="silu", residual=a, backends="interpret")
    close(fused(a, b, on_miss="tune"), formula(a, b, bias, "silu", a))
    (record,) = Store(default_url()).records()
    problem = MatmulProblem(8, 8, 8, "float32", bias="float32", activation="silu", residual="float32")
    assert record.key.problem == problem.canonical()
    assert {entry.backend for entry in record.entries} == {"interpret", "xla"}
    scheduler.reload()
    close(fused(a, b, on_miss="error"), formula(a, b, bias, "silu", a))
    with pytest.raises(scheduler.CacheMiss, match="bias=float32 activation=relu"):
        tuned_matmul(a, b, bias=bias, activation="relu", on_miss="error")


def test_the_operation_takes_a_bias_and_a_residual_after_its_operands():
    matmul = functools.partial(tuned(MATMUL), backends="interpret")
    close(matmul(A, B, BIAS, RESIDUAL, activation="relu"), formula(A, B, BIAS, "relu", RESIDUAL))
    close(matmul(A, B, RESIDUAL), formula(A, B, residual=RESIDUAL))


def test_a_gpu_answers_a_fused_call_by_xla():
    args = [jax.ShapeDtypeStruct((128, 128), jnp.bfloat16)] * 3
    ours = lambda a, b, residual: tuned_matmul(a, b, activation="gelu", residual=residual)  # noqa: E731
    text = jax.export.export(jax.jit(ours), platforms=["cuda"])(*args).mlir_module()
    assert "dot_general" in text
    assert "mosaic_gpu" not in text


# What answers


def test_on_a_cpu_xla_answers_unless_asked_otherwise():
    assert interpret_calls(tuned_matmul, A, B) == 0
    assert interpret_calls(pallas, A, B) == 1
    assert interpret_calls(functools.partial(tuned_matmul, backends=["interpret", "xla"]), A, B) == 0


def test_an_error_policy_raises_with_the_command_that_fills_the_cache():
    with pytest.raises(scheduler.CacheMiss, match="tile-scheduler tune matmul m=40 n=56 k=24 dtype=float32"):
        tuned_matmul(A, B, on_miss="error")
    with pytest.raises(scheduler.CacheMiss):
        jax.jit(functools.partial(tuned_matmul, on_miss="error"))(A, B)


def half(x):
    return x.astype("bfloat16")


# What no kernel can be selected about -> the arguments of a call, and why.
LEFT_TO_XLA = {
    "mixed dtypes": ((half(A), B), {}, "a is bfloat16 and b is float32; kernels take two of one dtype"),
    "unsupported dtypes": ((A.astype("int32"), B.astype("int32")), {}, "dtype='int32' is not one of"),
    "an unsupported result": (
        (A, B),
        {"preferred_element_type": "float8_e5m2"},
        "out_dtype='float8_e5m2' is not one of",
    ),
    "empty operands": ((A[:0], B), {}, r"a is empty: \(0, 24\)"),
    "an algorithm": (
        (A, B),
        {"precision": "BF16_BF16_F32"},
        "precision='BF16_BF16_F32' is not default, high or highest",
    ),
    "weak types": ((jnp.full((4, 24), 1.0), B), {}, "weakly typed"),
    "a wide bias": ((A, B), {"bias": jnp.ones(56, "int8")}, "bias='int8' is not one of"),
}


@pytest.mark.parametrize("jitted", [True, False])
@pytest.mark.parametrize("case", LEFT_TO_XLA)
def test_who_leaves_xla_out_is_told_why_no_kernel_can_be_asked_and_others_may_read_it(case, jitted, caplog):
    operands, how, why = LEFT_TO_XLA[case]

    def call(**strict):
        matmul = functools.partial(tuned_matmul, **how, **strict)
        return (jax.jit(matmul) if jitted else matmul)(*operands)

    for strict in ({"backends": "pallas"}, {"backends": ["interpret"], "on_miss": "error"}):
        with pytest.raises(scheduler.NoCandidate, match=rf"no kernel of matmul can be selected: .*{why}.*only xla"):
            call(**strict)
    with pytest.raises(scheduler.IllegalSchedule, match=rf"matmul cannot run the schedule tile_m=16: .*{why}"):
        call(schedule={"tile_m": 16})
    with caplog.at_level(logging.DEBUG, "scheduler"):
        expected = formula(*operands, bias=how.get("bias")) if case != "an unsupported result" else call()
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (call(on_miss="error"), expected)), rtol=0.05)
    assert re.search(f"matmul: xla is used, and no kernel is selected: .*{why}", caplog.text)


def test_what_jax_refuses_it_refuses_in_its_own_words_whatever_backends_are_left_out():
    for call in (lambda: pallas(A, A), lambda: pallas([[1.0]], B), lambda: pallas(A, B, bias=RESIDUAL)):
        with pytest.raises((TypeError, ValueError)):
            call()


def test_the_environment_sets_the_default_policy_and_a_wrong_one_is_named(monkeypatch):
    monkeypatch.setenv("TILE_SCHEDULER_ON_MISS", "error")
    with pytest.raises(scheduler.CacheMiss):
        tuned_matmul(A, B)
    monkeypatch.setenv("TILE_SCHEDULER_ON_MISS", "guess")
    scheduler.reload()
    with pytest.raises(ValueError, match="TILE_SCHEDULER_ON_MISS='guess' is not one of model, tune, xla, error"):
        tuned_matmul(A, B)
    monkeypatch.delenv("TILE_SCHEDULER_ON_MISS")
    with pytest.raises(ValueError, match="on_miss='never'"):
        tuned_matmul(A, B, on_miss="never")
    with pytest.raises(ValueError, match="no backend 'cutlass'"):
        tuned_matmul(A, B, backends="cutlass")
    with pytest.raises(ValueError, match="on_miss='xla' needs the backend 'xla', but found backends='pallas'"):
        tuned_matmul(A, B, on_miss="xla", backends="pallas")
    with pytest.raises(TypeError, match="schedule must be a dict of fields or a schedule, found 'tile'"):
        tuned_matmul(A, B, schedule="tile")


@pytest.mark.parametrize("how", ["eager", "jit", "vmap", "grad"])
def test_tuning_works_from_inside_any_transformation_and_is_stored(how):
    call = functools.partial(tuned_matmul, on_miss="tune", backends="interpret")
    a, b = normal(0, 8, 8), normal(1, 8, 8)
    match how:
        case "eager":
            close(call(a, b), a @ b)
        case "jit":
            close(jax.jit(call)(a, b), a @ b)
        case "vmap":
            close(jax.vmap(call, (0, None))(a[None], b), (a @ b)[None])
        case "grad":
            close(jax.jit(jax.grad(squares(call)))(a, b), jax.grad(squares(jnp.matmul))(a, b), 1e-3)
    store = Store(default_url())
    records = list(store.records(operation="matmul"))
    assert len(records) == (2 if how == "grad" else 1)
    assert {entry.backend for entry in records[0].entries} == {"interpret", "xla"}
    scheduler.reload()
    close(jax.jit(functools.partial(call, on_miss="error"))(a, b), a @ b)


def test_eight_threads_that_ask_at_once_tune_once(caplog):
    a, b = normal(0, 8, 8), normal(1, 8, 8)
    start = threading.Barrier(8)

    def ask(_):
        start.wait()
        return tuned_matmul(a, b, on_miss="tune", backends="interpret")

    with caplog.at_level(logging.INFO, "scheduler"), ThreadPoolExecutor(8) as pool:
        for result in pool.map(ask, range(8)):
            close(result, a @ b)
    (record,) = Store(default_url()).records()
    assert len(Store(default_url()).trials(record.key)) == record.tried


def test_a_miss_is_logged_once(caplog):
    a, b = normal(0, 9, 8), normal(1, 8, 8)
    with caplog.at_level(logging.INFO, "scheduler"):
        for _ in range(3):
            tuned_matmul(a, b)
            scheduler.reload()
    assert len([r for r in caplog.records if "matmul m=9" in r.getMessage()]) == 1


def record_of(problem=P64, **changes):
    return tuner.tune(MATMUL, problem, backends=frozenset({"interpret"}), budget=2, store=Store(default_url()))


def test_a_stored_answer_is_served_and_one_that_no_longer_holds_is_a_miss_with_its_reason(caplog, monkeypatch):
    a, b = normal(0, 64, 32), normal(1, 32, 48)
    record_of()
    ours = functools.partial(tuned_matmul, on_miss="error", backends="interpret")
    close(ours(a, b), a @ b)
    monkeypatch.setattr(type(MATMUL.kernel("interpret")), "version", 99)
    scheduler.reload()
    with caplog.at_level(logging.INFO, "scheduler"), pytest.raises(scheduler.CacheMiss):
        ours(a, b)
    assert "version 99" in caplog.text


def test_a_given_schedule_overrides_and_an_illegal_one_is_refused_with_the_reason():
    a, b = normal(0, 64, 32), normal(1, 32, 48)
    schedule = InterpretSchedule(tile_m=16, tile_n=16, tile_k=16, minor="n")
    given = functools.partial(tuned_matmul, schedule=schedule, backends="interpret")
    close(given(a, b), a @ b)
    close(jax.grad(squares(given))(a, b), jax.grad(squares(jnp.matmul))(a, b), 1e-3)
    close(tuned_matmul(a, b, schedule=vars(schedule), backends="interpret"), a @ b)
    assert interpret_calls(functools.partial(tuned_matmul, schedule={}), a, b) == 0
    with pytest.raises(scheduler.IllegalSchedule, match="tile_m=17 is not among"):
        tuned_matmul(a, b, schedule={**vars(schedule), "tile_m": 17}, backends="interpret")
    with pytest.raises(scheduler.IllegalSchedule, match="did you mean 'tile_m'"):
        tuned_matmul(a, b, schedule={"tile_mm": 17}, backends="interpret")


def test_lists_and_dicts_among_the_arguments_are_remembered_as_others_are():
    a, b = normal(0, 64, 32), normal(1, 32, 48)
    pallas(A, B)  # the first interpreted kernel of a process makes JAX compile everything before it once more
    lowered = []
    for _ in range(3):
        with caught_compilations() as compiled:
            tuned_matmul(a, b, backends=["interpret"], precision=["high", "high"])
            tuned_matmul(a, b, schedule={"tile_m": 16, "tile_n": 16, "tile_k": 16, "minor": "n"}, backends="interpret")
        lowered.append(len(compiled))
    assert lowered == [2, 0, 0]


def test_without_jit_the_numbers_are_the_same():
    with jax.disable_jit():
        close(pallas(A, B), A @ B)


def test_reload_and_tune_let_calls_see_a_new_answer():
    a, b = normal(0, 64, 32), normal(1, 32, 48)
    ours = functools.partial(tuned_matmul, on_miss="error", backends="interpret")
    with pytest.raises(scheduler.CacheMiss):
        ours(a, b)
    scheduler.tune(
        "matmul", {"m": 64, "n": 48, "k": 32, "dtype": "float32"}, budget=2, backends=frozenset({"interpret"})
    )
    close(ours(a, b), a @ b)


# Operations of the user's own


BIAS_GELU = load(f"{Path(__file__).parents[2] / 'examples' / 'own_kernel.py'}:BIAS_GELU")


@dataclasses.dataclass(frozen=True)
class ScaleProblem(Problem):
    n: int

    @classmethod
    def of(cls, x):
        return cls(x.shape[0])

    def operands(self):
        return (self.result(),)

    def result(self):
        return jax.ShapeDtypeStruct((self.n,), jnp.dtype("float32"))

    def reference(self, x):
        return x

    @property
    def flops(self):
        return float(self.n)


class XlaScale(LibraryKernel):
    def run(self, problem, schedule, target, /, x, *, factor=1.0):
        return factor * x


SCALE = Operation("scale", ScaleProblem, (XlaScale(),), params=("factor",))
LINEAR = dataclasses.replace(SCALE, jvp=lambda call, p, primals, tangents: (call(p, *primals), call(p, *tangents)))


def test_an_operation_without_rules_batches_and_differentiates_by_its_library_kernel():
    x, bias = normal(0, 40, 16), normal(1, 16)
    ours = functools.partial(tuned(BIAS_GELU), backends="blocked")
    theirs = lambda x, bias: jax.nn.gelu(x + bias)  # noqa: E731
    close(ours(x, bias), theirs(x, bias))
    assert interpret_calls(ours, x, bias) == 1
    stacked = jnp.stack([x, 2 * x])
    close(jax.vmap(ours, (0, None))(stacked, bias), jax.vmap(theirs, (0, None))(stacked, bias))
    close(jax.jit(jax.grad(squares(ours), 1))(x, bias), jax.grad(squares(theirs), 1)(x, bias), 1e-3)
    for a, b in zip(jax.jvp(ours, (x, bias), (x, bias)), jax.jvp(theirs, (x, bias), (x, bias)), strict=True):
        close(a, b)


def test_a_parameter_that_changes_no_schedule_reaches_the_kernel_and_a_misspelt_one_is_named():
    x = normal(0, 8)
    scale = tuned(SCALE)
    close(scale(x, factor=3.0), 3 * x)
    close(jax.jit(lambda x: scale(x, factor=3.0))(x), 3 * x)
    close(jax.grad(lambda x: scale(x, factor=3.0).sum())(x), jnp.full(8, 3.0))
    with pytest.raises(
        TypeError, match=r"scale has no parameter 'facter'; did you mean 'factor'\? \(there are: n, factor\)"
    ):
        scale(x, facter=3.0)
    with pytest.raises(TypeError, match="parameters of scale are part of the compiled program"):
        scale(x, factor=jnp.ones(()))
    with pytest.raises(ValueError, match=r"scale n=8 expects float32\[8\], got int32\[8\]"):
        scale(jnp.arange(8))


def test_an_operation_that_cannot_be_transposed_says_so():
    with pytest.raises(NotImplementedError, match="scale has no transpose"):
        jax.grad(lambda x: tuned(LINEAR)(x).sum())(normal(0, 8))


# Other chips, other platforms, several processes


def test_an_export_for_a_platform_that_is_not_here_is_answered_for_it():
    args = [jax.ShapeDtypeStruct((128, 64), jnp.float32), jax.ShapeDtypeStruct((64, 128), jnp.float32)]
    exported = jax.export.export(jax.jit(tuned_matmul), platforms=["cuda"])(*args)
    assert "dot_general" in exported.mlir_module()
    both = jax.export.export(jax.jit(tuned_matmul), platforms=["cpu", "cuda"])(*args)
    a, b = normal(0, 128, 64), normal(1, 64, 128)
    close(both.call(a, b), a @ b)
    with pytest.raises(scheduler.NoCandidate, match=r"this host has no cuda device.*only xla can run"):
        jax.export.export(jax.jit(pallas), platforms=["cpu", "cuda"])(*args)


def test_a_gpu_kernel_is_one_branch_of_an_export_for_several_platforms():
    a, b = normal(0, 1024, 2048, dtype="bfloat16"), normal(1, 2048, 1024, dtype="bfloat16")
    with scheduler.target("NVIDIA H200"):
        both = jax.export.export(
            jax.jit(lambda a, b: jnp.tanh(tuned_matmul(a, b, backends=("mosaic_gpu", "interpret", "xla")))),
            platforms=["cpu", "cuda"],
            disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")],
        )(a, b)
    assert both.mlir_module().count("mosaic_gpu") >= 1
    assert {d.kernel.backend for d in dispatch._decisions.decisions.values()} == {"mosaic_gpu", "xla"}
    close(both.call(a, b), jnp.tanh(a @ b), 2e-2)


def test_a_target_answers_for_a_chip_that_is_not_here():
    args = [jax.ShapeDtypeStruct((128, 64), jnp.bfloat16), jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)]
    with scheduler.target("NVIDIA H200"):
        jax.jit(tuned_matmul).trace(*args).lower(lowering_platforms=("cuda",))
    asked = {(platform, options.target) for _, _, platform, options in dispatch._decisions.decisions}
    assert asked == {("cuda", "NVIDIA H200")}
    decision = next(iter(dispatch._decisions.decisions.values()))
    assert decision.target == hardware.find("NVIDIA H200").target
    with pytest.raises(ValueError, match="no hardware 'H2000'"), scheduler.target("H2000"):
        pass


def test_a_target_holds_within_its_context_only():
    args = [jax.ShapeDtypeStruct((128, 64), jnp.bfloat16), jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)]
    jitted = jax.jit(tuned_matmul)

    def asked():
        (call,) = jitted.trace(*args).jaxpr.eqns
        return call.params["options"].target

    assert asked() == ""
    with scheduler.target("NVIDIA H200"):
        assert asked() == "NVIDIA H200"
        with scheduler.target("NVIDIA A100-SXM4-80GB"):
            assert asked() == "NVIDIA A100-SXM4-80GB"
    assert asked() == ""


def test_one_malformed_record_costs_a_warning_and_its_own_answer_alone(tmp_path):
    a, b = normal(0, 64, 32), normal(1, 32, 48)
    record_of()
    record_of(dataclasses.replace(P64, m=16))
    with contextlib.closing(sqlite3.connect(tmp_path / "cache.db")) as connection, connection:
        connection.execute("UPDATE schedules SET record = '{}' WHERE problem LIKE '%:64%'")
    with pytest.warns(RuntimeWarning, match="malformed"):
        close(tuned_matmul(a, b), a @ b)
    close(tuned_matmul(a[:16], b, on_miss="error"), a[:16] @ b)


def test_a_cache_that_may_only_be_read_still_answers_after_a_search(tmp_path):
    a, b = normal(0, 64, 32), normal(1, 32, 48)
    record_of()
    with contextlib.closing(sqlite3.connect(tmp_path / "cache.db")) as connection, connection:
        connection.execute("CREATE TRIGGER full BEFORE INSERT ON trials BEGIN SELECT RAISE(FAIL, 'no room'); END")
    with pytest.warns(RuntimeWarning, match="no room") as warned:
        close(tuned_matmul(a[:16], b, on_miss="tune"), a[:16] @ b)
    first, last = (str(one.message) for one in warned)
    assert "the search continues, and writes its trials later" in first
    assert re.search(r"not stored of matmul m=16 .*: (\d+) of \1 trials$", last), last
    for one in (a, a[:16]):
        close(tuned_matmul(one, b, on_miss="error"), one @ b)


def test_a_job_of_several_processes_neither_tunes_nor_reads_a_cache_of_its_own(monkeypatch):
    a, b = normal(0, 64, 32), normal(1, 32, 48)
    record_of()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(scheduler.SchedulerError, match="'tune' in a job of 2 processes"):
        tuned_matmul(a, b, on_miss="tune", backends="interpret")
    with pytest.raises(scheduler.CacheMiss):
        tuned_matmul(a, b, on_miss="error")
    close(tuned_matmul(a, b, backends="interpret"), a @ b)


PROCESS = """
    import sys, jax, numpy as np
    rank, address, scratch = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    jax.distributed.initialize(address, num_processes=2, process_id=rank)
    from scheduler import tuned_matmul
    from scheduler.dispatch import several_processes
    if scratch == "differ":
        several_processes._digest = lambda: f"code of process {rank}"
    a, b = np.ones((8, 6), np.float32), np.ones((6, 4), np.float32)
    with jax.default_device(jax.local_devices()[0]):
        try:
            print(jax.process_count(), float(tuned_matmul(a, b, backends="interpret")[0, 0]))
        except Exception as error:
            print(type(error).__name__, error)
    jax.distributed.shutdown()
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["same", "differ"])
def test_processes_of_one_job_answer_alike_or_say_that_they_differ(mode):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROCESS), str(rank), address, mode],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate() for process in processes]
    first, second = (out.strip() for out, _ in said)
    assert first == "2 6.0", said
    if mode == "same":
        assert second == "2 6.0", said
    else:
        assert second.startswith("SchedulerError process 1 has other code or other shipped records than process 0"), (
            said
        )


# Caches that are broken, and what is imported


def corrupt(path):
    path.write_bytes(b"this is no database" * 100)


def newer(path):
    record_of()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE schema_version SET version = 999")


def a_folder(path):
    path.mkdir()


@pytest.mark.parametrize("spoil", [corrupt, newer, a_folder])
@pytest.mark.parametrize("on_miss", ["model", "tune"])
def test_a_broken_cache_costs_one_warning_and_no_answer(spoil, on_miss, tmp_path):
    spoil(tmp_path / "cache.db")
    a, b = normal(0, 8, 8), normal(1, 8, 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        close(tuned_matmul(a, b, on_miss=on_miss, backends="interpret"), a @ b)
        close(tuned_matmul(b, a, on_miss="model", backends="interpret"), b @ a)
    assert [str(w.message) for w in caught if "cache.db" in str(w.message)][1:] == []
    assert len([w for w in caught if "cache.db" in str(w.message)]) == 1


def test_a_cache_that_cannot_be_written_costs_one_warning_and_its_search_is_remembered(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TILE_SCHEDULER_CACHE", str(tmp_path / "file" / "cache.db"))
    a, b = normal(0, 8, 8), normal(1, 8, 8)
    with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.INFO, "scheduler"):
        warnings.simplefilter("always")
        close(tuned_matmul(a, b, on_miss="tune", backends="interpret"), a @ b)
        close(tuned_matmul(a, b, on_miss="error", backends="pallas"), a @ b)
    assert len([w for w in caught if "cache.db" in str(w.message)]) == 1
    scheduler.tune("matmul", {"m": 8, "n": 8, "k": 16, "dtype": "float32"}, budget=1)
    c, d = normal(2, 8, 16), normal(3, 16, 8)
    close(tuned_matmul(c, d, on_miss="error"), c @ d)


def test_a_read_only_cache_answers_without_a_word_and_what_is_tuned_beside_it_is_kept_by_the_process(
    open_path, monkeypatch
):
    monkeypatch.setenv("TILE_SCHEDULER_CACHE", str(open_path))
    a, b = normal(0, 64, 32), normal(1, 32, 48)
    record_of()
    scheduler.reload()
    with frozen(open_path), warnings.catch_warnings():
        warnings.simplefilter("error")
        close(tuned_matmul(a, b, on_miss="error", backends="interpret"), a @ b)
        assert scheduler.predict("matmul", dataclasses.replace(P64, m=65)).neighbour == str(P64)
    other = {"m": 8, "n": 8, "k": 8, "dtype": "float32"}
    small = normal(0, 8, 8)
    with frozen(open_path), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        said = []
        record = scheduler.tune("matmul", other, budget=2, progress=lambda _: said.append(len(caught)))
        assert said == [1, 1, 1]  # before the first trial, and once
        assert "set TILE_SCHEDULER_CACHE to a copy" in str(caught[0].message)
        close(tuned_matmul(small, small, on_miss="error"), small @ small)
        close(tuned_matmul(small[:4], small, on_miss="tune"), small[:4] @ small)
        assert len(caught) == 1
        with pytest.raises(scheduler.StoreError, match="may only be read"):
            scheduler.tune("matmul", other, budget=2, store=Store(open_path))
    assert record.tried == 2


def python(program: str, **environment: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], env=os.environ | environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_importing_the_package_loads_neither_optuna_nor_sqlalchemy_and_a_hit_no_optuna():
    record_of()
    assert python(
        """
        import sys, scheduler
        print(*(name in sys.modules for name in ("jax", "optuna", "sqlalchemy")))
        from scheduler import tuned_matmul
        print(*(name in sys.modules for name in ("optuna", "sqlalchemy")))
        import jax.numpy as jnp
        c = tuned_matmul(jnp.ones((64, 32)), jnp.ones((32, 48)), on_miss="error", backends="interpret")
        print(float(c[0, 0]), "optuna" in sys.modules)
        """,
        JAX_PLATFORMS="cpu",
    ).splitlines() == ["False False False", "False False", "32.0 False"]


@pytest.mark.slow
def test_tuning_under_jit_works_from_a_script_without_a_main_guard(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import jax, jax.numpy as jnp\n"
        "from scheduler import tuned_matmul\n"
        "print(jax.jit(lambda a: tuned_matmul(a, a, on_miss='tune', backends='pallas'))(jnp.ones((8, 8)))[0, 0])\n"
    )
    ran = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": os.getcwd(), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert (ran.returncode, ran.stdout.strip()) == (0, "8.0"), ran.stderr


def test_the_backends_of_a_search_are_named_as_in_a_call():
    fields = {"m": 16, "n": 16, "k": 16, "dtype": jnp.float32}
    record = scheduler.tune("matmul", fields, budget=2, backends="pallas")
    assert {entry.backend for entry in record.entries} == {"interpret", "xla"}
    with pytest.raises(ValueError, match="no backend 'palas'"):
        scheduler.tune("matmul", fields, budget=2, backends="palas")


def test_a_flag_of_another_type_is_the_same_problem():
    plain = MatmulProblem(4, 4, 4, transpose_b=True)
    for given in (MatmulProblem(4, 4, 4, transpose_b=1), MatmulProblem(np.int64(4), 4, 4, transpose_b=np.True_)):
        assert given.canonical() == plain.canonical()
        assert str(given) == str(plain)


def test_bind_gives_the_problem_that_a_call_poses_and_restores_its_result():
    a, b, bs = normal(0, 2, 3, 4, 5), normal(1, 5, 6), normal(2, 3, 5, 6)
    bias = normal(3, 6)
    for other, posed in ((b, {"m": 24}), (bs, {"m": 4, "batch": 6})):
        bound = MATMUL.bind(a, other, bias=None, activation="relu")
        assert bound.problem == MatmulProblem(**{"n": 6, "k": 5, "dtype": "float32", "activation": "relu"} | posed)
        assert [x.ndim for x in bound.operands] == ([4, 2] if other is b else [4, 4])  # leading axes are not folded
        folded = [x.reshape(s.shape) for x, s in zip(bound.operands, bound.problem.operands(), strict=True)]
        close(bound.restore(bound.problem.reference(*folded)), jax.nn.relu(a @ other))
    bound = MATMUL.bind(a[0, 0, 0], b, bias=bias)
    assert bound.problem == MatmulProblem(1, 6, 5, "float32", bias="float32")
    close(bound.restore(bound.problem.reference(*bound.operands)), a[0, 0, 0] @ b + bias)
    unbound = MATMUL.bind(jnp.arange(6).reshape(2, 3), jnp.ones((3, 2), int))
    assert "dtype='int32' is not one of" in unbound.reason
    close(unbound.answer(), jnp.array([[3, 3], [12, 12]]))
    bound = SCALE.bind(normal(0, 8), factor=2.0)
    assert (bound.problem, bound.params, bound.restore) == (ScaleProblem(8), (("factor", 2.0),), None)


def test_wrong_words_of_a_tuned_operation_are_answered_in_a_sentence():
    a, b = normal(0, 4, 5), normal(1, 5, 6)
    matmul = tuned(MATMUL)
    with pytest.raises(TypeError, match="contracting dim"):
        matmul(a, b[1:])
    with pytest.raises(ValueError, match=r"a \(5,\) and b \(5, 6\) are not \[m, k\] and \[k, n\]"):
        matmul(a[0], b, normal(2, 6))
    for wrong in ("m", "transposeb"):
        with pytest.raises(
            TypeError, match=rf"no parameter '{wrong}'.* \(there are: transpose_a, transpose_b, precision,"
        ):
            matmul(a, b, **{wrong: 4})
    own = tuned(BIAS_GELU)
    with pytest.raises(TypeError, match=r"no parameter 'tile' \(there are: m, n\)"):
        own(a, b, tile=4)
    close(matmul(a[0], b), a[0] @ b)
    assert matmul(a, b, out_dtype=jnp.bfloat16).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "search", ["scheduler.tune(OWN, problem, budget=1)", 'scheduler.tuned(OWN)(x, on_miss="tune")']
)
def test_a_script_without_a_guard_is_loaded_for_its_operation_without_searching_again(search, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        import jax.numpy as jnp, scheduler
        from operations import DoubleProblem, DOUBLE
        from search_spaces import Operation
        OWN = Operation("own", DoubleProblem, (DOUBLE.library,))
        x, problem = jnp.ones(8), DoubleProblem(8)
        {search}
        raise SystemExit("went on")
        """)
    )
    operation = load(f"{script}:OWN")
    assert operation.name == "own"
    assert Store(default_url()).get(key_of(operation, operation.problem(8), hardware.CPU)) is None
    with pytest.raises(SystemExit, match="went on"):
        runpy.run_path(str(script), run_name="__main__")
    assert Store(default_url()).get(key_of(operation, operation.problem(8), hardware.CPU)) is not None


def test_arrays_may_be_given_by_name_to_any_tuned_function():
    a, b, bias = jnp.ones((4, 8)), jnp.ones((8, 2)), jnp.arange(2.0, dtype="float32")
    matmul = scheduler.tuned("matmul")
    assert (matmul(a, b, bias=bias) == 8 + bias).all()
    assert (jax.jit(lambda bias: matmul(a, b, bias=bias, activation="relu"))(bias) == 8 + bias).all()
    assert (matmul(a, b, bias=np.asarray(bias)) == 8 + bias).all()


def test_an_option_that_is_nan_compiles_once(caplog):
    """NaN equals nothing, itself included, so that a plain key of a cache would never be found again."""
    q, counts = jnp.ones((1, 24, 1, 8)), []
    with jax.log_compiles(), caplog.at_level("WARNING"):
        for _ in range(3):
            caplog.clear()
            scheduler.tuned_flash_attention(q, q, q, scale=float("nan"))
            counts.append(sum("Finished XLA compilation" in message for message in caplog.messages))
    assert counts[0] > 0
    assert counts[1:] == [0, 0]
