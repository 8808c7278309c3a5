"""Calls of the operations on rows: what they mean, under which transformations, and what their gradients save."""

import functools
import json
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import scheduler
from scheduler import (
    tuned_cross_entropy,
    tuned_gated_matmul,
    tuned_layer_norm,
    tuned_log_softmax,
    tuned_quantize_rows,
    tuned_rms_norm,
    tuned_silu_and_mul,
    tuned_softmax,
)
from scheduler.cli.app import app
from scheduler.core.hardware import find
from scheduler.model.cost import CostModel
from scheduler.model.pruning import prune
from scheduler.prediction.predict import predict
from scheduler.store.store import shipped
from search_spaces import load, value_of
from search_spaces.rows.formulas import (
    ADD_RMS_NORM,
    SILU_AND_MUL_BACKWARD,
    AddRmsNormProblem,
    RmsNormProblem,
    SiluAndMulBackwardProblem,
    SiluAndMulJvpProblem,
)

pytestmark = pytest.mark.slow_but_first

X, R = (jax.random.normal(jax.random.key(seed), (3, 6, 40), jnp.float32) for seed in (0, 2))
W, B = (jax.random.normal(jax.random.key(seed), (40,), jnp.float32) for seed in (1, 3))
LABELS = jax.random.randint(jax.random.key(4), (3, 6), 0, 40)


def rms_norm(x, weight=W, eps=1e-6):
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def add_rms_norm(x, residual, weight, eps=1e-6):
    """As users write it."""
    total = x + residual
    return rms_norm(total.astype(jnp.float32), weight.astype(jnp.float32), eps).astype(x.dtype), total


def layer_norm(x, weight, bias, eps=1e-6):
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return rms_norm(centred, weight, eps) + bias


def cross_entropy(x, labels=LABELS):
    return jax.nn.logsumexp(x, axis=-1) - jnp.take_along_axis(x, labels[..., None], axis=-1)[..., 0]


def silu_and_mul(x):
    return jax.nn.silu(x[..., : x.shape[-1] // 2]) * x[..., x.shape[-1] // 2 :]


def fused_norm(x, residual, weight, **how):
    return tuned_rms_norm(x, weight, residual=residual, **how)


fused = functools.partial(fused_norm, backends="pallas")
# A call, the plain formula, and operands: rows, then vectors.
CALLS = {
    "softmax": (tuned_softmax, jax.nn.softmax, (X,)),
    "softmax_with_lse": (
        functools.partial(tuned_softmax, return_lse=True),
        lambda x: (jax.nn.softmax(x), jax.nn.logsumexp(x, axis=-1)),
        (X,),
    ),
    "log_softmax": (tuned_log_softmax, jax.nn.log_softmax, (X,)),
    "cross_entropy": (
        lambda x, **how: tuned_cross_entropy(x, jnp.broadcast_to(LABELS[..., : x.shape[-2]], x.shape[:-1]), **how),
        lambda x: cross_entropy(x, jnp.broadcast_to(LABELS[..., : x.shape[-2]], x.shape[:-1])),
        (X,),
    ),
    "rms_norm": (tuned_rms_norm, rms_norm, (X, W)),
    "add_rms_norm": (fused_norm, add_rms_norm, (X, R, W)),
    "layer_norm": (tuned_layer_norm, layer_norm, (X, W, B)),
    "silu_and_mul": (tuned_silu_and_mul, silu_and_mul, (X,)),
}
every = pytest.mark.parametrize("name", CALLS)
some = pytest.mark.parametrize("name", ["add_rms_norm", "cross_entropy", "silu_and_mul"])


@pytest.fixture(autouse=True)
def _no_answers(_own_cache):
    scheduler.reload()


def close(actual, expected, rtol=2e-5, atol=2e-6):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=rtol, atol=atol),
        actual,
        expected,
    )


def pallas(name):
    return functools.partial(CALLS[name][0], backends="pallas")


def loss(call):
    """Depends on all results."""

    def of(*args):
        return sum(jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in jax.tree.leaves(call(*args)))

    return of


@every
def test_eager_and_jitted_calls_on_any_leading_axes(name):
    tuned, plain, args = CALLS[name]
    close(tuned(*args), plain(*args))
    close(scheduler.tuned(name)(*args, *((LABELS,) if name == "cross_entropy" else ())), plain(*args))
    for call in (pallas(name), jax.jit(pallas(name))):
        close(call(*args), plain(*args))
    if name != "cross_entropy":
        one = [x[0, 0] if x.ndim > 1 else x for x in args]
        close(pallas(name)(*one), plain(*one))


@every
def test_the_interpreted_kernel_is_in_the_program_only_if_a_call_asks_for_it(name):
    tuned, _, args = CALLS[name]
    assert "while" in jax.jit(pallas(name)).lower(*args).as_text()
    assert "while" not in jax.jit(tuned).lower(*args).as_text()


@every
def test_vmap_makes_more_rows_of_one_call(name):
    _, plain, args = CALLS[name]
    axes = [1 if x.ndim > 1 else None for x in args]
    if name == "cross_entropy":
        mapped, right = (
            jax.vmap(f, (1, 1)) for f in (lambda x, i: tuned_cross_entropy(x, i, backends="pallas"), cross_entropy)
        )
        args = (X, LABELS)
    else:
        mapped, right = jax.vmap(pallas(name), axes), jax.vmap(plain, axes)
    close(mapped(*args), right(*args))
    assert str(jax.make_jaxpr(mapped)(*args)).count("tuned_call") == 1


def test_vmap_over_weights_norms_by_each():
    weights = jnp.stack([W, 2 * W, W + 1])
    for axes in ((None, None, 0), (0, 0, 0)):
        close(jax.vmap(fused, axes)(X, R, weights), jax.vmap(add_rms_norm, axes)(X, R, weights))


@every
def test_derivatives_of_every_mode_are_those_of_the_plain_formula_and_tuned_calls(name):
    _, plain, args = CALLS[name]
    where = tuple(range(len(args)))

    def modes(call):
        return {
            "all": jax.grad(loss(call), where)(*args),
            "last": jax.grad(loss(call), where[-1])(*args),
            "jvp": jax.jvp(call, args, tuple(map(jnp.cos, args))),
            "vmap": jax.vmap(jax.grad(loss(call)), [0 if x.ndim > 1 else None for x in args])(*args)
            if name != "cross_entropy"
            else 0.0 * X,
            "remat": jax.grad(jax.checkpoint(loss(call)), where)(*args),
            "scan": jax.grad(
                lambda x: jax.lax.scan(lambda s, _: (s + loss(call)(s * x, *args[1:]), None), 1.0, None, 2)[0]
            )(X),
        }

    close(jax.jit(modes, static_argnums=0)(pallas(name)), jax.jit(modes, static_argnums=0)(plain), 5e-4, 1e-4)
    gradient = jax.jit(jax.grad(loss(functools.partial(CALLS[name][0], backends="interpret")), where))
    assert gradient.lower(*args).as_text().count("while") >= 2, "the kernels of both passes"


@some
@pytest.mark.slow
def test_a_hessian_agrees_with_the_plain_formula(name):
    _, plain, args = CALLS[name]
    args = [x[0, :2, :6] if x.ndim > 1 else x[:6] for x in args]
    labels = jnp.array([2, 5])
    ours, right = (
        (lambda x: tuned_cross_entropy(x, labels, backends="pallas"), lambda x: cross_entropy(x, labels))
        if name == "cross_entropy"
        else (pallas(name), plain)
    )
    for outer, inner in ((jax.jacfwd, jax.jacrev), (jax.jacrev, jax.jacfwd)):
        close(outer(inner(loss(ours)))(*args), outer(inner(loss(right)))(*args), 2e-4, 1e-4)


@every
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_are_rounded_once_and_have_gradients_of_their_dtype(name, dtype):
    _, plain, args = CALLS[name]
    narrow, eps = [x.astype(dtype) for x in args], float(jnp.finfo(dtype).eps)
    if name == "add_rms_norm":  # the sum is rounded before it is normalized
        np.testing.assert_array_equal(fused(*narrow)[1], narrow[0] + narrow[1])
        exact = add_rms_norm((narrow[0] + narrow[1]).astype(jnp.float32), jnp.zeros_like(R), narrow[2])
    else:
        exact = plain(*(x.astype(jnp.float32) for x in narrow))
    close(pallas(name)(*narrow), exact, 0.51 * eps + 2.0**-18, 1e-6)
    found, right = (jax.grad(loss(call), tuple(range(len(args))))(*narrow) for call in (pallas(name), plain))
    assert [x.dtype for x in found] == [x.dtype for x in narrow]
    close(found, right, 8 * eps, 16 * eps)


def test_epsilon_is_part_of_the_call_and_of_its_gradient_and_not_of_the_problem():
    for eps in (0.5, 2.0):
        ours, right = functools.partial(fused, eps=eps), functools.partial(add_rms_norm, eps=eps)
        close(ours(X, R, W), right(X, R, W))
        close(jax.grad(loss(ours))(X, R, W), jax.grad(loss(right))(X, R, W), 2e-4)
        close(tuned_layer_norm(X, W, B, eps=eps, backends="pallas"), layer_norm(X, W, B, eps))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_norm_of_narrow_rows_takes_a_float32_weight_as_it_is(dtype):
    tuned = functools.partial(tuned_rms_norm, backends="pallas")
    x, eps = X.astype(dtype), float(jnp.finfo(dtype).eps)
    assert "while" in jax.jit(tuned).lower(x, W).as_text(), "the interpreted kernel, not only the formula"
    out = tuned(x, W)
    assert out.dtype == x.dtype
    close(out, rms_norm(x.astype(jnp.float32)), 0.51 * eps, 1e-7)
    gradients = jax.grad(loss(tuned), argnums=(0, 1))(x, W)
    assert [g.dtype for g in gradients] == [x.dtype, W.dtype]
    plain = lambda x, w: rms_norm(x.astype(jnp.float32), w).astype(dtype)  # noqa: E731
    close(gradients, jax.grad(loss(plain), argnums=(0, 1))(x, W), 8 * eps, 8 * eps)


def test_the_dtype_of_a_weight_is_a_field_of_the_problem_if_it_is_not_that_of_the_rows():
    rows = jax.ShapeDtypeStruct((18, 40), jnp.bfloat16)
    weights = {dtype: jax.ShapeDtypeStruct((40,), dtype) for dtype in ("bfloat16", "float32", "float16")}
    same, wider = (RmsNormProblem.of(rows, weights[dtype]) for dtype in ("bfloat16", "float32"))
    assert same.canonical() == '{"columns":40,"rows":18}', "the key that it had before weights had a dtype"
    assert wider.canonical() == '{"columns":40,"rows":18,"weight_dtype":"float32"}'
    assert wider == RmsNormProblem.from_canonical(wider.canonical())
    assert RmsNormProblem(18, 40, "float32", "float32") == RmsNormProblem(18, 40, "float32")
    assert wider.bytes_moved == same.bytes_moved + 40 * 2
    with pytest.raises(ValueError, match=r"'float16' is neither bfloat16, as x is, nor float32"):
        RmsNormProblem.of(rows, weights["float16"])


@pytest.mark.parametrize("axis", [0, 1, -2, (0, 2)])
def test_softmax_along_other_axes_and_its_gradient_are_jaxs(axis):
    def with_lse(x):
        return jax.nn.softmax(x, axis), jax.nn.logsumexp(x, axis)

    for ours, plain in (
        (lambda x: tuned_softmax(x, axis), lambda x: jax.nn.softmax(x, axis)),
        (lambda x: tuned_log_softmax(x, axis), lambda x: jax.nn.log_softmax(x, axis)),
        (lambda x: tuned_softmax(x, axis, return_lse=True), with_lse),
        (lambda x: tuned_softmax(x, axis, return_lse=True)[1], lambda x: jax.nn.logsumexp(x, axis)),
    ):
        close(ours(X), plain(X))
        mine, right = (
            jax.grad(lambda x, f=f: sum(jnp.sum(y**3) for y in jax.tree.leaves(f(x))))(X) for f in (ours, plain)
        )
        close(mine, right, rtol=1e-3, atol=1e-4)


def posed(function, *args):
    return [(row.operation.name, row.problem) for row in scheduler.problems(function, *args).tuned]


def test_rows_along_another_axis_are_a_problem_of_their_own_unless_trailing_axes_have_one_element():
    ((name, problem),) = posed(lambda x: tuned_softmax(x, 0), X)
    assert (name, problem.samples, problem.columns_of_program, problem.inner) == ("rows_along", 1, 3, 240)
    ((name, problem),) = posed(jax.vmap(lambda x: tuned_softmax(x, 0)), X)
    assert (name, problem.samples, problem.columns_of_program, problem.inner) == ("rows_along", 3, 6, 40)
    assert {name for name, _ in posed(jax.grad(lambda x: tuned_log_softmax(x, 1)[0, 0, 0]), X)} == {"rows_along"}
    trailing = X[..., None]
    ((name, problem),) = posed(lambda x: tuned_softmax(x, 2, return_lse=True), trailing)
    assert (name, problem.rows, problem.columns) == ("softmax_with_lse", 18, 40)
    shapes = [x.shape for x in tuned_softmax(trailing, 2, return_lse=True)]
    assert shapes == [(3, 6, 40, 1), (3, 6, 1)]


def test_a_function_of_rows_along_an_axis_and_its_derivatives():
    @scheduler.rows(axis=1, scalars=("scale",))
    def ours(x, weight, bias, y, scale, *, eps=1e-6):
        centred = x - jnp.mean(x)
        norm = centred * jax.lax.rsqrt(jnp.mean(centred * centred) + eps)
        return norm * weight + bias + y * scale, jnp.max(x)

    def plain(x, weight, bias, y, scale):
        norm = jnp.moveaxis(layer_norm(jnp.moveaxis(x, 1, -1), weight, bias), -1, 1)
        return norm + y * jnp.expand_dims(scale, 1), jnp.max(x, axis=1)

    x = jnp.reshape(X, (3, 6, 8, 5))
    args = (x, W[:6], B[:6], jnp.cos(x), x[:, 2])

    def loss(f):
        return lambda *args: sum(jnp.sum(jnp.sin(y)) for y in f(*args))

    def hessian(f):
        return jax.hessian(
            lambda x: loss(f)(x, *(a[:1, :, :1] if a.ndim == 4 else a for a in args[1:4]), args[4][:1, :1])
        )

    for change in (lambda f: f, jax.jit, lambda f: jax.grad(loss(f), range(5)), lambda f: lambda *a: jax.jvp(f, a, a)):
        jax.tree.map(lambda a, b: close(a, b, rtol=1e-3, atol=1e-4), change(ours)(*args), change(plain)(*args))
    close(hessian(ours)(x[:1, :, :1]), hessian(plain)(x[:1, :, :1]), rtol=1e-3, atol=1e-3)
    many = [jnp.stack([a, 2 * a]) if a.ndim > 1 else a for a in args]
    batched = (jax.vmap(f, (0, None, None, 0, 0))(*many) for f in (ours, plain))
    jax.tree.map(lambda a, b: close(a, b, rtol=1e-3, atol=1e-4), *batched)
    assert ours.problem(*args).inner == 40
    assert ours.tune(*args, budget=1).key.operation == "rows_along"
    with pytest.raises(ValueError, match=r"axes \(3,\) and \(8, 5\) around the rows"):
        ours(*args[:3], x[:, :, :4], args[4])
    with pytest.raises(ValueError, match="axis=1 is none of"):
        ours(W, *args[1:])


def test_segments_of_rows_along_an_axis_and_functions_that_no_kernel_computes():
    @scheduler.rows(axis=0)
    def scaled(x):
        blocks = x.reshape(3, 32)
        most = jnp.max(jnp.abs(blocks), axis=1)
        return (blocks / most[:, None]).reshape(x.shape), most

    @scheduler.rows(axis=0)
    def ordered(x):
        return jnp.sort(x), x.reshape(3, 32).sum(1)

    @scheduler.rows(axis=1)
    def last(x):
        return jax.nn.softmax(x)

    x = jax.random.normal(jax.random.key(0), (96, 4, 5))
    blocks = x.reshape(3, 32, 4, 5)
    most = jnp.max(jnp.abs(blocks), axis=1)
    found, scale = scaled(x)
    close(found, (blocks / most[:, None]).reshape(x.shape))
    close(scale, most)
    assert (scaled.problem(x).samples, scaled.problem(x).inner) == (3, 20)
    found, total = ordered(x)
    close(found, jnp.sort(x, axis=0))
    close(total, blocks.sum(1), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="ordered"):
        ordered.problem(x)
    assert [name for name, _ in posed(last, x[..., 0])] == ["rows"]
    assert last.tune(x[..., 0], budget=1).key.operation == "rows"
    close(tuned_softmax(X, 2, backends="pallas"), jax.nn.softmax(X))


def test_labels_are_integers_of_any_dtype():
    for dtype in ("int8", "uint8", "int16", "uint32"):
        close(tuned_cross_entropy(X, LABELS.astype(dtype), backends="pallas"), cross_entropy(X))
    with jax.enable_x64(True):
        far = jnp.array([2**32 + 1, 1, -1])
        found = tuned_cross_entropy(X[0, :3], far, backends="pallas")
        assert found.dtype == jnp.float32
        np.testing.assert_array_equal(jnp.isnan(found), [True, False, True])
    text = str(jax.make_jaxpr(jax.grad(lambda x: tuned_cross_entropy(x, LABELS).sum()))(X.astype(jnp.bfloat16)))
    assert "bf16[3,6,40]" in text
    assert not re.search(r"f32\[(3,6|18),40\]", text), "no float32 copy of the logits or of their gradient"


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_rows_and_blocks_of_rows_are_quantized(dtype):
    x = jax.random.normal(jax.random.key(0), (3, 256), jnp.bfloat16).at[1, :128].set(0)
    largest = jnp.iinfo(dtype).max if dtype == "int8" else float(jnp.finfo(dtype).max)
    for block, scales in ((None, (3,)), (128, (3, 2)), (64, (3, 4))):
        q, scale = tuned_quantize_rows(x, dtype, block=block, backends="pallas")
        assert (q.shape, q.dtype, scale.shape, scale.dtype) == (x.shape, dtype, scales, jnp.float32)
        blocks = x.astype(jnp.float32).reshape(*scales, -1)
        most = jnp.max(jnp.abs(blocks), axis=-1)
        np.testing.assert_allclose(scale, jnp.where(most > 0, most / largest, 1), rtol=1e-6)
        restored = q.astype(jnp.float32).reshape(blocks.shape) * scale[..., None]
        step = 0.5 / largest if dtype == "int8" else float(jnp.finfo(dtype).eps)
        assert jnp.max(jnp.abs(restored - blocks) / jnp.maximum(most, 1e-9)[..., None]) <= 1.01 * step
    close(jax.vmap(lambda x: tuned_quantize_rows(x, dtype, block=64)[1])(x[:, None]), scale[:, None])


def test_a_backward_pass_saves_few_bytes():
    def saved(call, *args):
        return jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(call, *args)[1], *args))

    x, r, w = (a.astype(jnp.bfloat16) for a in (X, R, W))
    for call, args in ((fused, (x, r, w)), (pallas("softmax"), (x,)), (pallas("cross_entropy"), (x,))):
        rows = [leaf for leaf in saved(call, *args) if leaf.size >= x.size]
        assert [leaf.dtype for leaf in rows] == [x.dtype], call
    ours, theirs = (
        sum(leaf.size * leaf.dtype.itemsize for leaf in saved(call, x, r, w)) for call in (fused, add_rms_norm)
    )
    assert ours < theirs


def test_problems_of_a_gradient_are_listed():
    def posed(fn, *args):
        return {f"{row.operation.name} {row.problem}" for row in scheduler.problems(jax.grad(fn), *args).tuned}

    x, w = jnp.zeros((8, 16), jnp.bfloat16), jnp.zeros((16, 24), jnp.bfloat16)
    forward, backward = (f"silu_and_mul{end} rows=8 columns=12 dtype=bfloat16" for end in ("", "_backward"))
    assert posed(lambda x: jnp.sum(tuned_silu_and_mul(x)), jnp.zeros((8, 24), jnp.bfloat16)) == {backward}
    gated = posed(lambda x: jnp.sum(tuned_gated_matmul(x, w) ** 2), x)
    assert {forward, backward, "matmul m=8 n=24 k=16 dtype=bfloat16"} <= gated
    plain = str(jax.make_jaxpr(lambda x: tuned_rms_norm(x, W))(X))
    assert "operation=rms_norm" in plain
    assert "add_rms_norm" not in plain


def test_what_kernels_do_not_take_is_answered_by_the_formula():
    assert tuned_softmax(jnp.zeros((0, 4))).shape == (0, 4)
    assert tuned_silu_and_mul(jnp.zeros((3, 0))).shape == (3, 0)
    assert [out.shape for out in fused_norm(X[:0], R[:0], W)] == [(0, 6, 40)] * 2
    close(tuned_softmax(np.arange(6).reshape(2, 3)), jax.nn.softmax(np.arange(6.0, dtype=np.float32).reshape(2, 3)))
    with jax.numpy_dtype_promotion("strict"):
        mixed = tuned_rms_norm(X, W.astype(jnp.bfloat16))
    assert mixed.dtype == jnp.float32
    close(mixed, rms_norm(X, W.astype(jnp.bfloat16).astype(jnp.float32)))
    x = X.astype(jnp.bfloat16)
    normed, total = fused_norm(x, R, W)  # the sum is rounded once, to the dtype of x
    assert (normed.dtype, total.dtype) == (jnp.bfloat16, jnp.bfloat16)
    np.testing.assert_array_equal(total, (x.astype(jnp.float32) + R).astype(jnp.bfloat16))
    with jax.enable_x64(True):
        wide = fused_norm(*(a.astype("float64") for a in (X, R, W)))
        assert [out.dtype for out in wide] == [jnp.float64] * 2


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda **how: tuned_softmax(X * 1, (0, 1), **how), r"axis=\(0, 1\) is not the last one of x \(3, 6, 40\)"),
        (lambda **how: tuned_softmax(X[:0], **how), "x is empty"),
        (lambda **how: tuned_softmax(X.astype("int32"), **how), "dtype='int32' is not one of bfloat16"),
        (lambda **how: tuned_rms_norm(X, W.astype("float64"), **how), "weight.*float64"),
        (lambda **how: fused_norm(X.astype("bfloat16"), R, W, **how), "residual is float32, and x is bfloat16"),
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


def test_wrong_operands_raise_one_sentence():
    half = jnp.zeros((4, 16))
    for call, error, said in (
        (lambda: tuned_softmax(jnp.float32(1)), ValueError, "axis"),
        (lambda: tuned_rms_norm(X, W[:-1]), ValueError, r"weight has shape \(39,\)"),
        (lambda: tuned_layer_norm(X, W, B[:-1]), ValueError, r"bias has shape \(39,\)"),
        (lambda: fused_norm(X, R[0], W), ValueError, r"residual has shape \(6, 40\); x \(3, 6, 40\) needs one of"),
        (lambda: AddRmsNormProblem.of(X[0], R[1, :2], W), ValueError, r"residual has shape \(2, 40\); x \(6, 40\)"),
        (lambda: tuned_silu_and_mul(X[..., :-1]), ValueError, "two halves"),
        (lambda: SiluAndMulBackwardProblem.of(half, half), ValueError, r"float32\[4, 16\] are no operands of Silu"),
        (lambda: SiluAndMulJvpProblem.of(half, half[:, :8]), ValueError, "are no operands of SiluAndMulJvp"),
        (lambda: tuned_cross_entropy(X, LABELS[0]), ValueError, r"labels have shape \(6,\); logits \(3, 6, 40\)"),
        (lambda: tuned_cross_entropy(X, X[..., 0]), TypeError, "labels are float32; integers are needed"),
        (
            lambda: tuned_quantize_rows(X, block=16),
            ValueError,
            r"block=16 does not divide the last axis of x \(3, 6, 40\)",
        ),
        (lambda: tuned_quantize_rows(X, "int16"), ValueError, "dtype='int16' is not one of float8_e4m3fn"),
        (lambda: tuned_quantize_rows(LABELS), TypeError, "x holds int32; real numbers of 16 bits or more"),
        (lambda: tuned_softmax(X, on_miss="error"), scheduler.CacheMiss, r"tile-scheduler tune softmax .*rows=18"),
    ):
        with pytest.raises(error, match=said):
            call()


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm"])
def test_a_search_finds_and_a_call_serves_a_schedule(name):
    tuned, plain, args = CALLS[name]
    record = scheduler.tune(name, {"rows": 18, "columns": 40, "dtype": "float32"}, budget=3)
    assert record.tried >= 2
    close(tuned(*args, on_miss="error", backends="pallas"), plain(*args))
    close(tuned(*args, schedule={"rows": 4}), plain(*args))
    assert load("add_rms_norm") is ADD_RMS_NORM


@some
def test_inside_shard_map(name):
    _, plain, args = CALLS[name]
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("rows")
    specs = tuple(rows if x.ndim > 1 else jax.sharding.PartitionSpec() for x in args)
    close(jax.shard_map(pallas(name), mesh=mesh, in_specs=specs, out_specs=rows)(*args), plain(*args))


def test_every_kernel_on_a_cpu_computes_the_gradient_of_silu_and_mul():
    problem, target = SiluAndMulBackwardProblem(24, 40), find("NVIDIA H200").target
    x, d_out = problem.inputs(seed=0)
    right = jax.vjp(silu_and_mul, x.astype(jnp.float32))[1](d_out.astype(jnp.float32))[0]
    for kernel in map(SILU_AND_MUL_BACKWARD.kernel, ("interpret", "xla")):
        space = kernel.space(problem, target)
        for schedule in space.schedules(space.legal()[0]):
            close(kernel.run(problem, schedule, target, x, d_out), right, 2**-7, 2**-13)


def test_a_problem_counts_each_array_once_and_takes_some_of_its_rows():
    problem = AddRmsNormProblem(24, 33, weight_dtype="float32")
    assert problem.canonical() == '{"columns":33,"rows":24,"weight_dtype":"float32"}'
    assert problem.bytes_moved == 4 * 24 * 33 * 2 + 33 * 4
    rows = np.array([0, 3, 23], np.int32)
    below, take = problem.at_rows(rows)
    inputs = problem.inputs(0)
    part = take(inputs)
    assert [(x.shape, x.dtype) for x in part] == [(x.shape, x.dtype) for x in below.operands()]
    close(below.reference(*part), tuple(x[rows] for x in problem.reference(*inputs)), 1e-6, 1e-6)


def test_the_time_of_xla_alone_says_little_of_a_function_in_which_xla_splits_the_gradient():
    h200 = find("NVIDIA H200")
    records = shipped().records(operation=SILU_AND_MUL_BACKWARD.name, hardware=h200.id)
    record = min(records, key=lambda one: one.winner.measurement.median_s)
    assert record.best(frozenset({"xla"})).measurement.median_s < 140e-6
    for rows in (2048, 4000, 8192):
        problem = SiluAndMulBackwardProblem(rows, 14336, "bfloat16")
        answer = predict(SILU_AND_MUL_BACKWARD, problem, h200, records=[record])
        assert answer.backend == "mosaic_gpu", answer.reason
    assert problem.library_bytes_moved > 1.5 * problem.bytes_moved
    (alone,) = prune(SILU_AND_MUL_BACKWARD.library, problem, h200, CostModel(h200)).candidates()
    assert alone.floor_s == 0.0, "what XLA moves keeps it out of no search"


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -10, 10),))


@pytest.mark.parametrize(
    ("function", "twice"),
    [
        (lambda x: jax.nn.logsumexp(x), True),
        (lambda x: jax.nn.relu(x) * jnp.max(x) + jax.nn.relu6(8 * x), True),
        (lambda x: x + jax.lax.stop_gradient(jnp.round(x) - x), False),
        (lambda x: x * jax.lax.stop_gradient(x), False),
        (lambda x: jnp.tanh(x) + clipped(x), False),
    ],
    ids=["logsumexp", "relu", "straight through", "held", "differs for large cotangents only"],
)
def test_rules_of_a_function_hold_for_its_gradient_and_a_second_one_that_ignores_them_raises(function, twice):
    x, tuned, plain = jax.random.normal(jax.random.key(0), (5, 64)), scheduler.rows(function), jax.vmap(function)
    x = jnp.where(x > -0.5, x, 0)  # of equal arguments JAX halves the derivative of a maximum, but not that of relu

    def gradient(f):
        return jax.grad(lambda x: jnp.sum(jnp.sin(f(x))))

    def second(f):
        return jax.grad(lambda x: jnp.sum(jnp.cos(gradient(f)(x))))(x)

    np.testing.assert_allclose(gradient(tuned)(x), gradient(plain)(x), rtol=1e-5, atol=1e-6)
    if twice:
        np.testing.assert_allclose(second(tuned), second(plain), rtol=1e-4, atol=1e-5)
        return
    with pytest.raises(NotImplementedError, match="rules of its own"):
        second(tuned)


@pytest.mark.parametrize(
    ("operation", "columns", "passes"),
    [
        ("rms_norm", 16384, 0),
        ("rms_norm", 24577, 1),
        ("softmax", 16384, 0),
        ("softmax", 32000, 2),
        ("softmax_with_lse", 64, 2),  # two results
        ("rms_norm_backward", 4096, 2),  # x and the cotangent, both in two stages
        ("log_softmax_backward", 4096, 1),  # the cotangent alone
        ("silu_and_mul", 65536, 0),
    ],
)
def test_xla_reads_rows_again_for_each_stage_unless_they_are_short_and_alone(operation, columns, passes):
    p = load(operation).problem(512, columns, "bfloat16")
    assert p.library_bytes_read_again == passes * 512 * columns * 2


def test_the_model_knows_what_xla_takes_for_row_operations_of_which_it_has_no_constants():
    # Times of XLA on an H100, in us (benchmarks/results/rows-nvidia-h100-80gb-hbm3.json).
    model = CostModel(find("NVIDIA H100 80GB HBM3"))
    measured = {
        ("rms_norm_backward", 16384, 4096): 228,
        ("softmax_backward", 16384, 8192): 433,
        ("log_softmax", 4096, 128256): 1431,
        ("softmax_with_lse", 16384, 8192): 363,
        ("layer_norm", 16384, 4096): 97,
        ("quantize_rows", 16384, 8192): 256,
    }
    for (operation, rows, columns), us in measured.items():
        predicted_s = model.library_seconds(load(operation).problem(rows, columns, "bfloat16"))
        assert 0.85 < us * 1e-6 / predicted_s < 1.15, operation


ROWS_FILE = """
import jax.numpy as jnp
import scheduler

@scheduler.rows
def scaled(x, weight, *, power=2):
    return x * weight / jnp.sum(x**power)
"""


def test_a_row_function_is_tuned_and_shown_on_the_command_line_by_its_name_and_arrays(tmp_path):
    file = tmp_path / "own_rows.py"
    file.write_text(ROWS_FILE)
    words = [f"{file}:scaled", "x=float32[8,16]", "weight=float32[16]", "power=4"]
    tuned = json.loads(CliRunner().invoke(app, ["tune", *words, "--budget", "2", "--json"]).stdout)
    function = value_of(words[0])
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 16), (16,))]
    assert tuned["record"]["problem"]["text"] == function.problem(*arrays, power=4).text
    shown = json.loads(CliRunner().invoke(app, ["show", *words, "--json"]).stdout)
    assert [one["problem"] for one in shown] == [tuned["record"]["problem"]]
    for wrong, complaint in (
        ("x=float32[16]", "missing a required argument: 'weight'"),
        ("x=flot32[8,16]", "no dtype"),
    ):
        ended = CliRunner().invoke(app, ["tune", words[0], wrong])
        assert (ended.exit_code, complaint in " ".join(ended.output.split())) == (2, True), ended.output
