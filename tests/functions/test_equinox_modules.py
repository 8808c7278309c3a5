"""Functions of Equinox modules: what is no array among their leaves is static, in arguments and in results."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import scheduler

pytestmark = pytest.mark.slow

TUNED = {"backends": "interpret", "keep": "tuned"}
WIDTH = 4
OPTIMIZER = optax.sgd(0.1, momentum=0.9)


class Net(eqx.Module):
    """Leaves of all kinds: arrays, functions, numbers, flags, None, text; and a field that is none."""

    layer: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    activation: Callable
    times: int
    nothing: None
    name: str
    depth: int = eqx.field(static=True)

    def __init__(self):
        self.layer = eqx.nn.Linear(WIDTH, WIDTH, key=jax.random.key(0))
        self.dropout, self.activation = eqx.nn.Dropout(0.5), jax.nn.gelu
        self.times, self.nothing, self.name, self.depth = 2, None, "net", 1

    def __call__(self, x, key):
        for _ in range(self.times * self.depth):
            x = self.activation(self.layer(x))
        return self.dropout(x, key=key)

    def loss(self, x, key):
        return (jax.vmap(self, (0, None))(x, key) ** 2).mean()


class Tuned(eqx.Module):
    one: jax.Array
    two: jax.Array
    activation: Callable = jnp.tanh

    def loss(self, x, key):
        return (scheduler.tuned_matmul(self.activation(scheduler.tuned_matmul(x, self.one)), self.two) ** 2).mean()


def step(model, state, x, key):
    loss, gradients = eqx.filter_value_and_grad(lambda model: model.loss(x, key))(model)
    updates, state = OPTIMIZER.update(gradients, state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), state, loss


# What an optimized step is compared with; compiled, as eager steps compile each operation apart.
REFERENCE = eqx.filter_jit(step)


def made(model=None):
    model = model or Net()
    return model, OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))


def batch(rows):
    return jax.random.normal(jax.random.key(rows), (rows, WIDTH))


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if eqx.is_array(x):
            np.testing.assert_allclose(x, y, rtol=2e-3, atol=1e-4)
        else:
            assert x is y or x == y


def problems(fn, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return {str(row.problem): row.count for row in scheduler.problems(fn, *args, **kwargs)}


STEP = {
    "m=3 n=4 k=4 dtype=float32": 2,
    "m=4 n=4 k=3 dtype=float32 transpose_a=True": 2,
    "m=3 n=4 k=4 dtype=float32 transpose_b=True": 1,
}


@pytest.mark.parametrize("jitted", [lambda fn: fn, eqx.filter_jit])
def test_problems_of_a_step_that_returns_its_model_are_those_of_its_backward_pass_too(jitted):
    args = *made(Tuned(jnp.ones((WIDTH, WIDTH)), jnp.ones((WIDTH, WIDTH)))), batch(3), jax.random.key(0)
    assert problems(jitted(step), *args) == STEP
    shapes = eqx.filter_eval_shape(lambda: args)
    assert problems(jitted(step), *shapes) == STEP


@pytest.mark.parametrize("jitted", [lambda fn: fn, eqx.filter_jit])
def test_an_optimized_step_returns_what_the_original_does(jitted):
    fast = scheduler.optimize(jitted(step), **TUNED)
    mine, theirs = made(), made()
    for rows in (3, 3, 5):
        args = batch(rows), jax.random.key(rows)
        *mine, loss = fast(*mine, *args)
        *theirs, expected = REFERENCE(*theirs, *args)
        assert_same((mine, loss), (theirs, expected))
        assert type(mine[0]) is Net
        assert mine[0].activation is jax.nn.gelu
    assert [decided.kept for decided in fast.decisions] == ["tuned", "tuned"]


@pytest.mark.parametrize(("donate", "first"), [("all-except-first", False), ("all", True), ("none", None)])
def test_what_filter_jit_donates_is_donated_without_a_warning(donate, first):
    fast = scheduler.optimize(eqx.filter_jit(step, donate=donate))
    model, state = made()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast(model, state=state, x=batch(3), key=jax.random.key(0))
    deleted = [x.is_deleted() for part in (model, state) for x in jax.tree.leaves(eqx.filter(part, eqx.is_array))[:1]]
    assert deleted == [bool(first), first is not None]


def test_a_model_its_methods_and_what_transforms_it_are_functions_to_optimize():
    model, x, key = Net(), batch(3), jax.random.key(0)
    gradient = eqx.filter_grad(lambda model, x: model.loss(x, key))
    for fn, args in [
        (model, (x[0], key)),
        (model.loss, (x, key)),
        (eqx.filter_vmap(model.layer), (x,)),
        (gradient, (model, x)),
        (eqx.filter_jit(model), (x[0], key)),
        (jax.tree_util.Partial(step, *made()), (x, key)),
    ]:
        fast = scheduler.optimize(fn)
        assert_same(fast(*args), eqx.filter_jit(fn)(*args))
        assert len(fast.decisions) == 1
    assert problems(model, x[0], key) == {}


def test_what_is_static_is_another_version_and_arrays_are_not():
    model, x, key = Net(), batch(3), jax.random.key(0)
    fast = scheduler.optimize(lambda model, x, key: model.loss(x, key))
    for other, versions in [
        (model, 1),
        (eqx.tree_at(lambda m: m.layer.bias, model, jnp.ones(WIDTH)), 1),
        (eqx.tree_at(lambda m: m.times, model, 1), 2),
        (eqx.tree_at(lambda m: m.activation, model, jax.nn.relu), 3),
        (eqx.nn.inference_mode(model), 4),
        (model, 4),
    ]:
        assert_same(fast(other, x, key), eqx.filter_jit(other.loss)(x, key))
        assert len(fast.decisions) == versions


def test_python_numbers_of_filter_jit_are_static():
    fast = scheduler.optimize(eqx.filter_jit(lambda x, times, key=None: x @ x.T * sum(range(times))))
    for times in (2, 3):
        np.testing.assert_allclose(fast(batch(3), times), batch(3) @ batch(3).T * sum(range(times)), rtol=1e-5)
    assert len(fast.decisions) == 2


class Normed(eqx.Module):
    layer: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, key):
        self.layer = eqx.nn.Linear(WIDTH, WIDTH, key=key)
        self.norm = eqx.nn.BatchNorm(WIDTH, "batch", mode="batch")

    def __call__(self, x, state):
        return self.norm(self.layer(x), state)


def test_state_of_equinox_goes_in_and_out():
    def run(model, state, x):
        return jax.vmap(model, (0, None), (0, None), axis_name="batch")(x, state)

    def of(fn):
        model, state = eqx.nn.make_with_state(Normed)(jax.random.key(0))
        for rows in (3, 3, 5):
            y, state = fn(model, state, batch(rows))
        return y, jax.tree.leaves(state)

    expected = of(eqx.filter_jit(run))
    for fn in (run, eqx.filter_jit(run)):
        assert_same(of(scheduler.optimize(fn)), expected)


def test_an_argument_that_is_neither_array_nor_hashable_is_refused_in_a_sentence():
    with pytest.raises(TypeError, match="has a set, which is no array and therefore a constant of the program"):
        scheduler.optimize(lambda model, x, names: model(x))(Net().layer, batch(3)[0], {"a"})
