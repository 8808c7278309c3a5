"""`scheduler.problems` of a plain function: what `scheduler.optimize` would replace in it, by the same passes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import scheduler
from scheduler import tuned_matmul
from scheduler.rewriting.problems import to_json

pytest.importorskip("flax")
from flax import nnx

X = jax.ShapeDtypeStruct((512, 128), jnp.float32)


def listed(rows):
    return {f"{row.operation.name} {row.problem}": (row.count, row.lines) for row in rows}


def mlp_step(params, x):
    def loss(params):
        return ((jax.nn.relu(x @ params["up"] + params["bias"]) @ params["down"]) ** 2).mean()

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def gated_step(params, x):
    def loss(params):
        h = x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * params["norm"]
        return ((jax.nn.silu(h @ params["up"]) * (h @ params["gate"]) @ params["down"]) ** 2).mean()

    return jax.grad(loss)(params)


def attention_step(model, x):
    gradients = nnx.grad(lambda model: (model(x) ** 2).mean())(model)
    return jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), gradients)


def weights(**shapes):
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


STEPS = {
    "mlp": (mlp_step, weights(up=(128, 256), bias=(256,), down=(256, 128)), {"matmul"}),
    "gated": (gated_step, weights(norm=(128,), up=(128, 256), gate=(128, 256), down=(256, 128)), {"matmul", "rows"}),
    "attention": (
        attention_step,
        nnx.MultiHeadAttention(4, 128, decode=False, rngs=nnx.Rngs(0)),
        {"matmul", "flash_attention", "flash_attention_backward"},
    ),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_training_step_lists_what_optimize_replaces_backward_products_included(step):
    fn, model, operations = STEPS[step]
    x = jax.ShapeDtypeStruct((8, 512, 128), jnp.float32)
    found = scheduler.problems(fn, model, x)
    optimized = scheduler.problems(scheduler.optimize(fn), model, x)
    assert (found.tuned, optimized.untuned) == ((), ())
    assert listed(found.untuned) == listed(optimized)
    assert {row.operation.name for row in found.untuned} >= operations
    assert any("transpose_a=True" in str(row.problem) for row in found.untuned)


def test_tuned_calls_are_the_job_and_what_optimize_replaces_is_a_second_table():
    def fn(x, w):
        return tuned_matmul(x, w) @ w.T

    found = scheduler.problems(fn, X, X.update(shape=(128, 256)))
    (row,), (other,) = found, found.untuned
    assert (str(row.problem), str(other.problem)) == (
        "m=512 n=256 k=128 dtype=float32",
        "m=512 n=128 k=256 dtype=float32 transpose_b=True",
    )
    assert found.job().count("[[problem]]") == 1
    assert to_json(found)["untuned"][0]["count"] == 1
    tuned, heading, replaced = repr(found).partition("Not tuned; scheduler.optimize replaces these")
    assert ("n=256" in tuned, "n=128" in replaced) == (True, True)
    assert heading
    assert repr(found).count("50.0 %") == 2
    assert [line.line for line in other.lines] == [fn.__code__.co_firstlineno + 1]
    assert listed(scheduler.problems(scheduler.optimize(fn), X, X.update(shape=(128, 256)))) == listed([row, other])


def test_on_explicit_axes_the_problems_of_one_device_are_listed():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    x = X.update(sharding=NamedSharding(mesh, PartitionSpec("data")))
    found = scheduler.problems(lambda x, w: jnp.sin(x @ w), x, X.update(shape=(128, 64)))
    assert (found.tuned, found.mesh) == ((), "data=2")
    assert [row.problem.m for row in found.untuned] == [X.shape[0] // 2]


def test_products_that_no_kernel_computes_are_not_listed():
    x, w = jax.ShapeDtypeStruct((8, 8), jnp.int32), jax.ShapeDtypeStruct((8, 8), jnp.float32)
    assert scheduler.problems(lambda x: x @ x, x).untuned == ()
    assert scheduler.problems(lambda x, w: lax.dot(x, w, preferred_element_type=jnp.float32), x, w).untuned == ()


def test_what_no_operation_knows_is_read_without_harm():
    def kernel(x, out):
        out[...] = x[...] @ x[...]

    def fn(key, x):
        x = x + jax.random.normal(key, x.shape)
        x = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)
        x = lax.custom_linear_solve(lambda y: 2 * y, x, lambda matvec, y: y / 2 @ jnp.eye(8), symmetric=True)
        x = jnp.sort(x) + lax.fori_loop(0, jnp.int32(x[0, 0]), lambda _, y: jnp.fft.fft(y).real, x)
        jax.debug.print("{}", x[0, 0])
        return lax.switch(jnp.argmax(x[0]), [jnp.sin, jnp.linalg.inv, lambda x: x @ x], x), jax.random.split(key)

    square = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    found = scheduler.problems(fn, jax.eval_shape(lambda: jax.random.key(0)), square)
    products = {str(row.problem): row.count for row in found.untuned if row.operation.name == "matmul"}
    assert products["m=8 n=8 k=8 dtype=float32"] >= 2
    assert {loop.kind for loop in found.loops} >= {"while", "cond"}
