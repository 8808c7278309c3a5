"""Derivative rules: which ones of a function equal the derivative of its equations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.lax import stop_gradient

from search_spaces.derivative_rules import has_own_rule, has_own_rules
from search_spaces.lowering_compat import evaluate_equation
from search_spaces.recognise import constants, graph


def exponentials(x, held, axis=-1):
    return jnp.exp(x - held(x.max(axis, keepdims=True)))


def log_sum(x, held, of_maximum=1.0):
    maximum = held(x.max())
    return jnp.log(jnp.exp(x - maximum).sum()) + of_maximum * maximum


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -10, 10),))


@jax.custom_jvp
def halved(x):
    return jnp.tanh(x)


halved.defjvp(lambda primals, tangents: (halved(*primals), tangents[0] / 2))

# Of the name and the body of JAX's function, with another rule.
other_relu = jax.custom_jvp(jax.nn.relu)
other_relu.defjvps(lambda g, ans, x: 0.7 * g)


def normalized(e):
    return e / e.sum(-1, keepdims=True)


HARMLESS = {
    "softmax": jax.nn.softmax,
    "softmax of some": lambda x: jax.nn.softmax(x, where=x > 0),
    "softmax of groups": lambda x: jax.nn.softmax(x.reshape(4, 4), 0),
    "log_softmax": jax.nn.log_softmax,
    "logsumexp": lambda x: jax.nn.logsumexp(x, b=jnp.arange(16.0)),
    "a softmax less any number": lambda x: normalized(jnp.exp(x - stop_gradient(x.mean() ** 2))),
    "a softmax of shifted logits": lambda x: jax.nn.softmax(x - stop_gradient(x.max())),
    "a softmax with a temperature": lambda x: normalized(exponentials(x, stop_gradient) ** 3 / 5),
    "a normalization": lambda x: (lambda e: e * jax.lax.rsqrt((e * e).mean()))(exponentials(x, stop_gradient)),
    "a log-sum": lambda x: log_sum(x, stop_gradient),
    "a held constant": lambda x: x * stop_gradient(jnp.arange(16.0)),
    "a held integer": lambda x: x * stop_gradient(x.argmax()),
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "softplus": jax.nn.softplus,
    "log_sigmoid": jax.nn.log_sigmoid,
    "logaddexp": lambda x: jnp.logaddexp(x, 2 * x),
    "log1mexp": lambda x: jax.nn.log1mexp(x * x + 1),
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
}
OWN = {
    "a held array": lambda x: x * stop_gradient(x),
    "straight through": lambda x: x + stop_gradient(jnp.round(x) - x),
    "exponentials that are not divided": lambda x: exponentials(x, stop_gradient),
    "a held sum": lambda x: (lambda e: e / stop_gradient(e.sum()))(exponentials(x, stop_gradient)),
    "a held array within a held one": lambda x: exponentials(x - stop_gradient(x.max()), stop_gradient),
    "twice the maximum": lambda x: log_sum(x, stop_gradient, 2.0),
    "a maximum along another axis": lambda x: normalized(exponentials(x.reshape(4, 4), stop_gradient, 0)),
    "maxima of transposed groups": lambda x: (lambda x, m: jnp.exp(x - m) / jnp.exp(x - m.T))(
        x.reshape(4, 4), stop_gradient(x.reshape(4, 4) ** 2)
    ),
    "a rule of the cotangent": clipped,
    "a rule of the tangent": halved,
    "another rule of relu": other_relu,
    "within a jit": jax.jit(lambda x: jnp.sin(clipped(x))),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_a_rule_that_equals_the_derivative_of_its_equations_is_harmless(name):
    assert not has_own_rules(HARMLESS[name], [jax.ShapeDtypeStruct((16,), jnp.float32)])


@pytest.mark.parametrize("name", OWN)
def test_any_other_rule_is_the_functions_own(name):
    assert has_own_rules(OWN[name], [jax.ShapeDtypeStruct((16,), jnp.float32)])


def without_rules(function, x):
    """Evaluates the equations of a function one by one, those of calls with rules, too."""
    closed = jax.make_jaxpr(function)(x)
    whole = graph(closed.jaxpr, constants(closed))
    values = {id(whole.inputs[0]): x}
    for node in whole.nodes:
        inputs = [values.get(id(each), each.literal) for each in node.inputs]
        found = inputs if node.name == "stop_gradient" else evaluate_equation(node.equation, *inputs)
        values |= dict(zip(map(id, node.results), found, strict=True))
    return values[id(whole.results[0])]


@pytest.mark.parametrize("name", HARMLESS)
def test_the_equations_have_the_derivative_of_a_harmless_rule(name):
    x, function = jax.random.normal(jax.random.key(0), (16,)), HARMLESS[name]
    ruled, plain = (
        jax.grad(lambda x, f=f: jnp.sin(f(x)).sum())(x) for f in (function, lambda x: without_rules(function, x))
    )
    assert jnp.allclose(ruled, plain, rtol=1e-4, atol=1e-5)


def test_the_rule_of_relu_counts_where_ties_do():
    (call,) = jax.make_jaxpr(jax.nn.relu)(jnp.ones(4)).jaxpr.eqns
    assert [has_own_rule(call, at_ties=ties) for ties in (False, True)] == [False, True]


def test_the_softmax_of_jax_may_have_a_rule():
    with jax.softmax_custom_jvp(True):
        found = [
            has_own_rules(lambda x, axis=axis: jax.nn.softmax(x, axis), [jax.ShapeDtypeStruct((4, 8), jnp.float32)])
            for axis in (0, 1, -1)
        ]
    assert found == [False, False, False]
