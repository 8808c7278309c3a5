"""Calls of `scheduler.optimize` after the decision: JAX's C++ code finds the program, and no key is made in Python."""

import copy
import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import scheduler
from scheduler.dispatch import dispatch
from scheduler.rewriting import call_arguments, optimize

ON_CPU = {"backends": "interpret", "keep": "tuned"}
X = jnp.arange(64.0).reshape(8, 8) / 64


class Linear(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(X)
        self.count = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.count[...] = self.count[...] + 1
        return x @ self.kernel[...]


def applied(model, x):
    return model(x)


def calls():
    """A function for each way of passing arrays, with the arguments of a call."""
    model = eqx.nn.Linear(8, 8, use_bias=False, key=jax.random.key(0))
    return {
        "arrays": (lambda x: x @ x, (X,)),
        "dict": (lambda tree, x: tree["w"] @ x, ({"w": X}, X)),
        "static": (jax.jit(lambda x, n: x @ x * n, static_argnums=1), (X, 3)),
        "jitted": (jax.jit(lambda x: x @ x), (X,)),
        "nnx": (applied, (Linear(), X)),
        "nnx.jit": (nnx.jit(applied), (Linear(), X)),
        "filter_jit": (eqx.filter_jit(applied), (model, X[0])),
        "nothing replaced": (lambda x: x + 1, (X,)),
    }


@pytest.fixture
def keys(monkeypatch):
    """The arguments for which a key was made in Python."""
    made, key = [], call_arguments.CallArguments.key
    monkeypatch.setattr(call_arguments.CallArguments, "key", lambda self: made.append(self) or key(self))
    return made


@pytest.mark.parametrize("name", calls())
def test_no_key_is_made_in_python(name, keys):
    fn, args = calls()[name]
    fast = scheduler.optimize(fn, **ON_CPU)
    expected = fn(*args)
    for _ in range(2):
        fast(*args)
    keys.clear()
    np.testing.assert_allclose(fast(*args), expected, rtol=1e-5)
    assert keys == []
    (decided,) = fast.decisions
    assert decided.kept == ("plain" if name == "nothing replaced" else "tuned")


def test_a_module_is_updated_once_in_each_call():
    model = Linear()
    fast = scheduler.optimize(applied, **ON_CPU)
    for times in range(1, 4):
        fast(model, X)
        assert model.count[...] == times


def test_what_a_jit_of_flax_would_lose_is_updated():
    @nnx.jit
    def step(model, seen, x):
        seen["calls"] = seen["calls"] + 1
        return model(x)

    fast, seen = scheduler.optimize(step.fun, **ON_CPU), {"calls": jnp.zeros(())}
    for _ in range(3):
        fast(Linear(), seen, X)
    assert seen["calls"] == 3


def test_other_arguments_alternate_without_a_key(keys):
    fast = scheduler.optimize(lambda x: x @ x, **ON_CPU)
    given = [X, X[:4, :4], X.astype(jnp.bfloat16)]
    for x in given * 2:
        fast(x)
    keys.clear()
    for x in given:
        assert fast(x).shape == x.shape
    assert keys == []
    assert len(fast.decisions) == 3


def test_dropped_decisions_and_another_policy_decide_again(monkeypatch):
    fast = scheduler.optimize(lambda x: x @ x, **ON_CPU)
    fast(X)
    dispatch.reload()
    fast(X)
    assert len(fast.decisions) == 2
    monkeypatch.setenv("TILE_SCHEDULER_ON_MISS", "xla")
    fast(X)  # the environment is read after a reload
    dispatch.reload()
    with pytest.raises(ValueError, match="on_miss='xla' needs the backend 'xla'"):
        fast(X)
    monkeypatch.delenv("TILE_SCHEDULER_ON_MISS")
    fast(X)
    assert len(fast.decisions) == 3


def test_without_jit_the_plain_function_runs():
    fast, seen = scheduler.optimize(lambda x: seen.append(x) or x @ x, **ON_CPU), []
    fast(X)
    with jax.disable_jit():
        fast(X)
    traced, plain = seen[0], seen[-1]
    assert isinstance(traced, jax.core.Tracer)
    assert not isinstance(plain, jax.core.Tracer)


def test_a_call_that_failed_can_succeed_later(keys):
    fail = [True]

    def f(x):
        if fail:
            raise ValueError(fail.pop())
        return x @ x

    fast = scheduler.optimize(f, **ON_CPU)
    with pytest.raises(ValueError, match="True"):
        fast(X)
    fast(X)
    fast(X)
    keys.clear()
    fast(X)
    assert keys == []


def test_the_oldest_version_is_dropped(monkeypatch):
    monkeypatch.setattr(optimize, "MOST_VERSIONS", 2)
    fast = scheduler.optimize(lambda x: x + 1)
    for n in (1, 2, 3, 1):
        assert fast(X[:n]).shape == (n, 8)
    assert [decided.arguments for decided in fast.decisions] == ["float32[3,8]", "float32[1,8]"]


def test_threads_that_call_at_once_share_one_decision():
    fast = scheduler.optimize(lambda x: x @ x, **ON_CPU)
    start, results = threading.Barrier(4), []

    def call():
        start.wait()
        results.append(fast(X))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fast.decisions) == 1
    for result in results:
        np.testing.assert_allclose(result, X @ X, rtol=1e-5)


def test_a_result_that_is_not_a_number_names_the_function():
    def logarithm(x):
        return jnp.log(x @ x)

    fast, negative = scheduler.optimize(logarithm, **ON_CPU), jnp.eye(8).at[0, 1].set(-1)
    fast(X + 1)
    with jax.debug_nans(True):
        fast(X + 1)
        with pytest.raises(FloatingPointError, match="tuned version of logarithm"):
            fast(negative)


def test_lower_trace_eval_shape_and_clear_cache_are_those_of_jit():
    fast = scheduler.optimize(lambda x: x @ x, **ON_CPU)
    shape = jax.ShapeDtypeStruct((8, 8), "float32")
    assert [equation.primitive.name for equation in fast.trace(shape).jaxpr.eqns] == ["dot_general"]
    assert fast.eval_shape(shape) == shape
    np.testing.assert_allclose(fast.lower(shape).compile()(X), X @ X, rtol=1e-5)
    assert "stablehlo.while" in fast.lower(shape).as_text()  # the interpreted kernel's loop over tiles
    assert fast.decisions == ()
    fast(X)
    fast.clear_cache()
    assert fast.decisions == ()
    fast(X)
    assert len(fast.decisions) == 1


@pytest.mark.parametrize("name", ["nnx.jit", "filter_jit"])
def test_lower_of_a_library_takes_modules(name):
    fn, args = calls()[name]
    fast = scheduler.optimize(fn, **ON_CPU)
    assert type(fast.lower(*args)) is type(fn.lower(*args))
    assert "stablehlo.while" in fast.lower(*args).as_text()


def test_lower_of_a_function_that_holds_arrays_says_what_to_do():
    model = eqx.nn.Linear(8, 8, key=jax.random.key(0))
    with pytest.raises(scheduler.SchedulerError, match="pass what it holds as arguments"):
        scheduler.optimize(model).lower(X[0])


@pytest.mark.parametrize("name", calls())
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_decides_for_itself(name, copied):
    fn, args = calls()[name]
    fast = scheduler.optimize(fn, **ON_CPU)
    expected = fast(*args)
    again = copied(fast)
    assert again.decisions == ()
    np.testing.assert_array_equal(again(*args), expected)
    assert len(again.decisions) == len(fast.decisions) == 1
