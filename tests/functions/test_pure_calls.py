"""A call as a pure function: static leaves, and containers that a function changes in place."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scheduler
from scheduler.rewriting.pure import pure_call


def batch(rows):
    return jax.random.normal(jax.random.key(rows), (rows, 4))


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), actual, expected)


def test_leaves_that_are_no_arrays_are_static_in_arguments_and_results():
    def fn(tree, *, mode):
        y = tree["activation"](tree["x"] @ tree["x"].T) * tree["number"]
        return {"y": y if tree["text"] == mode else -y, "text": mode, "fn": tree["activation"], "none": tree["none"]}

    fast = scheduler.optimize(fn)
    tree = {"x": np.ones((3, 4), np.float32), "activation": jnp.tanh, "number": 2, "text": "a", "none": None}
    for changed in ({}, {"number": 3}, {"text": "b"}, {"number": 2.5}, {"x": batch(3)}):
        found, expected = fast(tree | changed, mode="a"), fn(tree | changed, mode="a")
        assert_same(found.pop("y"), expected.pop("y"))
        assert found == expected
    assert len(fast.decisions) == 4  # the number 3 is an input like 2


X3 = batch(3)[:, :3]


class Weights:
    def __init__(self, w):
        self.w = w


@pytest.mark.parametrize("by_name", [False, True])
def test_arrays_of_a_plain_object_are_inputs(by_name):
    fast, weights = scheduler.optimize(lambda x, weights: x @ weights.w, backends="interpret"), Weights(batch(4))
    for factor in (1, 2):
        weights.w = factor * weights.w
        found = fast(batch(3), weights=weights) if by_name else fast(batch(3), weights)
        assert_same(found, batch(3) @ weights.w)
    assert len(fast.decisions) == 1


@pytest.mark.parametrize(
    ("made", "held"),
    [
        (lambda w: [w], lambda x: x[0]),
        (lambda w: {"a": (w, 3)}, lambda x: x["a"][0]),
        (lambda w: Weights([w]), lambda x: x.w[0]),
        (lambda w: types.SimpleNamespace(layers={"a": w}), lambda x: x.layers["a"]),
    ],
    ids=["list", "dict", "object", "namespace"],
)
def test_objects_inside_of_containers_are_inputs_that_can_be_updated(made, held):
    def step(x, layers):
        held(layers).w = 2 * held(layers).w
        return x @ held(layers).w

    fast = scheduler.optimize(step, backends="interpret")
    weights, expected = Weights(batch(4)), batch(4)
    layers = made(weights)
    for factor in (1, 3):
        weights.w, expected = factor * weights.w, 2 * factor * expected
        assert_same(fast(batch(3), layers), batch(3) @ expected)
        assert held(layers) is weights
        assert_same(weights.w, expected)
    assert len(fast.decisions) == 1


def test_an_object_that_occurs_twice_or_holds_itself_is_one_object():
    def step(x, layers):
        layers[0].w = 2 * layers[0].w
        return x @ layers[1].w @ layers[0].parents[0].w

    weights = Weights(X3)
    weights.parents = [weights]
    fast = scheduler.optimize(step, backends="interpret")
    for times in (2, 4):
        assert_same(fast(X3, [weights, weights]), X3 @ (times * X3) @ (times * X3))
    assert_same(weights.w, 4 * X3)


def test_another_object_of_the_same_attributes_decides_nothing_new():
    fast = scheduler.optimize(lambda x, weights: (x @ weights.w, weights))
    for rows in (4, 5):
        weights = Weights(rows * batch(4))
        found, same = fast(batch(3), weights)
        assert_same(found, batch(3) @ weights.w)
        assert same is weights
    assert len(fast.decisions) == 1


def test_lists_and_objects_that_hold_each_other_keep_their_places():
    def step(x, layers):
        for layer in layers:
            layer.next.w = x @ layer.w
        layers[0].all.reverse()
        return layers[0].w

    def made():
        layers = [Weights((i + 1) * X3) for i in range(3)]
        for i, layer in enumerate(layers):
            layer.next, layer.all = layers[i - 1], layers
        return layers

    fast, actual, expected = scheduler.optimize(step), made(), made()
    first = actual[0]
    for _ in range(3):
        assert_same(fast(X3, actual), step(X3, expected))
        assert_same([layer.w for layer in actual], [layer.w for layer in expected])
    assert first.all is actual
    assert actual[2] is first


def test_an_object_with_arrays_that_a_function_makes_is_refused():
    for step in (lambda x, tree: Weights(x), lambda x, tree: setattr(tree[0], "new", Weights(x))):
        weights = Weights(X3)
        with pytest.raises(scheduler.SchedulerError, match="makes an object with arrays, of class Weights"):
            scheduler.optimize(step)(X3, [weights])
        assert vars(weights).keys() == {"w"}


class Slots:
    __slots__ = ("count", "w")

    def __setattr__(self, name, value):
        object.__setattr__(self, name, 2 * value if name == "w" else value)


def test_slots_are_attributes_and_a_setter_runs_once():
    def step(x, slots):
        slots.count += 1
        slots.w = x @ slots.w
        return slots.count * slots.w

    fast, actual, expected = scheduler.optimize(step), Slots(), Slots()
    actual.w, actual.count, expected.w, expected.count = X3, 1, X3, 1
    for _ in range(3):
        assert_same(fast(X3, actual), step(X3, expected))
        assert_same((actual.w, actual.count), (expected.w, expected.count))


@pytest.mark.parametrize("number", [2, np.float32([2, 3, 4])])
def test_attributes_of_an_object_without_arrays_of_jax_are_never_stale(number):
    fast = scheduler.optimize(lambda x, setup: x * setup["a"].number)
    setup = {"a": types.SimpleNamespace(number=number, name="a")}
    for _ in range(3):
        setup["a"].number = setup["a"].number + 1
        assert_same(fast(X3, setup), X3 * setup["a"].number)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    params: dict[str, Any]
    count: jax.Array


def update(state, x, losses):
    """Changes a dataclass, a dict within it, and a list."""
    loss, gradients = jax.value_and_grad(lambda p: ((x @ p["w"]) ** 2).mean())(state.params)
    state.params["w"] = state.params["w"] - gradients["w"]
    state.params["loss"] = loss * 0 + 1
    state.params.pop("old", None)
    state.count = state.count + 1
    losses.append(loss)
    return loss


def made():
    return State({"w": jnp.ones((4, 4)), "old": jnp.ones(3), "loss": jnp.zeros(())}, jnp.int32(0)), []


@pytest.mark.parametrize("options", [{}, {"backends": "interpret", "keep": "tuned"}])
def test_containers_that_are_changed_in_place_are_changed_once(options):
    fast = scheduler.optimize(update, **options)
    (mine, my_losses), (theirs, their_losses) = made(), made()
    params, kept = mine.params, mine.params["w"]
    for n in (3, 3, 5):
        my_losses, their_losses = my_losses[-1:], their_losses[-1:]
        assert_same(fast(mine, batch(n), my_losses), update(theirs, batch(n), their_losses))
        assert_same((mine, my_losses), (theirs, their_losses))
    assert mine.params is params
    assert not kept.is_deleted()
    assert int(mine.count) == 3


def test_containers_that_are_changed_count_among_the_results():
    def step(params, x):
        loss, gradients = jax.value_and_grad(lambda p: (scheduler.tuned_matmul(x, p["w"]) ** 2).mean())(params)
        params["w"] = params["w"] - gradients["w"]
        return loss

    found = scheduler.problems(step, {"w": jnp.ones((4, 4))}, batch(3))
    assert {str(row.problem) for row in found} == {
        "m=3 n=4 k=4 dtype=float32",
        "m=4 n=4 k=3 dtype=float32 transpose_a=True",
    }


def test_values_that_move_within_a_container_stay_the_same_objects():
    def swap(pair, x):
        pair["a"], pair["b"] = pair["b"], pair["a"]
        return x + 1

    a, b = {"x": jnp.ones(2)}, {"x": jnp.zeros(2)}
    pair = {"a": a, "b": b}
    scheduler.optimize(swap)(pair, jnp.ones(2))
    assert pair["a"] is b
    assert pair["b"] is a


def test_a_container_that_is_given_twice_and_changed_is_refused():
    def fn(one, other, x):
        one["x"] = x
        return other["x"]

    both = {"x": jnp.ones(2)}
    with pytest.raises(scheduler.SchedulerError, match="changes a container that occurs twice among its arguments"):
        scheduler.optimize(fn)(both, both, jnp.zeros(2))
    assert float(both["x"][0]) == 1


def test_a_function_of_jax_jit_behaves_as_jax_has_it():
    """What it writes into its arguments is lost, and what is no array is refused."""
    fast = scheduler.optimize(jax.jit(update))
    state, losses = made()
    fast(state, batch(3), losses)
    assert (losses, int(state.count)) == ([], 0)
    with pytest.raises(TypeError, match="str"):
        fast(state, "text", losses)


def test_pure_functions_of_init_and_apply_are_optimized_as_they_are():
    """As those of Haiku: a parameter dict in, a state dict out."""

    def apply(params, state, key, x, is_training):
        y = x @ params["linear"]["w"]
        noise = jax.random.bernoulli(key, 0.5, y.shape) if is_training else 1.0
        return y * noise, {"mean": state["mean"] * 0.9 + y.mean()}

    args = {"linear": {"w": jnp.ones((4, 4))}}, {"mean": jnp.zeros(())}, jax.random.key(0), batch(3)
    fast = scheduler.optimize(apply)
    for is_training in (True, False):
        assert_same(fast(*args, is_training), apply(*args, is_training))


@pytest.mark.parametrize(
    ("one", "other"), [(1, True), (1, 1.0), (0.0, -0.0), ("a", "b"), (None, 0), (jnp.tanh, jnp.sin), ((1,), [1])]
)
def test_constants_that_make_other_programs_are_told_apart(one, other):
    def fn(x, constant):
        return x

    x = jnp.ones(2)
    keys = [pure_call(fn, (x, constant)).static for constant in (one, one, other)]
    assert keys[0] == keys[1]
    assert hash(keys[0]) == hash(keys[1])
    assert keys[0] != keys[2]


def test_static_arguments_are_told_apart_by_their_types():
    def fn(x, n):
        return x

    keys = {pure_call(fn, (jnp.ones(2), n), static=((1,), ())).static for n in (1, True, 1.0, 1)}
    assert len(keys) == 3


def test_a_pure_call_holds_no_array_of_its_arguments():
    call = pure_call(lambda tree, x: tree["w"] @ x, ({"w": jnp.ones((2, 2))}, jnp.ones(2)))
    other = pure_call(lambda tree, x: tree["w"] @ x, ({"w": jnp.zeros((2, 2))}, jnp.ones(2)))
    assert_same(other.finish(call.function(*other.arrays)), jnp.zeros(2))
