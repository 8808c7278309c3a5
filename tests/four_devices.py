"""What a tuned call does on a mesh of four devices; `test_sharding.py` runs it in a process that has so many."""

from __future__ import annotations

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_vjp import TWIST, TwistProblem

import scheduler
from scheduler import tuned, tuned_flash_attention, tuned_matmul, tuned_softmax
from search_spaces.rows.formulas import SOFTMAX

X = jax.random.normal(jax.random.key(0), (32, 24), jnp.float32)
W = jax.random.normal(jax.random.key(1), (24, 40), jnp.float32)


@pytest.fixture(autouse=True)
def _no_answers():
    scheduler.reload()


def pallas(a, b):
    return tuned_matmul(a, b, backends="pallas")


def mesh(kind: AxisType, shape=(4,), names=("x",)):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))


def used_kernels(function, *args) -> bool:
    """Whether the interpreted kernel's grid loop is in the lowered program."""
    return "while" in jax.jit(function).lower(*args).as_text()


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("jitted", [True, False])
def test_inside_shard_map_our_kernel_answers(check_vma, jitted):
    f = jax.shard_map(pallas, mesh=mesh(AxisType.Auto), in_specs=(P("x"), P()), out_specs=P("x"), check_vma=check_vma)
    close((jax.jit(f) if jitted else f)(X, W), X @ W)
    assert used_kernels(f, X, W)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_replicated_weight_gets_the_gradient_of_all_shards(check_vma):
    def gradients(product):
        f = jax.shard_map(
            lambda x, w: jax.lax.psum((product(x, w) ** 2).sum(), "x"),
            mesh=mesh(AxisType.Auto),
            in_specs=(P("x"), P()),
            out_specs=P(),
            check_vma=check_vma,
        )
        return jax.jit(jax.grad(f, argnums=(0, 1)))(X, W)

    for ours, theirs in zip(gradients(pallas), gradients(jnp.matmul), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-3)


def test_a_gradient_taken_inside_shard_map_is_that_of_jnp_matmul():
    def run(product):
        def step(x, w):
            return jax.grad(lambda w: jax.lax.pmean((product(x, w) ** 2).sum(), "x"))(w)

        return jax.jit(jax.shard_map(step, mesh=mesh(AxisType.Auto), in_specs=(P("x"), P()), out_specs=P()))(X, W)

    np.testing.assert_allclose(run(pallas), run(jnp.matmul), rtol=1e-4, atol=1e-3)


def test_vmap_and_scan_inside_shard_map_agree_with_jnp_matmul():
    def run(product):
        def layers(x, ws):
            batched = jax.vmap(product, in_axes=(0, None))(x.reshape(2, -1, 24), ws[0]).reshape(-1, 24)
            return jax.lax.scan(lambda x, w: (product(x, w), None), batched, ws)[0]

        f = jax.shard_map(layers, mesh=mesh(AxisType.Auto), in_specs=(P("x"), P()), out_specs=P("x"))
        return jax.jit(f)(X, jnp.stack([W[:, :24], W[:, 16:]]))

    np.testing.assert_allclose(run(pallas), run(jnp.matmul), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("jitted", [True, False])
def test_operands_sharded_over_an_automatic_mesh_are_answered_by_kernels_in_parts(jitted):
    x = jax.device_put(X, NamedSharding(mesh(AxisType.Auto), P("x")))
    result = (jax.jit(pallas) if jitted else pallas)(x, W)
    close(result, X @ W)
    assert not result.sharding.is_fully_replicated
    assert "while" in jax.jit(pallas).lower(x, W).compile().as_text()


@pytest.mark.parametrize("jitted", [True, False])
def test_an_explicit_mesh_gets_the_sharding_that_jnp_matmul_gives(jitted):
    x = jax.device_put(X, NamedSharding(mesh(AxisType.Explicit), P("x")))
    result = (jax.jit(tuned_matmul) if jitted else tuned_matmul)(x, W)
    close(result, X @ W)
    assert jax.typeof(result).sharding.spec == jax.typeof(jnp.matmul(x, W)).sharding.spec


def test_under_set_mesh_with_explicit_axes_the_numbers_agree():
    with jax.set_mesh(mesh(AxisType.Explicit)):
        close(jax.jit(tuned_matmul)(X, W), X @ W)
        close(jax.jit(jax.vmap(tuned_matmul, (0, None)))(X.reshape(4, 8, 24), W), (X @ W).reshape(4, 8, 40))
        x = jax.device_put(X, P("x"))
        gradient = jax.jit(jax.grad(lambda w: (tuned_matmul(x, w) ** 2).sum()))(W)
        np.testing.assert_allclose(gradient, 2 * X.T @ (X @ W), rtol=1e-4, atol=1e-3)


def test_a_mesh_with_only_some_manual_axes_goes_to_xla():
    square = mesh(AxisType.Auto, (2, 2), ("x", "y"))
    f = jax.shard_map(tuned_matmul, mesh=square, in_specs=(P("x"), P()), out_specs=P("x"), axis_names={"x"})
    close(jax.jit(f)(X, W), X @ W)
    assert not used_kernels(f, X, W)


def sharded(kind):
    return jax.device_put(X, NamedSharding(mesh(kind), P("x")))


@pytest.mark.parametrize("jitted", [True, False])
@pytest.mark.parametrize(
    ("kind", "why"),
    [(AxisType.Auto, "sharded over the devices of a mesh"), (AxisType.Explicit, "on a mesh with explicit axes")],
)
def test_of_what_is_not_divided_who_leaves_xla_out_is_told_why_and_others_may_read_it(kind, why, jitted, caplog):
    whole = tuned(dataclasses.replace(SOFTMAX, shard=None))
    strict = functools.partial(whole, backends="pallas")
    strict = jax.jit(strict) if jitted else strict
    with pytest.raises(scheduler.NoCandidate, match=rf"{why} .*softmax does not declare how it is sharded"):
        strict(sharded(kind))
    with pytest.raises(scheduler.NoCandidate, match=why):
        jax.grad(lambda x: strict(x).sum())(sharded(kind))
    with pytest.raises(scheduler.IllegalSchedule, match=why):
        whole(sharded(kind), schedule={"row_tile": 16})
    with caplog.at_level(logging.DEBUG, "scheduler"):
        close(whole(sharded(kind), on_miss="error"), jax.nn.softmax(X))  # none could be served, so none is missing
    assert why in caplog.text


def test_a_product_whose_contraction_is_split_sums_over_the_shards():
    f = jax.shard_map(
        lambda x, w: jax.lax.psum(pallas(x, w), "x"),
        mesh=mesh(AxisType.Auto),
        in_specs=(P(None, "x"), P("x", None)),
        out_specs=P(),
    )
    close(jax.jit(f)(X, W), X @ W)


def test_an_array_on_another_device_is_answered_there():
    device = jax.devices()[3]
    result = pallas(jax.device_put(X, device), jax.device_put(W, device))
    assert result.devices() == {device}
    close(result, X @ W)


BIAS, RESIDUAL = jnp.linspace(-1, 1, 40), jnp.flip(X @ W)


def layer(x, w, bias, residual, **how):
    return tuned_matmul(x, w, bias=bias, activation="gelu", residual=residual, **how)


strict_layer = functools.partial(layer, backends="pallas")


def formula(x, w, bias, residual):
    return jax.nn.gelu(x @ w + bias) + residual


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_fused_call_inside_shard_map_has_the_numbers_and_gradients_of_all_shards(check_vma):
    def shards(f):
        return jax.shard_map(
            f, mesh=mesh(AxisType.Auto), in_specs=(P("x"), P(), P(), P("x")), out_specs=P("x"), check_vma=check_vma
        )

    def gradients(f):
        return jax.jit(jax.grad(lambda *args: (shards(f)(*args) ** 2).sum(), (0, 1, 2, 3)))(X, W, BIAS, RESIDUAL)

    close(jax.jit(shards(strict_layer))(X, W, BIAS, RESIDUAL), formula(X, W, BIAS, RESIDUAL))
    assert used_kernels(shards(strict_layer), X, W, BIAS, RESIDUAL)
    for ours, theirs in zip(gradients(strict_layer), gradients(formula), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-2)


def moments(x):
    p, lse = tuned_softmax(x, return_lse=True, backends="pallas")
    return jnp.sin(p) * lse[:, None]


def plain_moments(x):
    return jnp.sin(jax.nn.softmax(x)) * jax.nn.logsumexp(x, -1)[:, None]


@pytest.mark.parametrize("check_vma", [True, False])
def test_two_results_inside_shard_map_have_the_numbers_and_gradients_of_all_shards(check_vma):
    f = jax.shard_map(moments, mesh=mesh(AxisType.Auto), in_specs=P("x"), out_specs=P("x"), check_vma=check_vma)
    close(jax.jit(f)(X), plain_moments(X))
    assert used_kernels(f, X)
    close(*(jax.jit(jax.grad(lambda x, g=g: (g(x) ** 2).sum()))(X) for g in (f, plain_moments)))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_two_results_on_a_mesh_go_to_xla(kind):
    p, lse = jax.jit(lambda x: tuned_softmax(x, return_lse=True))(sharded(kind))
    close(p, jax.nn.softmax(X))
    close(lse, jax.nn.logsumexp(X, -1))
    assert not lse.sharding.is_fully_replicated


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_backward_pass_of_its_own_works_inside_shard_map_and_on_a_mesh(check_vma):
    x, y = X[:, 0], W[0, :32]

    def gradients(call, over):
        f = jax.shard_map(
            lambda x, y: sum(call(x, y)), mesh=over, in_specs=(P("x"), P()), out_specs=P("x"), check_vma=check_vma
        )
        return jax.jit(jax.grad(lambda *args: (f(*args) ** 2).sum(), (0, 1)))(x, y[:8])

    ours = functools.partial(tuned(TWIST), backends="pallas")
    over = mesh(AxisType.Auto)
    for actual, expected in zip(gradients(ours, over), gradients(TwistProblem.every, over), strict=True):
        close(actual, expected)
    for kind in (AxisType.Auto, AxisType.Explicit):
        with jax.set_mesh(mesh(kind)):
            gradient = jax.jit(jax.grad(lambda x: sum(r.sum() for r in tuned(TWIST)(x, y))))(jax.device_put(x, P("x")))
            close(gradient, y + jnp.sin(y))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_attention_has_its_gradients_inside_shard_map_and_on_a_mesh(kind):
    keys = jax.random.split(jax.random.key(0), 3)
    qkv = [jax.random.normal(key, (4, 16, heads, 16)) for key, heads in zip(keys, (4, 2, 2), strict=True)]
    args = [*qkv, jnp.array([16, 5, 7, 1], "int32")]

    def plain(q, k, v, lengths):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, key_value_seq_lengths=lengths)

    def ours(q, k, v, lengths, **options):
        return tuned_flash_attention(q, k, v, causal=True, kv_lengths=lengths, **options)

    def gradients(call, args):
        return jax.jit(jax.grad(lambda *args: jnp.sin(call(*args)).sum(), (0, 1, 2)))(*args)

    expected, over = gradients(plain, args), mesh(kind)
    inside = functools.partial(ours, backends="pallas")
    inside = jax.shard_map(inside, mesh=over, in_specs=P("x"), out_specs=P("x"))
    with jax.set_mesh(over):
        args = [jax.device_put(x, NamedSharding(over, P("x"))) for x in args]
        assert used_kernels(inside, *args)
        for call in (inside, ours):
            for actual, right in zip(gradients(call, args), expected, strict=True):
                np.testing.assert_allclose(actual, right, rtol=1e-4, atol=1e-4)
        assert not ours(*args).sharding.is_fully_replicated


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_fused_call_on_a_mesh_is_answered_by_kernels_in_parts(kind):
    x, residual = (jax.device_put(y, NamedSharding(mesh(kind), P("x"))) for y in (X, RESIDUAL))
    result = jax.jit(layer)(x, W, BIAS, residual)
    close(result, formula(X, W, BIAS, RESIDUAL))
    assert not result.sharding.is_fully_replicated
    assert "while" in jax.jit(strict_layer).lower(x, W, BIAS, residual).compile().as_text()
    gradient = jax.jit(jax.grad(lambda bias: layer(x, W, bias, residual).sum()))(BIAS)
    np.testing.assert_allclose(
        gradient, jax.grad(lambda bias: formula(X, W, bias, RESIDUAL).sum())(BIAS), rtol=1e-4, atol=1e-3
    )


def test_products_of_an_optimized_function_are_kernels_of_each_device_on_a_mesh_and_inside_shard_map():
    on = NamedSharding(mesh(AxisType.Auto), P("x"))
    whole = scheduler.optimize(lambda a, b: a @ b, backends="interpret", keep="tuned")
    x = jax.device_put(X, on)
    np.testing.assert_allclose(whole(x, W), X @ W, rtol=1e-4, atol=1e-4)
    (decided,) = whole.decisions
    assert decided.kept == "tuned"
    assert [each.problem.m for each in decided.replaced] == [8]

    inside = jax.shard_map(lambda a, b: a @ b, mesh=mesh(AxisType.Auto), in_specs=(P("x"), P()), out_specs=P("x"))
    local = scheduler.optimize(inside, backends="interpret", keep="tuned")
    np.testing.assert_allclose(local(x, W), X @ W, rtol=1e-4, atol=1e-4)
    (decided,) = local.decisions
    assert decided.kept == "tuned"
    assert [each.problem.m for each in decided.replaced] == [8]


@pytest.mark.parametrize("backends", [None, "interpret"])
def test_gradients_of_a_row_function_on_an_explicit_mesh(backends):
    def function(x, w):
        return jnp.where(jnp.arange(16) < 3, jax.nn.softmax(x) * w, jax.nn.relu(x))

    def loss(f):
        return lambda x, w: (f(x, w) ** 2).sum()

    over_rows, x, w = jax.vmap(function, (0, None)), jnp.arange(128.0).reshape(8, 16) % 7, jnp.arange(16.0)
    tuned = functools.partial(scheduler.rows(function), backends=backends)
    wanted = jax.grad(loss(over_rows), (0, 1))(x, w)
    with jax.set_mesh(mesh(AxisType.Explicit)):
        divided = jax.device_put(x, P("x"))
        for found in (jax.jit(jax.grad(loss(tuned), (0, 1)))(divided, w), jax.grad(loss(tuned), (0, 1))(divided, w)):
            for one, other in zip(found, wanted, strict=True):
                close(one, other)
