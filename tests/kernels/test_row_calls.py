"""Calls of the row-wise operations: what they mean, and under which transformations."""

import dataclasses
import functools
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scheduler
import search_spaces
from scheduler import tuned_rms_norm, tuned_silu_and_mul, tuned_softmax
from search_spaces import load
from search_spaces.rows.formulas import RmsNormProblem
from search_spaces.rowwise import row_operation
from search_spaces.rowwise.problem import RowProblem

pytestmark = pytest.mark.slow_but_first

X = jax.random.normal(jax.random.key(0), (3, 6, 40), jnp.float32)
W = jax.random.normal(jax.random.key(1), (40,), jnp.float32)


def rms_norm(x, weight=W, eps=1e-6):
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def silu_and_mul(x):
    return jax.nn.silu(x[..., : x.shape[-1] // 2]) * x[..., x.shape[-1] // 2 :]


CALLS = {
    "softmax": (lambda x, **how: tuned_softmax(x, **how), jax.nn.softmax),
    "rms_norm": (lambda x, **how: tuned_rms_norm(x, W, **how), rms_norm),
    "silu_and_mul": (lambda x, **how: tuned_silu_and_mul(x, **how), silu_and_mul),
}
every = pytest.mark.parametrize("name", CALLS)


@pytest.fixture(autouse=True)
def _no_answers():
    scheduler.reload()


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=1e-6)


@every
def test_eager_and_jitted_calls_on_any_leading_axes(name):
    tuned, plain = CALLS[name]
    close(tuned(X), plain(X))
    close(tuned(X, backends="pallas"), plain(X))
    close(jax.jit(lambda x: tuned(x, backends="pallas"))(X[0, 0]), plain(X[0, 0]))


@every
def test_the_interpret_kernel_is_in_the_program_where_it_is_asked_for(name):
    tuned, _ = CALLS[name]
    text = jax.jit(lambda x: tuned(x, backends="pallas")).lower(X).as_text()
    assert "while" in text
    assert "while" not in jax.jit(tuned).lower(X).as_text()


@every
def test_vmap_makes_more_rows_of_one_call(name):
    tuned, plain = CALLS[name]
    mapped = jax.vmap(lambda x: tuned(x, backends="pallas"), in_axes=1)
    close(mapped(X), plain(jnp.moveaxis(X, 1, 0)))
    assert str(jax.make_jaxpr(mapped)(X)).count("tuned_call") == 1


def test_vmap_over_weights_norms_by_each():
    weights = jnp.stack([W, 2 * W, W + 1])
    out = jax.vmap(lambda w: tuned_rms_norm(X, w, backends="pallas"))(weights)
    close(out, rms_norm(X, weights[:, None, None, :]))
    both = jax.vmap(lambda x, w: tuned_rms_norm(x, w, backends="pallas"))(X, weights)
    close(both, rms_norm(X, weights[:, None, :]))


@every
def test_derivatives_are_those_of_the_plain_formula(name):
    tuned, plain = CALLS[name]

    def loss(call):
        return lambda x: jnp.sum(jnp.sin(call(x)))

    close(jax.jit(jax.grad(loss(lambda x: tuned(x, backends="pallas"))))(X), jax.grad(loss(plain))(X))


def test_forward_mode_agrees_with_the_plain_formula():
    for actual, expected in zip(*(jax.jvp(f, (X,), (jnp.cos(X),)) for f in CALLS["rms_norm"]), strict=True):
        close(actual, expected)


def test_the_weight_of_a_norm_has_a_gradient():
    close(
        jax.grad(lambda w: jnp.sum(jnp.sin(tuned_rms_norm(X, w))))(W),
        jax.grad(lambda w: jnp.sum(jnp.sin(rms_norm(X, w))))(W),
    )


@pytest.mark.parametrize(("name", "dtype"), [("softmax", "float16"), ("rms_norm", "bfloat16")])
def test_sixteen_bits_are_rounded_once(name, dtype):
    if name == "rms_norm":
        x, w = X.astype(dtype), W.astype(dtype)
        out, exact = tuned_rms_norm(x, w, backends="pallas"), rms_norm(x.astype(jnp.float32), w.astype(jnp.float32))
    else:
        tuned, plain = CALLS[name]
        x = X.astype(dtype)
        out, exact = tuned(x, backends="pallas"), plain(x.astype(jnp.float32))
    assert out.dtype == x.dtype
    np.testing.assert_allclose(out.astype(jnp.float32), exact, rtol=0.51 * float(jnp.finfo(dtype).eps), atol=1e-7)


def test_epsilon_is_part_of_the_call_and_not_of_the_problem():
    close(tuned_rms_norm(X, W, eps=2.0, backends="pallas"), rms_norm(X, W, 2.0))
    close(tuned_rms_norm(X, W, eps=0.5, backends="pallas"), rms_norm(X, W, 0.5))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_norm_of_narrow_rows_takes_a_float32_weight_as_it_is(dtype):
    def tuned(x, w):
        return tuned_rms_norm(x, w, backends="pallas")

    x, eps = X.astype(dtype), float(jnp.finfo(dtype).eps)
    assert "while" in jax.jit(tuned).lower(x, W).as_text(), "the interpret kernel, not only the formula"
    out, exact = tuned(x, W), rms_norm(x.astype(jnp.float32))
    assert out.dtype == x.dtype
    np.testing.assert_allclose(out.astype(jnp.float32), exact, rtol=0.51 * eps, atol=1e-7)
    mapped = jax.vmap(tuned, in_axes=(1, None))(x, W)
    np.testing.assert_array_equal(mapped, jnp.moveaxis(out, 1, 0))

    def loss(norm):
        return lambda x, w: jnp.sum(jnp.sin(norm(x, w).astype(jnp.float32)))

    gradients = jax.grad(loss(tuned), argnums=(0, 1))(x, W)
    assert [g.dtype for g in gradients] == [x.dtype, W.dtype]
    plain = jax.grad(loss(lambda x, w: rms_norm(x.astype(jnp.float32), w).astype(dtype)), argnums=(0, 1))(x, W)
    for actual, expected in zip(gradients, plain, strict=True):
        np.testing.assert_allclose(*(g.astype(jnp.float32) for g in (actual, expected)), rtol=8 * eps, atol=8 * eps)


def test_the_dtype_of_a_weight_is_a_field_of_the_problem_where_it_is_not_that_of_the_rows():
    rows = jax.ShapeDtypeStruct((18, 40), jnp.bfloat16)
    weights = {dtype: jax.ShapeDtypeStruct((40,), dtype) for dtype in ("bfloat16", "float32", "float16")}
    same, wider = (RmsNormProblem.of(rows, weights[dtype]) for dtype in ("bfloat16", "float32"))
    assert same.canonical() == '{"columns":40,"rows":18}', "the key that it had before weights had a dtype"
    assert wider.canonical() == '{"columns":40,"rows":18,"weight_dtype":"float32"}'
    assert wider == RmsNormProblem.from_canonical(wider.canonical())
    assert RmsNormProblem(18, 40, "float32", "float32") == RmsNormProblem(18, 40, "float32")
    assert wider.bytes_moved == same.bytes_moved + 40 * 2
    with pytest.raises(TypeError, match=r"float16; x is one of .* the weight of the same dtype or float32"):
        RmsNormProblem.of(rows, weights["float16"])


@pytest.mark.parametrize("axis", [0, 1, -2, (0, 2)])
def test_softmax_along_other_axes_is_jaxs(axis):
    close(tuned_softmax(X, axis), jax.nn.softmax(X, axis))
    close(tuned_softmax(X, 2, backends="pallas"), jax.nn.softmax(X))


def test_what_kernels_do_not_take_is_answered_by_the_formula():
    assert tuned_softmax(jnp.zeros((0, 4))).shape == (0, 4)
    assert tuned_silu_and_mul(jnp.zeros((3, 0))).shape == (3, 0)
    integers = tuned_softmax(np.arange(6).reshape(2, 3))
    close(integers, jax.nn.softmax(np.arange(6.0, dtype=np.float32).reshape(2, 3)))
    with jax.numpy_dtype_promotion("strict"):
        mixed = tuned_rms_norm(X, W.astype(jnp.bfloat16))
    assert mixed.dtype == jnp.float32
    close(mixed, rms_norm(X, W.astype(jnp.bfloat16).astype(jnp.float32)))


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda **how: tuned_softmax(X * 1, 0, **how), r"axis=0 is not the last one of x \(3, 6, 40\)"),
        (lambda **how: tuned_softmax(X[:0], **how), "x is empty"),
        (lambda **how: tuned_softmax(X.astype("int32"), **how), "dtype='int32' is not one of bfloat16"),
        (lambda **how: tuned_rms_norm(X, W.astype("float64"), **how), "weight.*float64"),
        (lambda **how: tuned_silu_and_mul(jnp.full((4, 4), 2.0), **how), "weakly typed"),
    ],
)
def test_who_leaves_xla_out_is_told_why_no_kernel_can_be_asked(call, why, caplog):
    with jax.enable_x64(True):
        for run in (call, lambda **how: jax.jit(lambda: call(**how))()):
            with pytest.raises(scheduler.NoCandidate, match=rf"{why}.*only xla can run"):
                run(backends="pallas", on_miss="error")
            with pytest.raises(scheduler.IllegalSchedule, match=why):
                run(schedule={"rows": 4})
            caplog.clear()
            with caplog.at_level(logging.DEBUG, "scheduler"):
                run(on_miss="error")
            assert re.search(f"xla is used, and no kernel is selected: .*{why}", caplog.text)


def test_a_scalar_has_no_rows():
    with pytest.raises(ValueError, match="axis"):
        tuned_softmax(jnp.float32(1))


def test_wrong_operands_raise_one_sentence():
    with pytest.raises(ValueError, match=r"weight has shape \(39,\)"):
        tuned_rms_norm(X, W[:-1])
    with pytest.raises(ValueError, match="two halves"):
        tuned_silu_and_mul(X[..., :-1])
    with pytest.raises(scheduler.CacheMiss, match=r"tile-scheduler tune softmax .*rows=18"):
        tuned_softmax(X, on_miss="error")


@pytest.mark.parametrize("name", ["rms_norm"])
def test_a_search_finds_and_a_call_serves_a_schedule(name):
    tuned, plain = CALLS[name]
    operation = load(name)
    record = scheduler.tune(operation, operation.problem(rows=18, columns=40, dtype="float32"), budget=3)
    assert record.tried >= 2
    close(tuned(X, on_miss="error", backends="pallas"), plain(X))
    close(tuned(X, schedule={"rows": 4}), plain(X))


@pytest.mark.parametrize("name", ["rms_norm"])
def test_inside_shard_map(name):
    tuned, plain = CALLS[name]
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("rows")
    close(jax.shard_map(lambda x: tuned(x, backends="pallas"), mesh=mesh, in_specs=spec, out_specs=spec)(X), plain(X))


@dataclasses.dataclass(frozen=True)
class CentredProblem(RowProblem):
    """Rows minus their mean, times a factor."""

    flops = 3.0

    @staticmethod
    def compute(x, *, factor=1.0, **params):
        return factor * (x - jnp.mean(x, axis=-1, keepdims=True))


CENTRED = row_operation("centred", CentredProblem, params=("factor",))


def test_a_new_row_operation_is_a_formula_and_one_line_of_registration(monkeypatch):
    monkeypatch.setitem(search_spaces._OWN, "centred", f"{__name__}:CENTRED")
    x = jax.random.normal(jax.random.key(0), (2, 3, 64))
    centred = functools.partial(scheduler.tuned("centred"), factor=2.0, backends="interpret")
    expected = 2 * (x - jnp.mean(x, axis=-1, keepdims=True))
    assert "while" in jax.jit(centred).lower(x).as_text(), "the interpreted kernel"
    close(centred(x), expected)
    close(jax.vmap(centred, in_axes=1, out_axes=1)(x), expected)
    with pytest.raises(TypeError, match="did you mean 'factor'"):
        centred(x, factr=1.0)
