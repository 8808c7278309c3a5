"""An RMS norm with a residual: two results, what they mean, under which transformations, and what a gradient keeps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scheduler
from scheduler import tuned, tuned_rms_norm
from search_spaces import load
from search_spaces.rows.formulas import ADD_RMS_NORM, AddRmsNormProblem

pytestmark = pytest.mark.slow_but_first

X = jax.random.normal(jax.random.key(0), (3, 6, 40), jnp.float32)
R = jax.random.normal(jax.random.key(1), (3, 6, 40), jnp.float32)
W = jax.random.normal(jax.random.key(2), (40,), jnp.float32)


def ours(x=X, residual=R, weight=W, **how):
    return tuned_rms_norm(x, weight, residual=residual, **how)


pallas = functools.partial(ours, backends="pallas")


def plain(x=X, residual=R, weight=W, eps=1e-6):
    """As users write it."""
    total = x + residual
    wide = total.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps) * weight.astype(jnp.float32)
    return normed.astype(x.dtype), total


@pytest.fixture(autouse=True)
def _no_answers(_own_cache):
    scheduler.reload()


def close(actual, expected, rtol=2e-5, atol=2e-6):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=rtol, atol=atol),
        actual,
        expected,
    )
    assert jax.tree.structure(actual) == jax.tree.structure(expected)


def loss(call):
    """Depends on both results."""

    def of(*args):
        normed, total = call(*args)
        return jnp.sum(jnp.sin(normed.astype(jnp.float32))) + jnp.sum(jnp.cos(total.astype(jnp.float32)))

    return of


@pytest.mark.parametrize("call", [ours, pallas, tuned("add_rms_norm"), functools.partial(ours, backends="xla")])
def test_the_normed_sum_and_the_sum_come_back_with_their_leading_axes(call):
    close(call(X, R, W), plain())
    close(jax.jit(call)(X[0], R[0], W), plain(X[0], R[0]))
    close(call(X[0, 0], R[0, 0], W), plain(X[0, 0], R[0, 0]))


def test_without_a_residual_it_is_the_operation_that_it_was():
    assert tuned_rms_norm(X, W).shape == X.shape
    assert tuned_rms_norm.operation.name == "rms_norm"
    text = str(jax.make_jaxpr(lambda x: tuned_rms_norm(x, W))(X))
    assert "operation=rms_norm" in text
    assert "add_rms_norm" not in text


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("wide", [False, True], ids=["", "a float32 weight"])
def test_the_sum_is_that_of_the_dtype_of_x_to_the_bit_and_the_norm_is_that_of_the_rounded_sum(dtype, wide):
    x, r, w = X.astype(dtype), R.astype(dtype), W if wide else W.astype(dtype)
    normed, total = pallas(x, r, w)
    assert (normed.dtype, total.dtype) == (x.dtype, x.dtype)
    np.testing.assert_array_equal(total, x + r)
    exact, _ = plain(total.astype(jnp.float32), jnp.zeros_like(R), w)
    tolerance, _ = AddRmsNormProblem(18, 40, dtype).tolerance()
    np.testing.assert_allclose(normed.astype(jnp.float32), exact, rtol=tolerance.relative, atol=tolerance.absolute)


def test_epsilon_is_part_of_the_call_and_of_its_gradient():
    for eps in (0.5, 2.0):
        close(pallas(eps=eps), plain(eps=eps))
        close(jax.grad(loss(functools.partial(ours, eps=eps)))(X), jax.grad(loss(functools.partial(plain, eps=eps)))(X))


@pytest.mark.parametrize("batched", [(1, 1), (1, None), (None, 1)])
def test_vmap_makes_more_rows_of_one_call(batched):
    args = [jnp.moveaxis(x, 0, 1) if dim is not None else x[0] for x, dim in zip((X, R), batched, strict=True)]
    mapped = jax.vmap(pallas, in_axes=(*batched, None))
    close(mapped(*args, W), jax.vmap(plain, in_axes=(*batched, None))(*args, W))
    assert str(jax.make_jaxpr(mapped)(*args, W)).count("tuned_call") == 1


def test_vmap_over_weights_norms_by_each():
    weights = jnp.stack([W, 2 * W, W + 1])
    close(jax.vmap(pallas, in_axes=(None, None, 0))(X, R, weights), jax.vmap(plain, (None, None, 0))(X, R, weights))
    close(jax.vmap(pallas)(X, R, weights), jax.vmap(plain)(X, R, weights))


def test_forward_and_reverse_mode_agree_with_the_plain_formula():
    def every(call):
        def twice(x):
            return jax.lax.scan(lambda y, _: (call(y, y, W)[0], None), x, None, 2)[0]

        return {
            "all": jax.grad(loss(call), argnums=(0, 1, 2))(X, R, W),
            "weight": jax.grad(loss(call), argnums=2)(X, R, W),
            "norm": jax.grad(lambda x: jnp.sum(jnp.sin(call(x, R, W)[0])))(X),
            "sum": jax.grad(lambda x: jnp.sum(jnp.sin(call(x, R, W)[1])))(X),
            "jvp": jax.jvp(call, (X, R, W), (jnp.cos(X), jnp.sin(R), jnp.cos(W))),
            "vmap": jax.vmap(jax.grad(loss(call)), in_axes=(0, 0, None))(X, R, W),
            "scan": jax.grad(lambda x: jnp.sum(jnp.sin(twice(x))))(X),
            "remat": jax.grad(jax.checkpoint(loss(call)))(X, R, W),
        }

    close(jax.jit(every, static_argnums=0)(pallas), jax.jit(every, static_argnums=0)(plain), 2e-4)
    close(jax.grad(loss(pallas))(X, R, W), jax.grad(loss(plain))(X, R, W), 2e-4)


@pytest.mark.slow
def test_a_hessian_agrees_with_the_plain_formula():
    x, r, w = X[0, :2, :5], R[0, :2, :5], W[:5]
    for outer, inner in ((jax.jacfwd, jax.jacrev), (jax.jacrev, jax.jacfwd)):
        close(outer(inner(loss(pallas)))(x, r, w), outer(inner(loss(plain)))(x, r, w), 2e-4, 1e-4)


def test_gradients_of_narrow_rows_are_those_of_what_users_write():
    x, r = X.astype(jnp.bfloat16), R.astype(jnp.bfloat16)
    actual, expected = (jax.grad(loss(call), argnums=(0, 1, 2))(x, r, W) for call in (pallas, plain))
    assert [g.dtype for g in actual] == [x.dtype, r.dtype, W.dtype]
    close(actual, expected, 2**-5, 2**-5)


def test_a_backward_pass_keeps_the_sum_and_the_weight_and_no_other_rows():
    x, r, w = X.astype(jnp.bfloat16), R.astype(jnp.bfloat16), W.astype(jnp.bfloat16)
    kept = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(pallas, *args)[1], x, r, w))
    rows = [leaf for leaf in kept if leaf.size >= x.size]
    assert [leaf.dtype for leaf in rows] == [x.dtype]
    assert sum(leaf.size for leaf in kept) <= x.size + w.size
    of_plain = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(plain, *args)[1], x, r, w))
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in kept) < sum(
        leaf.size * leaf.dtype.itemsize for leaf in of_plain
    )


def test_the_formula_in_a_program_is_one_call_and_a_gradient_computes_no_second_norm():
    gradient = jax.jit(jax.grad(loss(pallas), argnums=(0, 1, 2)))
    assert gradient.lower(X, R, W).as_text().count("rsqrt") == 1 + jax.jit(pallas).lower(X, R, W).as_text().count(
        "rsqrt"
    )


def test_what_kernels_do_not_take_is_answered_by_the_formula():
    normed, total = ours(X.astype(jnp.bfloat16), R, W)  # the sum is rounded once, to the dtype of x
    assert (normed.dtype, total.dtype) == (jnp.bfloat16, jnp.bfloat16)
    np.testing.assert_array_equal(total, (X.astype(jnp.bfloat16).astype(jnp.float32) + R).astype(jnp.bfloat16))
    assert [out.shape for out in ours(X[:0], R[:0])] == [(0, 6, 40)] * 2
    with pytest.raises(scheduler.NoCandidate, match=r"x is bfloat16, residual is float32 and weight is float32; x is"):
        pallas(X.astype(jnp.bfloat16), R, W)
    with jax.enable_x64(True):
        wide = ours(X.astype("float64"), R.astype("float64"), W.astype("float64"))
        assert [out.dtype for out in wide] == [jnp.float64] * 2


def test_wrong_operands_raise_one_sentence():
    with pytest.raises(ValueError, match=r"residual has shape \(6, 40\); x \(3, 6, 40\) needs one of its own shape"):
        ours(residual=R[0])
    with pytest.raises(ValueError, match=r"weight has shape \(39,\)"):
        ours(weight=W[:-1])
    with pytest.raises(ValueError, match=r"residual has shape \(2, 40\), and x \(6, 40\): they need the same"):
        AddRmsNormProblem.of(X[0], R[1, :2], W)


def test_a_search_finds_and_a_call_serves_a_schedule():
    assert load("add_rms_norm") is ADD_RMS_NORM
    with pytest.raises(scheduler.CacheMiss, match=r"tile-scheduler tune add_rms_norm .*rows=18"):
        ours(on_miss="error")
    record = scheduler.tune("add_rms_norm", {"rows": 18, "columns": 40, "dtype": "float32"}, budget=3)
    assert record.tried >= 2
    close(pallas(on_miss="error"), plain())
    close(ours(schedule={"rows": 4}), plain())


def test_inside_shard_map():
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("rows")
    mapped = jax.shard_map(lambda x, r: pallas(x, r), mesh=mesh, in_specs=(spec, spec), out_specs=(spec, spec))
    close(mapped(X, R), plain())


def test_the_problem_counts_each_array_once_and_takes_some_of_its_rows():
    problem = AddRmsNormProblem(24, 33, weight_dtype="float32")
    assert problem.canonical() == '{"columns":33,"rows":24,"weight_dtype":"float32"}'
    assert problem.bytes_moved == 4 * 24 * 33 * 2 + 33 * 4
    rows = np.array([0, 3, 23], np.int32)
    below, take = problem.at_rows(rows)
    inputs = problem.inputs(0)
    part = take(inputs)
    assert [(x.shape, x.dtype) for x in part] == [(x.shape, x.dtype) for x in below.operands()]
    for some, whole in zip(below.reference(*part), problem.reference(*inputs), strict=True):
        np.testing.assert_allclose(some, whole[rows], rtol=1e-6, atol=1e-6)


def test_the_kernel_that_no_device_has_checked_answers_nothing_unmeasured():
    answer = scheduler.predict("add_rms_norm", {"rows": 4096, "columns": 4096}, kind="NVIDIA H200")
    assert answer.backend == "xla"
