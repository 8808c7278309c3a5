"""Row programs keep what the user wrote: simplifications on every kind of float, integers, casts, extents of one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from failures import failures
from jax import lax
from random_rows import differs, gradients_of

import scheduler
from scheduler import tuned_layer_norm, tuned_quantize_rows, tuned_rms_norm, tuned_silu_and_mul, tuned_softmax
from search_spaces.rows.builder import NoProgram, online
from search_spaces.rows.derivative import differentiate
from search_spaces.rows.program import evaluate
from search_spaces.rows.reader import trace

F32 = jnp.float32
# A row each: mixed values, overflow and underflow of squares, one value throughout, and the edges of narrow dtypes.
EXTREME = np.array(
    [
        [-0.0, 0.0, 1, -1, np.nan, np.inf, -np.inf, 1e30],
        [1e25, 2e25, -3e25, 1e24, 5, 6, 7, 8],
        [1e-30, 2e-30, -1e-30, 2e-38, 0, -0.0, 0, 0],
        [np.inf] * 8,
        [-np.inf] * 8,
        [-0.0] * 8,
        [8e37, -8e37, 8e37, 8e37, 1, 1, 1, 1],
        [65504, 65520, 6e-5, 1e-6, -1e-7, 449, 464, 2**31],
    ],
    np.float32,
)


def largest(x):
    return jnp.max(jnp.abs(x))


# The rules of `Builder`, by the simplification that a function would allow.
ALGEBRA = {
    "a scalar in a sum": lambda x: largest(x) * jnp.sqrt(jnp.sum((x / largest(x)) ** 2)),
    "a scalar in a mean": lambda x: jnp.mean((x / 1e20) * (x / 1e20)),
    "a product with a scalar": lambda x: jnp.sum(x * jnp.max(x)),
    "a negative sum": lambda x: jnp.sum(-x * jnp.min(x)),
    "a sum of differences from the mean": lambda x: jnp.sum(x - jnp.mean(x)),
    "zero times": lambda x: 0.0 * x,
    "zero minus": lambda x: 0.0 - x,
    "minus zero": lambda x: x - 0.0,
    "plus zero": lambda x: x + 0.0,
    "plus minus zero": lambda x: x + -0.0,
    "itself minus itself": lambda x: x - x,
    "negated twice": lambda x: jnp.negative(jnp.negative(x)),
    "over a constant": lambda x: (x / 3, x / 1e-30, x / 8, x / 0.0, x / -0.0, x / jnp.inf),
    "over a scalar": lambda x: x / jnp.max(x),
    "times a truth value": lambda x: x * (x > 1),
    "times a scalar's truth value": lambda x: x * (jnp.max(x) > 5),
    "times a truth value of 16 bits": lambda x: (x.astype(jnp.bfloat16) * (x > 1).astype(jnp.bfloat16)).astype(F32),
    "no maximum": lambda x: jnp.minimum(jnp.maximum(x, -jnp.inf), jnp.inf),
    "zeros of both signs": lambda x: jnp.maximum(jnp.minimum(-x, x), x),
    "powers": lambda x: (x**3, x**4, x**-3),
    "the same in both branches": lambda x: jnp.where(x > 0, x, x),
    "a sum of one value": lambda x: jnp.sum(jnp.broadcast_to(jnp.max(x), x.shape)),
    "softmax": jax.nn.softmax,
    "log-sum-exp": jax.nn.logsumexp,
    "exponentials relative to another number": lambda x: jnp.sum(jnp.exp(x - jnp.min(x))),
    "a variance": jnp.var,
    "a layer norm": lambda x: (x - x.mean()) * lax.rsqrt(x.var() + 1e-6),
}
CASTS = {
    dtype: lambda x, dtype=dtype: x.astype(dtype).astype(F32)
    for dtype in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int16", "int32", "bool")
} | {
    "float16 without subnormal numbers": lambda x: lax.reduce_precision(x, 5, 10),
    "used again": lambda x: (lambda q: (q, q * 2, q + x))(x.astype(jnp.float8_e4m3fn).astype(F32)),
    "to another dtype than that of the result": lambda x: x.astype(jnp.bfloat16).astype(jnp.float16),
    "8-bit arithmetic": lambda x: (x.astype(jnp.float8_e5m2) * x.astype(jnp.float8_e5m2)).astype(F32),
}


def require_same(found, plain, exact):
    for each in zip(*map(jax.tree.leaves, (found, plain, exact)), strict=True):
        assert (reason := differs(*each)) is None, reason


def check(item):
    name, function = item
    x = jnp.asarray(EXTREME)
    program, _ = trace(lambda x: function(x), [jax.ShapeDtypeStruct((8,), F32)], ["row"])
    mapped = jax.vmap(lambda x: function(x))
    plain = jax.jit(mapped)(x)
    with jax.enable_x64(True):
        exact = mapped(EXTREME.astype(np.float64))
    for each in (program, online(program)):
        require_same(jax.jit(evaluate, static_argnums=0)(each, x), plain, exact)
    if name in ALGEBRA:
        ones = jax.tree.map(jnp.ones_like, plain)
        derivative = differentiate(lambda x: function(x), [jax.ShapeDtypeStruct((8,), F32)], ["row"])
        right = jax.jit(lambda x: jax.vjp(mapped, x)[1](ones))(x)
        with jax.enable_x64(True):
            wide = jax.vjp(mapped, EXTREME.astype(np.float64))[1](jax.tree.map(np.ones_like, exact))
        require_same(jax.jit(functools.partial(gradients_of, derivative))(x), right, wide)


def test_every_simplification_gives_the_floats_of_jit_in_both_passes():
    assert not failures(check, ALGEBRA.items())


def test_every_cast_that_the_user_wrote_is_made():
    assert not failures(check, CASTS.items())


BINARY = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "div": lax.div,
    "rem": lax.rem,
    "left": lax.shift_left,
    "right": lax.shift_right_arithmetic,
    "logical": lax.shift_right_logical,
    "compared": lambda x, y: jnp.where(x * y > x, x - y, x),
}
UNARY = {
    "neg": lambda x: -x,
    "abs": jnp.abs,
    "power": lambda x: x**5,
    "constant": lambda x: x + jnp.asarray(100, x.dtype),
    "index": lambda x: x + jnp.arange(8).astype(x.dtype) * 40,
    "float": lambda x: (x * x).astype(F32),
    "from float": lambda x: (x.astype(F32) * 3).astype(x.dtype),
} | {dtype: lambda x, dtype=dtype: (x * x).astype(dtype) for dtype in ("int8", "uint8", "int16", "uint16", "int32")}


def integers(dtype):
    def every(x, y):
        return [f(x) for f in UNARY.values()] + [f(x, y) for f in BINARY.values()]

    info = jnp.iinfo(dtype)
    row = np.array([info.min, info.min + 1, 0, 1, 2, 7, info.max - 1, info.max])
    x, y = (jnp.asarray(np.stack([row, np.roll(row, shift)]).astype(dtype)) for shift in (1, 3))
    shapes = [jax.ShapeDtypeStruct((8,), dtype)] * 2
    program, _ = trace(every, shapes, ["row", "row"])
    found, right = jax.jit(lambda x, y: evaluate(program, x, y))(x, y), jax.jit(jax.vmap(every))(x, y)
    for name, got, wanted in zip((*UNARY, *BINARY), found, right, strict=True):
        assert got.dtype == wanted.dtype, name
        np.testing.assert_array_equal(got, wanted, name)


def test_narrow_integers_wrap():
    assert not failures(integers, ("int8", "uint8", "int16", "uint16", "int32"))


def test_integers_of_four_bits_are_refused():
    with pytest.raises(NoProgram, match="has int4 arrays, whose arithmetic XLA does not wrap: convert to int8 first"):
        trace(lambda x: x + x, [jax.ShapeDtypeStruct((8,), jnp.int4)], ["row"])


# ------------------------------------------------------------------------------
# Extents of one.


def normal(*shape):
    return jax.random.normal(jax.random.key(len(shape)), shape) + 0.1


def rms_norm(x, w):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * w


def layer_norm(x, w, b):
    centred = x - jnp.mean(x, -1, keepdims=True)
    return centred * lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + 0.1) * w + b


def of_rows(function, *axes):
    """A row function, and what `jax.vmap` makes of it."""
    return scheduler.rows(function, scalars=("s",) if "s" in function.__code__.co_varnames else ()), jax.vmap(
        function, in_axes=axes or 0
    )


ONE = {
    "elements": (*of_rows(lambda x: jnp.tanh(x)), (3, 1)),
    "softmax": (*of_rows(lambda x: jax.nn.softmax(x)), (3, 1)),
    "a reduction": (*of_rows(lambda x: jnp.sum(x * x)), (3, 1)),
    "a reduction that keeps its axis": (*of_rows(lambda x: jnp.sum(x * x, keepdims=True)), (3, 1)),
    "two parts": (*of_rows(lambda x: jnp.concatenate([x, 2 * x * x])), (1, 1)),
    "a weight": (*of_rows(lambda x, w: x * w * jnp.sum(x), 0, None), (3, 1), (1,)),
    "an element per row": (*of_rows(lambda x, s: x * s * s, 0, 0), (3, 1), (3,)),
    "one row": (*of_rows(lambda x: x / jnp.sum(x * x)), (1, 4)),
    "along an axis of one": (
        scheduler.rows(lambda x: jnp.tanh(x) * jnp.max(x), axis=1),
        lambda x: jnp.tanh(x) * jnp.max(x, 1, keepdims=True),
        (3, 1, 2),
    ),
    "tuned softmax": (lambda x: tuned_softmax(x, return_lse=True), lambda x: (x * 0 + 1, x[:, 0]), (3, 1)),
    "tuned rms norm": (tuned_rms_norm, rms_norm, (3, 1), (1,)),
    "tuned residual": (lambda x, r, w: tuned_rms_norm(x, w, residual=r), lambda x, r, w: (rms_norm(x + r, w), x + r),
                       (3, 1), (3, 1), (1,)),
    "tuned layer norm": (lambda *a: tuned_layer_norm(*a, eps=0.1), layer_norm, (3, 1), (1,), (1,)),
    "tuned softmax of columns": (lambda x: tuned_softmax(x, 0), lambda x: jax.nn.softmax(x, 0), (5, 1)),
    "tuned softmax of several columns": (lambda x: tuned_softmax(x, 0), lambda x: jax.nn.softmax(x, 0), (5, 4)),
    "tuned silu": (tuned_silu_and_mul, lambda x: jax.nn.silu(x[:, :1]) * x[:, 1:], (3, 2)),
    "tuned quantize": (lambda x: tuned_quantize_rows(x, "int8")[1], lambda x: jnp.abs(x[:, 0]) / 127, (3, 1)),
}  # fmt: skip


def one_column(item):
    _, (ours, plain, *shapes) = item
    args = tuple(normal(*shape) for shape in shapes)

    def derivatives(f):
        def loss(*args):
            return sum(jnp.sum(jnp.sin(x + 0.3)) for x in jax.tree.leaves(f(*args)))

        def second(*args):
            return sum(jnp.sum(jnp.sin(x)) for x in jax.grad(loss, range(len(args)))(*args))

        gradient, moved = jax.grad(loss, range(len(args))), tuple(1.0 + x for x in args)
        forward = jax.jvp(f, args, moved)[1], jax.jvp(gradient, args, moved)[1]
        return f(*args), gradient(*args), jax.grad(second, range(len(args)))(*args), forward

    found, right = (jax.jit(derivatives, static_argnums=0)(f) for f in (ours, plain))
    for got, wanted in zip(*map(jax.tree.leaves, (found, right)), strict=True):
        assert got.shape == wanted.shape
        np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("_own_cache")
def test_extents_of_one_have_results_and_both_derivatives():
    assert not failures(one_column, ONE.items(), name=lambda item: item[0])
