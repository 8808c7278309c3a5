"""Operands of a decorated function that are tuples and dicts of arrays."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import scheduler
from search_spaces.autotuned.arguments import operand_of, operand_text

X = jnp.arange(32.0).reshape(8, 4)
PARAMS = {"w": jnp.arange(4.0), "rest": (jnp.ones(4), {"scale": 2 * jnp.ones(4)})}
WHOLE = "{rest:(float32[4],{scale:float32[4]}),w:float32[4]}"


def reference(x, params, pair=None):
    bias, rest = params["rest"]
    y = x * params["w"] * rest["scale"] + bias
    return y if pair is None else (y + pair[0]) * pair[1]


@scheduler.autotune(
    tile=(2, 4, 8),
    reference=reference,
    rules={"a tile divides the rows": lambda x, params, tile: (x.shape[0] % tile == 0) & (params["w"].size == 4)},
    tolerance=1e-5,
    name="affine_by_trees",
)
def affine(x, params, pair=None, *, tile, target):
    arrays = jax.tree.leaves((params, pair))
    spec = pl.BlockSpec((tile, x.shape[1]), lambda i: (i, 0))

    def body(x_ref, *refs):
        bias, scale, w, *pair, out_ref = refs
        y = x_ref[...] * w[...] * scale[...] + bias[...]
        out_ref[...] = (y + pair[0][...]) * pair[1][...] if pair else y

    specs = [pl.BlockSpec(array.shape, lambda i: (0,)) for array in arrays]
    grid = (x.shape[0] // tile,)
    return pl.pallas_call(body, grid=grid, in_specs=[spec, *specs], out_specs=spec, out_shape=x, interpret=True)(
        x, *arrays
    )


PAIR = (jnp.ones(4), 3 * jnp.ones(4))
kernel = functools.partial(affine, backends="pallas")


@pytest.fixture(autouse=True)
def _no_answers(_own_cache):
    scheduler.reload()


def close(actual, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), actual, expected)


def test_the_structure_is_part_of_the_problem():
    problem = affine.problem(X, PARAMS)
    assert str(problem) == f"x=float32[8,4] params={WHOLE}"
    kind = affine.operation.problem
    for each in (problem, affine.problem(X, PARAMS, PAIR)):
        assert kind.from_canonical(each.canonical()) == each
        assert kind.parse(dict(field.split("=") for field in str(each).split())) == each
    assert kind.parse({"x": "f32[8,4]", "params": "{ w : f32[4], rest:(f32[4],{scale:f32[4]}) }"}) == problem
    assert affine.problem(X, dict(reversed(PARAMS.items()))) == problem


@pytest.mark.parametrize("pair", [None, PAIR])
def test_it_is_searched_and_called_eagerly_and_under_jit(pair):
    record = affine.tune(X, PARAMS, pair, budget=5)
    assert WHOLE in str(record.key)
    assert "pallas" in {entry.backend for entry in record.entries}
    expected = reference(X, PARAMS, pair)
    close(affine(X, PARAMS, pair, on_miss="error"), expected)
    close(kernel(X, PARAMS, pair), expected)
    close(kernel(x=X, pair=pair, params=PARAMS), expected)
    close(jax.jit(kernel)(X, PARAMS, pair), expected)
    close(kernel(X, jax.tree.map(np.asarray, PARAMS), pair, schedule={"tile": 4}), expected)


def test_derivatives_and_batches_go_through():
    def loss(f, x, params, pair):
        return (f(x, params, pair) ** 2).sum()

    for argument in (0, 1, 2):
        given = (X, PARAMS, PAIR)
        found, expected = (jax.grad(loss, argument + 1)(f, *given) for f in (kernel, reference))
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        close(found, expected)
    many = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), (X, PARAMS))
    close(jax.vmap(kernel)(*many), jax.vmap(reference)(*many))
    close(jax.vmap(kernel, (None, 0))(X, many[1]), jax.vmap(reference, (None, 0))(X, many[1]))


def test_arrays_of_one_structure_are_not_those_of_another():
    close(kernel(X, PARAMS), reference(X, PARAMS))
    other = {"w": PARAMS["w"], "rest": (2 * PARAMS["rest"][0], {"scale": PARAMS["w"]})}
    close(kernel(X, other), reference(X, other))
    assert affine.problem(X, PARAMS, PAIR) != affine.problem(X, PARAMS)


POINT = collections.namedtuple("POINT", ["a", "b"])


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ([X], "must be an array, not list"),
        (POINT(X, X), "params must be an array, or a tuple or dict of arrays, not POINT"),
        ({"w": [X]}, r"params\['w'\] must be an array, or a tuple or dict of arrays, not list"),
        ({"w": POINT(X, X)}, r"params\['w'\] must be"),
        (collections.OrderedDict(w=X), "not OrderedDict"),
        ({"a b": X}, "has the key 'a b': give its arrays names"),
        ({1: X}, "has the key 1"),
        ({"w": "text"}, "must be an array, not str"),
    ],
)
def test_other_containers_are_named(params, words):
    with pytest.raises(TypeError, match=words):
        affine(X, params)


@pytest.mark.parametrize(
    "text", ["(", "(float32[8]", "{float32[8]}", "{a:}", "{a:float32[8],a:float32[8]}", "(float32[8]))", "()x", "(,)",
             "{:}", "(float32[8] float32[8])", "(float32[8];)", "(" * 3000]
)  # fmt: skip
def test_text_that_is_no_structure_is_refused(text):
    with pytest.raises(ValueError, match=r"is no type of a tuple or dict of arrays|there is no dtype"):
        operand_of("x", text)


@pytest.mark.parametrize(
    "text",
    [
        "()",
        "{}",
        "(float32[8],)",
        "(None,float32[])",
        "{a:(),b:{c:int8[1,2]}}",
        "((float32[1],),)",
        "float32[3]",
        "None",
    ],
)
def test_text_of_a_structure_is_read_back(text):
    assert operand_text(operand_of("x", text)) == text
