"""What a backward pass computes again instead of reading it, and what it reads."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from scheduler.rewriting.passes import Rewriter

X, W = (jax.random.normal(jax.random.key(i), (1024, 1024), jnp.float32) / 32 for i in range(2))
BIAS = jnp.linspace(-1.0, 1.0, 1024)


def _rewritten(closed):
    return Rewriter(lambda *_: None, lambda *_: None, lambda *_: None, "cpu").rewrite(closed)


def _gradient(activation):
    def loss(x, w, bias):
        return ((activation(x @ w + bias) @ w) ** 2).sum()

    return jax.grad(loss, argnums=(0, 1, 2))


def _gated(u):
    return jax.nn.silu(u) * (u + 1.0)


@pytest.mark.parametrize("activation", [jax.nn.gelu, jax.nn.silu, _gated, lambda u: jax.nn.gelu(u, approximate=False)])
def test_the_backward_pass_computes_activations_again(activation):
    gradient = _gradient(activation)
    before = jax.make_jaxpr(gradient)(X, W, BIAS)
    after = _rewritten(before)
    assert after.changes
    assert all("computed again in the backward pass" in each for each in after.changes)
    assert str(after.jaxpr).count("optimization_barrier") == 1
    for expected, actual in zip(*(core.jaxpr_as_fun(x)(X, W, BIAS) for x in (before, after.jaxpr)), strict=True):
        np.testing.assert_allclose(expected, actual, rtol=1e-4, atol=1e-3)


KEPT = {
    "tanh, whose gradient reads its result alone": jax.nn.tanh,
    "ReLU, which XLA computes again itself": jax.nn.relu,
    "softmax, which depends on two arrays": lambda u: jax.nn.softmax(u),
}


@pytest.mark.parametrize("name", KEPT)
def test_the_backward_pass_reads_what_is_stored_in_any_case(name):
    closed = jax.make_jaxpr(_gradient(KEPT[name]))(X, W, BIAS)
    assert _rewritten(closed).jaxpr is closed


def test_long_sequences_of_equations_are_kept():
    def long(u):
        v = u
        for _ in range(400):
            v = v * 1.001 + 0.001
        return u * jnp.tanh(v)

    closed = jax.make_jaxpr(_gradient(long))(X, W, BIAS)
    assert _rewritten(closed).jaxpr is closed


def test_small_arrays_are_read():
    closed = jax.make_jaxpr(_gradient(jax.nn.gelu))(X[:8], W, BIAS)
    assert _rewritten(closed).jaxpr is closed


def test_a_forward_pass_stays_the_same():
    closed = jax.make_jaxpr(lambda x, w: jax.nn.gelu(x @ w) @ w)(X, W)
    assert _rewritten(closed).jaxpr is closed
