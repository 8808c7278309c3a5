"""The reference of a row problem is the function that the user wrote, here and in other processes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scheduler
from scheduler.measure.conversation import _serve
from scheduler.measure.protocol import Answer, encode
from scheduler.measure.runner import Task
from scheduler.measure.verification import mismatches
from scheduler.measure.worker_process import request_for
from search_spaces.problem import as_tuple
from search_spaces.rows import calls, written
from search_spaces.rows.formulas import QUANTIZE_ROWS, RMS_NORM, SOFTMAX
from search_spaces.rows.keys import words_of
from search_spaces.rows.operation import ROWS
from search_spaces.rows.translation import is_key

F8 = jnp.float8_e4m3fn
X = jax.random.normal(jax.random.key(0), (8, 32))


def safe_norm(x):
    most = jnp.max(jnp.abs(x))
    return most * jnp.sqrt(jnp.sum(jnp.square(x / most)))


def dropped(x, key):
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0)


FUNCTIONS = {  # function, operands, options of `rows`
    "a norm of numbers whose squares overflow": (safe_norm, (X * 1e25,), {}),
    "NaN and infinities": (lambda x: 0.0 * x, (X.at[0, :3].set(jnp.array([jnp.nan, jnp.inf, -jnp.inf])),), {}),
    "signed zeros": (lambda x: 1 / (0.0 - x), (X * 0,), {}),
    "a cast to 8 bits": (lambda x: x.astype(F8).astype(jnp.float32), (X * 100,), {}),
    "integers that wrap": (lambda x: (x + x).astype(jnp.float32), (jnp.arange(-128, 128, dtype=jnp.int8)[None],), {}),
    "constants of a dtype": (lambda x: x.astype(jnp.float32) * jnp.finfo(x.dtype).eps, (X.astype("bfloat16"),), {}),
    "an inner jit and a custom rule": (lambda x: jax.jit(jax.nn.softmax)(jax.nn.relu(x)), (X,), {}),
    "random bits": (dropped, (X, jax.random.split(jax.random.key(1), 8)), {}),
    "another axis": (lambda x: jax.nn.softmax(x), (X.reshape(2, 16, 8),), {"axis": 1}),
    "segments": (lambda x: jax.nn.softmax(x.reshape(4, 64)), (jnp.arange(1024.0).reshape(4, 256) % 7,), {}),
}


def as_operands(problem, args):
    """The arrays of a call as its problem's operands; a key is two words."""
    found = []
    for x in args:
        found += words_of(x) if is_key(x) else [x]
    return [x.reshape(s.shape) for x, s in zip(found, problem.operands(), strict=True)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_reference_is_the_function_and_so_is_its_text_for_other_processes(name):
    function, args, how = FUNCTIONS[name]
    problem = scheduler.rows(function, **how).problem(*args)
    operands = as_operands(problem, args)
    axis = how.get("axis", 0)
    over_rows = jax.vmap(jax.vmap(function, -1, -1)) if axis else jax.vmap(function)
    wanted = np.asarray(jax.jit(over_rows)(*args)).reshape(problem.results()[0].shape)
    exported = written.Exported(problem.reference_text())
    for (found,) in (as_tuple(problem.reference(*operands)), exported.over_rows(problem, *operands)):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
        assert np.array_equal(np.signbit(found), np.signbit(wanted))


def test_arithmetic_of_16_bits_is_in_float32_and_a_cast_rounds():
    x = jnp.full((1, 16), 300.0, jnp.float16)
    problem = scheduler.rows(lambda x: (x * x, (x * x).astype(jnp.float32) - 1, x.astype(jnp.bfloat16))).problem(x)
    square, less, rounded = problem.reference(x + 1)
    assert (square[0, 0], less[0, 0], rounded[0, 0]) == (301.0**2, 301.0**2 - 1, jnp.bfloat16(301.0))


def test_references_of_named_operations_are_their_formulas():
    for operation, fields in ((SOFTMAX, {}), (RMS_NORM, {}), (QUANTIZE_ROWS, {"result_dtype": "int8"})):
        problem = operation.problem(rows=40, columns=96, dtype="bfloat16", **fields)
        for kind in problem.special():
            operands = problem.special_inputs(kind, 1)
            program = as_tuple(problem.by_xla(*operands))
            program = [x.astype(s.dtype) for x, s in zip(program, problem.results(), strict=True)]
            reference = as_tuple(problem.reference(*operands))
            assert mismatches(problem, program, reference, problem.special_tolerance(kind)) is None, (operation, kind)


def overflowing_norm(x):
    most = jnp.max(jnp.abs(x))
    return most * jnp.sqrt(jnp.sum(jnp.square(x)) / (most * most))


def wrapping(x):
    return (x.astype(jnp.int32) * 2).astype(jnp.float32)


@pytest.mark.parametrize(
    ("function", "other", "x"),
    [
        (lambda x: x * x * x, lambda x: 1.01 * x * x * x, X),
        (safe_norm, overflowing_norm, X),
        (lambda x: 0.0 * x, jnp.zeros_like, X),
        (lambda x: (x + x).astype(jnp.float32), wrapping, jnp.zeros((8, 32), jnp.int8)),
    ],
    ids=["numbers", "overflow", "NaN", "integers"],
)
def test_a_search_accepts_no_kernel_of_another_function(function, other, x, monkeypatch):
    honest = calls.trace
    monkeypatch.setattr(calls, "trace", lambda run, *how: honest(other, *how))
    row = scheduler.rows(function)
    with pytest.warns(RuntimeWarning, match=r"of interpret failed: verify: .* elements are off"):
        record = scheduler.tune(row, x, budget=3)
    assert {entry.backend for entry in record.entries} == {"xla"}
    np.testing.assert_allclose(row(x), jax.vmap(function)(x), rtol=1e-6)  # by XLA, which computes the function


def test_a_worker_has_the_reference_of_the_process_that_asks(monkeypatch):
    problem = scheduler.rows(safe_norm).problem(X)
    request = request_for(Task(ROWS, problem, "xla", {}, 1), "measure")
    monkeypatch.setattr(written, "_written", {})  # as in another process
    found, served = ROWS.problem.from_canonical(request.problem), []
    assert found.reference_text() == ""

    class Worker:
        def answer(self, request):
            return Answer(None)

    _serve(Worker(), [encode(request).decode()], served.append)
    assert served == [Answer(None)]
    np.testing.assert_allclose(found.reference(X * 1e25), jax.vmap(safe_norm)(X * 1e25), rtol=1e-6)


def test_a_function_of_traced_values_has_their_gradients_and_batches():
    def scaled(x, s, w):
        return scheduler.rows(lambda row: jnp.sin(row * s) * w)(x)

    def plain(x, s, w):
        return jnp.sin(x * s) * w

    w = jnp.arange(32.0)
    np.testing.assert_allclose(jax.jit(scaled)(X, 3.0, w), plain(X, 3.0, w), rtol=1e-5, atol=1e-5)
    assert jax.jit(lambda s: scheduler.rows(lambda row: row * s)(X, backends="interpret"))(2.0)[0, 0] == 2 * X[0, 0]
    gradients = [jax.grad(lambda *args, f=f: f(*args).sum(), (0, 1, 2))(X, 2.0, w) for f in (scaled, plain)]
    for x, y in zip(*gradients, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-3)
    batched = functools.partial(jax.vmap, in_axes=(None, 0, None))
    np.testing.assert_allclose(batched(scaled)(X, w, w), batched(plain)(X, w, w), rtol=1e-4, atol=1e-3)
    matrix = jax.jit(lambda m: scheduler.rows(lambda row: m @ row)(X))(jnp.eye(32))  # of several axes: by XLA
    np.testing.assert_allclose(matrix, X, rtol=1e-6)
