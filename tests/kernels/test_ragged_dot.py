"""Grouped products: what calls mean for any sizes of groups, their derivatives, batches, equations, and kernels."""

import dataclasses
import functools
import itertools
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import scheduler
from scheduler import tuned_gated_ragged_dot, tuned_ragged_dot
from scheduler.core import hardware
from scheduler.measure.bench import Bench
from search_spaces.fingerprint import all_equations
from search_spaces.kernel import Library
from search_spaces.ragged_dot import GATED_RAGGED_DOT, RAGGED_DOT, RAGGED_DOT_WEIGHTS
from search_spaces.ragged_dot.equations import equation_of, problem_of_ragged_dot
from search_spaces.ragged_dot.problem import (
    GatedRaggedDotProblem,
    RaggedDotProblem,
    RaggedDotWeightsProblem,
    random_boundaries,
)
from search_spaces.target import Target

pytestmark = pytest.mark.slow_but_first

CPU = Target("cpu", "cpu", "cpu", 1)
ROWS, GROUPS, K, N = 40, 6, 24, 20
# Tiles that divide no extent, so that boundaries, edges and several steps of k occur in each call.
SCHEDULE = {"tile_m": 16, "tile_n": 16, "tile_k": 16}
BACKENDS = {"xla": {"backends": "xla"}, "interpret": {"schedule": SCHEDULE}}
both = pytest.mark.parametrize("how", BACKENDS.values(), ids=BACKENDS)


def normal(number, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(number), shape, jnp.float32).astype(dtype)


X, W, UP, Y = normal(0, ROWS, K), normal(1, GROUPS, K, N), normal(2, GROUPS, K, N), normal(3, ROWS, N)
SIZES = jnp.array([7, 0, 16, 3, 1, 8], jnp.int32)  # five rows are of no group


@pytest.fixture(autouse=True)
def _no_answers():
    scheduler.reload()


def close(actual, expected, rtol=1e-4, atol=1e-4):
    def one(x, y):
        assert x.shape == y.shape
        np.testing.assert_allclose(np.asarray(x, np.float64), np.asarray(y, np.float64), rtol=rtol, atol=atol)

    jax.tree.map(one, actual, expected)


def boundaries(sizes):
    return np.minimum(np.concatenate([[0], np.cumsum(np.asarray(sizes))]), ROWS)


def products(lhs, rhs, bounds):
    """The product of each group in float64, one group after the other."""
    out = np.zeros((lhs.shape[0], rhs.shape[2]))
    for matrix, start, end in zip(np.asarray(rhs, np.float64), bounds[:-1], bounds[1:], strict=True):
        out[start:end] = np.asarray(lhs, np.float64)[start:end] @ matrix
    return out


def weights(lhs, rhs, bounds):
    lhs, rhs = (np.asarray(x, np.float64) for x in (lhs, rhs))
    return np.stack([lhs[i:j].T @ rhs[i:j] for i, j in itertools.pairwise(bounds)])


def gated(lhs, gate, up, bounds):
    g, u = (products(lhs, x, bounds) for x in (gate, up))
    return g / (1 + np.exp(-g)) * u


def drawn_sizes(seed):
    """Sizes that add up to any number of rows up to all, with empty groups."""
    return np.diff(np.sort(np.concatenate([[0], random_boundaries(seed, ROWS, GROUPS - 1)])))


def draw(count, first):
    for seed in range(first, first + count):
        sizes = np.zeros(GROUPS, np.int32)
        sizes[: GROUPS - 1] = drawn_sizes(seed)[: GROUPS - 1]
        yield jnp.asarray(np.random.default_rng(seed).permutation(sizes), jnp.int32)


# ------------------------------------------------------------------------------
# Numbers.


@both
def test_each_row_has_the_matrix_of_its_group_for_a_hundred_random_sizes(how):
    call = jax.jit(lambda sizes: tuned_ragged_dot(X, W, sizes, **how))
    for sizes in draw(100, 0):
        close(call(sizes), products(X, W, boundaries(sizes)))


@both
def test_a_gated_product_has_both_matrices_of_the_group_for_a_hundred_random_sizes(how):
    call = jax.jit(lambda sizes: tuned_gated_ragged_dot(X, W / 4, UP, sizes, **how))
    for sizes in draw(100, 100):
        close(call(sizes), gated(X, W / 4, UP, boundaries(sizes)), rtol=1e-3)


@both
def test_gradients_of_matrices_have_the_rows_of_each_group_for_a_hundred_random_boundaries(how):
    call = jax.jit(lambda bounds: scheduler.tuned(RAGGED_DOT_WEIGHTS)(X, Y, bounds, **how))
    for seed in range(200, 300):
        bounds = random_boundaries(seed, ROWS, GROUPS)
        close(call(jnp.asarray(bounds)), weights(X, Y, bounds))


@both
@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_boundaries_may_lie_at_any_row(how, transpose_rhs):
    rhs = W.swapaxes(1, 2) if transpose_rhs else W
    fixed = {"boundaries": True, "transpose_rhs": transpose_rhs, **how}
    rows = jax.jit(lambda bounds: scheduler.tuned(RAGGED_DOT)(X, rhs, bounds, **fixed))
    pair = jax.jit(lambda bounds: scheduler.tuned(GATED_RAGGED_DOT)(X, rhs / 4, rhs, bounds, **fixed))
    for seed in range(10):
        bounds = random_boundaries(seed, ROWS, GROUPS)
        close(rows(jnp.asarray(bounds)), products(X, W, bounds))
        close(pair(jnp.asarray(bounds)), gated(X, W / 4, W, bounds), rtol=1e-3)


@both
@pytest.mark.parametrize(
    "sizes",
    [[ROWS, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, ROWS], [0, 0, ROWS, 0, 0, 0], [0] * GROUPS, [1] * GROUPS, [99] * GROUPS],
    ids=str,
)
def test_one_group_may_have_all_rows_or_none_any(how, sizes):
    sizes, bounds = jnp.array(sizes, jnp.int32), boundaries(sizes)
    out, pull = jax.vjp(lambda x, w: tuned_ragged_dot(x, w, sizes, **how), X, W)
    close(out, products(X, W, bounds))
    close(pull(Y), (products(Y, W.swapaxes(1, 2), bounds), weights(X, Y, bounds)))


@both
def test_nan_and_infinity_in_rows_of_a_group_reach_no_other_group(how):
    bounds, special = np.asarray(boundaries(SIZES)), [(2, jnp.nan), (10, jnp.inf), (38, -jnp.inf)]
    x, y = X, Y
    for row, value in special:  # rows of groups 0 and 2, and of no group
        x, y = x.at[row, 3].set(value), y.at[row, 5].set(-value)
    out = np.asarray(jax.jit(lambda x, y: scheduler.tuned(RAGGED_DOT_WEIGHTS)(x, y, jnp.asarray(bounds), **how))(x, y))
    for group in range(GROUPS):
        touched = group in (0, 2)
        assert np.isfinite(out[group]).all() != touched, group
    clean = np.isin(np.arange(GROUPS), (0, 2), invert=True)
    close(out[clean], weights(X, Y, bounds)[clean])
    rows = np.asarray(tuned_ragged_dot(x, W, SIZES, **how))
    assert set(np.flatnonzero(~np.isfinite(rows).all(axis=1))) == {2, 10}
    assert (rows[35:] == 0).all()


def test_nan_in_a_matrix_stays_in_its_group_except_in_xla():
    w = W.at[2].set(jnp.nan)
    for call in (tuned_ragged_dot, lambda x, w, sizes, **how: tuned_gated_ragged_dot(x, w, w, sizes, **how)):
        rows = np.asarray(call(X, w, SIZES, schedule=SCHEDULE))
        assert set(np.flatnonzero(np.isnan(rows).any(axis=1))) == set(range(7, 23))


@both
def test_rhs_may_be_transposed_and_hold_the_groups_from_an_offset_on(how):
    close(tuned_ragged_dot(X, W.swapaxes(1, 2), SIZES, transpose_rhs=True, **how), lax.ragged_dot(X, W, SIZES))
    whole = products(X, W, boundaries(SIZES))
    call = jax.jit(lambda w, offset: tuned_ragged_dot(X, w, SIZES, group_offset=offset, **how))
    parts = [call(W[i : i + 2], jnp.array([i], jnp.int32)) for i in (0, 2, 4)]
    close(sum(parts), whole)
    close(parts[1], np.where((np.arange(ROWS) >= 7)[:, None] & (np.arange(ROWS) < 26)[:, None], whole, 0))
    close(call(W[4:], jnp.array([5], jnp.int32)), products(X, W[4:], [27, 35, 35]))  # group 6 has no rows
    close(call(W[:2], jnp.array([-1], jnp.int32)), products(X, W[:2], [0, 0, 7]))
    gate = jax.jit(lambda offset: tuned_gated_ragged_dot(X, W[3:] / 4, UP[3:], SIZES, group_offset=offset, **how))
    close(gate(jnp.array([3])), gated(X, W[3:] / 4, UP[3:], [23, 26, 27, 35]), rtol=1e-3)


def test_results_and_operands_of_other_dtypes():
    x, w, half = X.astype(jnp.bfloat16), W.astype(jnp.bfloat16), W.astype(jnp.float16)
    for how in BACKENDS.values():
        wide = tuned_ragged_dot(x, w, SIZES, preferred_element_type=jnp.float32, **how)
        assert wide.dtype == jnp.float32
        close(wide, products(x, w, boundaries(SIZES)))
        assert tuned_ragged_dot(x, w, SIZES.astype(jnp.int8), **how).dtype == jnp.bfloat16
        assert tuned_gated_ragged_dot(x, w, w, SIZES, preferred_element_type="float32", **how).dtype == jnp.float32
        assert tuned_ragged_dot(X.astype(jnp.float16), half, SIZES, **how).dtype == jnp.float16
    whole = tuned_ragged_dot(X.astype(int), W.astype(int), SIZES)
    assert (whole.dtype, whole.shape) == (jnp.int32, (ROWS, N))
    assert tuned_ragged_dot(X, w, SIZES).dtype == jnp.float32


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize("backends", ["interpret", "xla"])
def test_operands_of_8_bits_with_a_wider_result(dtype, backends):
    keys = jax.random.split(jax.random.key(0), 2)
    lhs, rhs = (jax.random.randint(key, shape, -3, 4) for key, shape in zip(keys, [(24, 16), (3, 8, 16)], strict=True))
    sizes, out = jnp.array([5, 0, 12]), jnp.int32 if dtype == "int8" else jnp.float32
    found = tuned_ragged_dot(
        lhs.astype(dtype),
        rhs.astype(dtype),
        sizes,
        transpose_rhs=True,
        preferred_element_type=out,
        backends=backends,
    )
    assert found.dtype == out
    wanted = np.concatenate([lhs[:5] @ rhs[0].T, lhs[5:17] @ rhs[2].T, np.zeros((7, 8), np.int32)])
    np.testing.assert_array_equal(found, wanted)


def test_gradients_of_8_bit_operands_have_their_dtype():
    lhs, rhs = jnp.ones((16, 32), jnp.float8_e4m3fn), jnp.ones((2, 48, 32), jnp.float8_e4m3fn)

    def total(lhs, rhs):
        product = tuned_ragged_dot(lhs, rhs, jnp.array([5, 8]), transpose_rhs=True, preferred_element_type=jnp.bfloat16)
        return product.astype(jnp.float32).sum()

    dlhs, drhs = jax.grad(total, argnums=(0, 1))(lhs, rhs)
    assert (dlhs.dtype, drhs.dtype) == (lhs.dtype, rhs.dtype)
    np.testing.assert_array_equal(dlhs[:, 0].astype(np.float32), [48.0] * 13 + [0.0] * 3)
    np.testing.assert_array_equal(drhs[:, 0, 0].astype(np.float32), [5.0, 8.0])


def test_no_rows_no_groups_and_no_columns():
    none = jnp.zeros(0, jnp.int32)
    for shape, out in (
        ((X[:0], W, SIZES), (0, N)),
        ((X, W[:0], none), (ROWS, N)),
        ((X, W[..., :0], SIZES), (ROWS, 0)),
        ((X[:, :0], W[:, :0], SIZES), (ROWS, N)),
    ):
        found = jax.jit(tuned_ragged_dot)(*shape)
        assert found.shape == out
        assert not found.any()
        lhs, rhs, sizes = shape
        assert tuned_gated_ragged_dot(lhs, rhs, rhs, sizes).shape == out
        assert jax.grad(lambda w, lhs=lhs, sizes=sizes: tuned_ragged_dot(lhs, w, sizes).sum())(rhs).shape == rhs.shape
    assert not tuned_ragged_dot(X, W[:0], SIZES, group_offset=jnp.array([2])).any()


# ------------------------------------------------------------------------------
# Derivatives and transformations.


def dense(x, w, sizes=SIZES):
    ends = jnp.cumsum(sizes)
    row = jnp.arange(x.shape[0])
    inside = (row >= (ends - sizes)[:, None]) & (row < ends[:, None])
    return jnp.einsum("gr,rk,gkn->rn", inside.astype(x.dtype), x, w)


def curved(product):
    return lambda x, w: jnp.sum(Y * jnp.sin(product(x, w)))


def called(function, *args):
    """The problems that a function's tuned calls pose, as text."""
    equations = all_equations(jax.make_jaxpr(function)(*args))
    calls = (eqn.params for eqn in equations if eqn.primitive.name == "tuned_call")
    return sorted(f"{params['operation'].name} {params['problem']}" for params in calls)


@pytest.mark.parametrize("backends", [None, "pallas"])
def test_first_and_second_derivatives_are_those_of_a_dense_product(backends):
    ours = curved(lambda x, w: tuned_ragged_dot(x, w, SIZES, backends=backends))
    plain = curved(dense)
    close(jax.jit(jax.grad(ours, (0, 1)))(X, W), jax.grad(plain, (0, 1))(X, W))
    turned = curved(lambda x, w: tuned_ragged_dot(x, w.swapaxes(1, 2), SIZES, transpose_rhs=True, backends=backends))
    close(jax.jit(jax.grad(turned, (0, 1)))(X, W), jax.grad(plain, (0, 1))(X, W))
    tangents = (jnp.cos(X), jnp.cos(W))
    close(jax.jvp(ours, (X, W), tangents), jax.jvp(plain, (X, W), tangents))

    def second(loss):
        return jax.jit(lambda: jax.jvp(jax.grad(loss, (0, 1)), (X, W), tangents)[1])()

    close(second(ours), second(plain), rtol=1e-3, atol=1e-3)

    def backward_twice(loss):
        return jax.jit(jax.grad(lambda x, w: sum((g**2).sum() for g in jax.grad(loss, (0, 1))(x, w)), (0, 1)))(X, W)

    close(backward_twice(ours), backward_twice(plain), rtol=1e-3, atol=1e-2)


def test_products_of_the_backward_pass_are_tuned_calls():
    def loss(x, w):
        return tuned_ragged_dot(x, w, SIZES, preferred_element_type=jnp.float32).sum()

    x, w = X.astype(jnp.bfloat16), W.astype(jnp.bfloat16)
    fields = f"rows={ROWS} groups={GROUPS} k={K} n={N} dtype="
    assert called(jax.grad(loss, (0, 1)), x, w) == [
        f"ragged_dot rows={ROWS} groups={GROUPS} k={N} n={K} dtype=float32 out_dtype=bfloat16 transpose_rhs=True",
        f"ragged_dot {fields}bfloat16 out_dtype=float32",
        f"ragged_dot_weights {fields}float32 out_dtype=bfloat16",
    ]
    dx, dw = jax.grad(loss, (0, 1))(x, w)
    assert (dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.bfloat16)
    close((dx, dw), jax.grad(lambda x, w: dense(x, w).sum(), (0, 1))(*(y.astype("float32") for y in (x, w))), 0.01)


@pytest.mark.parametrize("activation", ["silu", "gelu", "relu"])
def test_gradients_of_a_gated_product_are_those_of_the_formula(activation):
    def ours(x, gate, up):
        return jnp.sum(Y * tuned_gated_ragged_dot(x, gate, up, SIZES, activation=activation, backends="pallas"))

    def plain(x, gate, up):
        return jnp.sum(Y * getattr(jax.nn, activation)(dense(x, gate)) * dense(x, up))

    for which in (0, 1, (0, 1, 2)):
        close(jax.jit(jax.grad(ours, which))(X, W, UP), jax.grad(plain, which)(X, W, UP), 1e-3, 1e-2)
    close(ours(X, W, UP), plain(X, W, UP), 1e-3)
    fields = f"rows={ROWS} groups={GROUPS} k={K} n={N} dtype=float32"
    back = f"ragged_dot rows={ROWS} groups={GROUPS} k={N} n={K} dtype=float32 transpose_rhs=True"
    expected = [back] * 2 + [f"ragged_dot {fields}"] * 2 + [f"ragged_dot_weights {fields}"] * 2
    assert called(jax.grad(ours, (0, 1, 2)), X, W, UP) == sorted(expected)


XS, WS = jnp.stack([X, 2 * X, X + 1]), jnp.stack([W, W - 1, W / 2])
SEVERAL = jnp.stack([SIZES, jnp.array([1, 2, 3, 4, 5, 6]), jnp.array([0, 40, 0, 0, 0, 0])])
BATCHES = {  # axes of lhs, rhs and sizes, and the problem of the one call, if there is one
    "all": ((0, 0, 0), f"rows={3 * ROWS} groups={3 * GROUPS} k={K} n={N}"),
    "lhs and rhs": ((0, 0, None), f"rows={3 * ROWS} groups={3 * GROUPS} k={K} n={N}"),
    "lhs": ((0, None, None), f"rows={3 * ROWS} groups={GROUPS} k={K} n={N}"),
    "rhs": ((None, 0, None), f"rows={ROWS} groups={GROUPS} k={K} n={3 * N}"),
    "lhs and sizes": ((0, None, 0), f"rows={ROWS} groups={GROUPS} k={K} n={N}"),
    "sizes": ((None, None, 0), f"rows={ROWS} groups={GROUPS} k={K} n={N}"),
}


@pytest.mark.parametrize("batched", BATCHES)
def test_a_batch_is_one_call_or_a_sequence_and_its_gradient_too(batched):
    axes, problem = BATCHES[batched]
    args = [many if axis == 0 else one for many, one, axis in zip((XS, WS, SEVERAL), (X, W, SIZES), axes, strict=True)]

    def mapped(product):
        return jax.vmap(product, axes)

    ours = mapped(functools.partial(tuned_ragged_dot, backends="pallas"))
    close(jax.jit(ours)(*args), mapped(dense)(*args))
    assert called(ours, *args) == [f"ragged_dot {problem} dtype=float32"]

    def gradient(product):
        return jax.jit(jax.grad(lambda x, w: jnp.sum(jnp.sin(mapped(product)(x, w, args[2]))), (0, 1)))(*args[:2])

    close(gradient(functools.partial(tuned_ragged_dot, backends="pallas")), gradient(dense), 1e-3, 1e-3)
    each = jax.jit(mapped(jax.grad(lambda x, w, sizes: jnp.sin(tuned_ragged_dot(x, w, sizes)).sum(), (0, 1))))(*args)
    close(each, mapped(jax.grad(lambda x, w, sizes: jnp.sin(dense(x, w, sizes)).sum(), (0, 1)))(*args), 1e-3, 1e-3)


def test_nan_in_rows_of_no_group_reaches_no_neighbour_in_a_batch():
    def gradient(x, w, sizes):
        return jax.grad(lambda w: tuned_ragged_dot(x, w, sizes, backends="pallas").sum())(w)

    xs = XS.at[0, -1].set(jnp.nan).at[1, -1].set(jnp.inf)
    close(jax.vmap(gradient)(xs, WS, SEVERAL), jax.vmap(gradient)(XS, WS, SEVERAL))


def test_batches_of_gated_products():
    def plain(x, gate, up, sizes):
        return jax.nn.silu(dense(x, gate, sizes)) * dense(x, up, sizes)

    ours = functools.partial(tuned_gated_ragged_dot, backends="pallas")
    for axes in ((0, None, None, None), (0, 0, 0, 0), (0, 0, 0, None), (0, None, None, 0)):
        one, many = (X, W, UP, SIZES), (XS, WS, WS, SEVERAL)
        args = [y if axis == 0 else x for x, y, axis in zip(one, many, axes, strict=True)]
        close(jax.jit(jax.vmap(ours, axes))(*args), jax.vmap(plain, axes)(*args), 1e-3, 1e-3)


def test_inside_checkpoint_scan_and_shard_map_and_exported():
    step = curved(lambda x, w: tuned_ragged_dot(x, w, SIZES, backends="pallas"))
    close(jax.jit(jax.grad(jax.checkpoint(step), (0, 1)))(X, W), jax.grad(curved(dense), (0, 1))(X, W))
    _, out = jax.jit(
        lambda: lax.scan(lambda c, xs: (c, tuned_ragged_dot(*xs, backends="pallas")), 0, (XS, WS, SEVERAL))
    )()
    close(out, jax.vmap(dense)(XS, WS, SEVERAL))
    mesh = jax.make_mesh((1,), ("experts",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def part(x, w):
        first = lax.axis_index("experts") * w.shape[0]
        return lax.psum(tuned_ragged_dot(x, w, SIZES, group_offset=first[None], backends="pallas"), "experts")

    mapped = jax.shard_map(part, mesh=mesh, in_specs=(spec(), spec("experts")), out_specs=spec())
    close(jax.jit(mapped)(X, W), dense(X, W))
    call = jax.jit(lambda x, w, sizes: tuned_ragged_dot(x, w, sizes, backends="pallas"))
    close(jax.export.export(call)(X, W, SIZES).call(X, W, SIZES), dense(X, W))


# ------------------------------------------------------------------------------
# Fallbacks and errors.


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (
            lambda **how: tuned_ragged_dot(X.astype(int), W.astype(int), SIZES, **how),
            "operands are int32; kernels take",
        ),
        (lambda **how: tuned_ragged_dot(X, W.astype("bfloat16"), SIZES, **how), "lhs is float32 and rhs is bfloat16"),
        (lambda **how: tuned_ragged_dot(X, W, SIZES, precision="highest", **how), "precision='highest' is not"),
        (lambda **how: tuned_ragged_dot(X[:0], W, SIZES, **how), "lhs is empty"),
        (lambda **how: tuned_gated_ragged_dot(X[:0], W, W, SIZES, **how), "x is empty"),
    ],
)
def test_who_leaves_xla_out_is_told_why_no_kernel_can_be_selected(call, why, caplog):
    with pytest.raises(scheduler.NoCandidate, match=rf"{why}.*only xla can run"):
        call(backends="pallas")
    with caplog.at_level(logging.DEBUG, "scheduler"):
        call(on_miss="error")
    assert why in caplog.text


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((X, W, SIZES[1:]), r"matrices of shape \(6, 24, 20\) and 5 group sizes do not fit"),
        ((X, W[:, 1:], SIZES), r"rows of shape \(40, 24\), matrices of shape \(6, 23, 20\)"),
        ((X[0], W, SIZES), r"rows of shape \(24,\), matrices"),
        ((X, W[0], SIZES), r"matrices of shape \(24, 20\) and 6 group sizes do not fit"),
        ((X, W, SIZES * 1.0), r"group_sizes must be integers of one axis, not float32\[6\]"),
        ((X, W, SIZES[0]), r"group_sizes must be integers of one axis, not int32\[\]"),
        ((X, W, [1, 2]), "group_sizes must be an array, not list"),
    ],
)
def test_calls_that_jax_rejects_raise_a_type_error(args, says):
    with pytest.raises(TypeError):
        lax.ragged_dot(*args)
    with pytest.raises(TypeError, match=says):
        tuned_ragged_dot(*args)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (
            lambda: tuned_ragged_dot(X, W, SIZES, group_offset=SIZES),
            TypeError,
            r"one integer in an array, not int32\[6\]",
        ),
        (
            lambda: tuned_ragged_dot(X, W, SIZES, transpose_rhs=True),
            TypeError,
            r"do not fit: \[rows, k\], \[groups, n, k\]",
        ),
        (
            lambda: tuned_gated_ragged_dot(X, W, W[1:], SIZES),
            ValueError,
            r"w_gate \(6, 24, 20\) and w_up \(5, 24, 20\)",
        ),
        (lambda: tuned_gated_ragged_dot(X, W, W, SIZES, activation="tanh"), ValueError, "'tanh' is not one of relu"),
        (
            lambda: tuned_gated_ragged_dot(X.astype(int), *[W.astype(int)] * 2, SIZES),
            TypeError,
            "int32 take no activation",
        ),
        (lambda: tuned_ragged_dot(X, W, SIZES, distribution="even"), ValueError, "'even' is not one of balanced"),
        (lambda: tuned_ragged_dot(X, W, SIZES, distribution="1+2"), ValueError, "distribution has 2 sizes"),
        (lambda: tuned_ragged_dot(X, W, SIZES, group_ofset=SIZES), TypeError, "did you mean 'group_offset'"),
        (
            lambda: tuned_ragged_dot(X, W, SIZES, on_miss="error"),
            scheduler.CacheMiss,
            "tune ragged_dot rows=40 groups=6",
        ),
        (lambda: scheduler.tuned(RAGGED_DOT)(X, W, SIZES, boundaries=True), ValueError, r"int32\[7\], not int32\[6\]"),
    ],
)
def test_wrong_arguments_raise_one_sentence(call, error, says):
    with pytest.raises(error, match=says):
        call()


# ------------------------------------------------------------------------------
# Equations of `jax.lax.ragged_dot_general`.


def posed(function, *args):
    equations = all_equations(jax.make_jaxpr(function)(*args))
    (equation,) = (each for each in equations if each.primitive.name == "ragged_dot_general")
    return problem_of_ragged_dot(*(x.aval for x in equation.invars), **equation.params)


def test_an_equation_and_its_gradients_are_grouped_products():
    half = (X.astype("bfloat16"), W.astype("bfloat16"))
    forward = posed(lambda x, w: lax.ragged_dot(x, w, SIZES, preferred_element_type=jnp.float32), *half)
    assert forward.problem == RaggedDotProblem(ROWS, GROUPS, K, N, out_dtype="float32")
    product = functools.partial(lax.ragged_dot, group_sizes=SIZES)
    _, pull = jax.vjp(lambda x: product(x, W), X)
    rows = posed(pull, Y)
    assert rows.problem == RaggedDotProblem(ROWS, GROUPS, N, K, "float32", transpose_rhs=True)
    of_weights = posed(jax.vjp(lambda w: product(X, w), W)[1], Y)
    assert of_weights.problem == RaggedDotWeightsProblem(ROWS, GROUPS, K, N, "float32")
    library = RAGGED_DOT_WEIGHTS.library
    operands = of_weights.operands(X, Y, SIZES)
    assert operands[2].dtype == jnp.int32
    close(of_weights.restore(library.run(of_weights.problem, Library(), CPU, *operands)), pull_of_weights(product)(Y))
    assert equation_of(RaggedDotProblem)(X, W, SIZES, ragged_dot_dimension_numbers=ROWS_OF_GROUPS).problem
    assert "not a RaggedDotWeightsProblem" in equation_of(RaggedDotWeightsProblem)(
        X, W, SIZES, ragged_dot_dimension_numbers=ROWS_OF_GROUPS
    )


def pull_of_weights(product):
    return jax.vjp(lambda w: product(X, w), W)[1]


ROWS_OF_GROUPS = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
WEIGHTS_OF_GROUPS = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())


def test_a_transpose_around_an_equation_is_no_copy():
    turned = (0, 2, 1)
    rows = problem_of_ragged_dot(
        X, W, SIZES, ragged_dot_dimension_numbers=ROWS_OF_GROUPS, stored=(None, turned, None, None)
    )
    assert rows.problem == RaggedDotProblem(ROWS, GROUPS, K, N, "float32", transpose_rhs=True)
    of_weights = problem_of_ragged_dot(
        X, Y, SIZES, ragged_dot_dimension_numbers=WEIGHTS_OF_GROUPS, stored=(None, None, None, turned)
    )
    assert of_weights.problem == RaggedDotWeightsProblem(ROWS, GROUPS, N, K, "float32")
    for matched, operation, args, dimensions in (
        (rows, RAGGED_DOT, (X, W, SIZES), ROWS_OF_GROUPS),
        (of_weights, RAGGED_DOT_WEIGHTS, (X, Y, SIZES), WEIGHTS_OF_GROUPS),
    ):
        out = operation.library.run(matched.problem, Library(), CPU, *matched.operands(*args))
        (found,) = matched.restore(out)
        close(found, lax.ragged_dot_general(*args, ragged_dot_dimension_numbers=dimensions))


@pytest.mark.parametrize(
    ("function", "args", "why"),
    [
        (jax.vmap(lax.ragged_dot), (XS, WS, SEVERAL), "lhs .* and group_sizes .* are not"),
        (lambda x: lax.ragged_dot(x, W, SIZES, precision="highest"), (X,), "is not the default one"),
        (lambda x: lax.ragged_dot(x, W.astype("bfloat16"), SIZES), (X,), "lhs is float32 and rhs is bfloat16"),
        (lambda x: lax.ragged_dot(x, W, SIZES), (X[:0],), "an operand is empty"),
        (lambda x: lax.ragged_dot(x.astype(int), W.astype(int), SIZES), (X,), "dtype='int32' is not one of"),
        (
            lambda x: lax.ragged_dot_general(
                x, W, SIZES, lax.RaggedDotDimensionNumbers((((0,), (1,)), ((), ())), (1,), (0,))
            ),
            (X.T,),
            "are not those of jax.lax.ragged_dot or of its gradients",
        ),
    ],
)
def test_other_equations_are_left_to_xla_for_a_reason(function, args, why):
    assert re.search(why, posed(function, *args))


# ------------------------------------------------------------------------------
# Kernels.


@pytest.mark.parametrize(
    ("operation", "problem"),
    [
        (RAGGED_DOT, RaggedDotProblem(33, 3, 40, 20, "float32")),
        (RAGGED_DOT, RaggedDotProblem(70, 5, 33, 40, transpose_rhs=True, out_dtype="float32")),
        (GATED_RAGGED_DOT, GatedRaggedDotProblem(33, 3, 40, 20, activation="gelu")),
        (GATED_RAGGED_DOT, GatedRaggedDotProblem(70, 1, 33, 40, transpose_rhs=True)),
        (RAGGED_DOT_WEIGHTS, RaggedDotWeightsProblem(33, 3, 40, 20)),
        (RAGGED_DOT_WEIGHTS, RaggedDotWeightsProblem(70, 5, 33, 40, "float32")),
    ],
    ids=str,
)
def test_programs_of_xla_and_schedules_of_the_interpreter_are_right(operation, problem):
    reference = jax.jit(problem.reference)
    for kernel in (operation.library, operation.kernel("interpret")):
        space = kernel.space(problem, CPU)
        points, _ = space.legal()
        assert (kernel.footprint(problem, points, CPU).onchip_bytes >= 0).all()
        schedules = list(space.schedules(points))
        for one in schedules[:: max(1, len(schedules) // 2)]:
            run = jax.jit(lambda *args, kernel=kernel, one=one: kernel.run(problem, one, CPU, *args))
            allowed = kernel.tolerance(problem, one)
            for seed in range(3):
                args = problem.inputs(seed)
                out = run(*args)
                assert (out.shape, out.dtype) == (problem.result().shape, problem.result().dtype)
                close(out, reference(*args), allowed.relative, allowed.absolute)


@pytest.mark.parametrize(
    ("operation", "problem"),
    [
        (RAGGED_DOT, RaggedDotProblem(33, 4, 24, 40)),
        (RAGGED_DOT, RaggedDotProblem(33, 4, 24, 40, "float32", transpose_rhs=True)),
        (GATED_RAGGED_DOT, GatedRaggedDotProblem(33, 4, 24, 40)),
        (RAGGED_DOT_WEIGHTS, RaggedDotWeightsProblem(33, 4, 24, 40)),
    ],
    ids=str,
)
def test_the_interpreter_is_right_for_special_operands(operation, problem):
    assert "nan" in problem.special()
    assert Bench(operation, problem, hardware.CPU).confirm("interpret", SCHEDULE) is None


def test_a_search_finds_and_a_call_serves_a_schedule():
    record = scheduler.tune("ragged_dot", RaggedDotProblem(ROWS, GROUPS, K, N, "float32"), budget=3)
    assert record.tried >= 2
    close(tuned_ragged_dot(X, W, SIZES, on_miss="error", backends="pallas"), dense(X, W))
    assert scheduler.tuned(RAGGED_DOT).problem(X, W, SIZES) == RaggedDotProblem(ROWS, GROUPS, K, N, "float32")


def test_a_call_poses_the_problem_of_its_distribution():
    found = []
    for distribution in ("", "skewed", "+".join(map(str, SIZES.tolist()))):
        bound = RAGGED_DOT.bind(X, W, SIZES, distribution=distribution)
        found.append(bound.problem)
        close(tuned_ragged_dot(X, W, SIZES, distribution=distribution), products(X, W, boundaries(SIZES)))
    assert [p.distribution for p in found[:2]] == ["", "skewed"]
    assert found[2].draws()[0].tolist() == boundaries(SIZES).tolist()
    assert len({p.canonical() for p in found}) == 3


def test_a_problem_is_that_of_its_operands_and_of_its_key():
    for problem in (
        RaggedDotProblem(ROWS, GROUPS, K, N, transpose_rhs=True, out_dtype="float32"),
        GatedRaggedDotProblem(ROWS, GROUPS, K, N, "float16", activation="relu"),
        RaggedDotWeightsProblem(ROWS, GROUPS, K, N, "float32"),
    ):
        options = {"transpose_rhs": True, "out_dtype": "float32"} if isinstance(problem, RaggedDotProblem) else {}
        options = {"activation": "relu"} if isinstance(problem, GatedRaggedDotProblem) else options
        assert type(problem).of(*problem.operands(), **options) == problem
        assert type(problem).from_canonical(problem.canonical()) == problem
        assert dataclasses.replace(problem, rows=1).flops * ROWS == problem.flops


@pytest.mark.parametrize("operation", [RAGGED_DOT, GATED_RAGGED_DOT], ids=str)
def test_nan_and_infinity_in_a_matrix_of_no_rows_reach_no_row_of_reference_and_kernel(operation):
    p = operation.problem(rows=24, groups=4, k=16, n=8, dtype="float32")
    *arrays, edges = p.inputs(0)
    special = [x.at[1, 0, :2].set(jnp.array([jnp.nan, jnp.inf])) if x.ndim == 3 else x for x in arrays]
    edges = jnp.array([0, 8, 8, 16, 24], edges.dtype)
    wanted = p.reference(*arrays, edges)
    np.testing.assert_array_equal(p.reference(*special, edges), wanted)
    kernel = operation.kernel("interpret")
    space = kernel.space(p, CPU)
    found = kernel.run(p, next(space.schedules(space.legal()[0])), CPU, *special, edges)
    close(found, wanted, p.tolerance().relative, p.tolerance().absolute)
