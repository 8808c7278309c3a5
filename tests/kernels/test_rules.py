"""A product's derivative, transpose and batching rules against those that JAX derives for its own product."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from search_spaces.front_end import split_axes
from search_spaces.kernel import Library
from search_spaces.matmul import MATMUL, MatmulProblem, rules
from search_spaces.target import Target

pytestmark = pytest.mark.slow_but_first

TARGET = Target("cpu", "cpu", "cpu", 1)
LAYOUTS = list(itertools.product([False, True], [False, True], [1, 3]))


def product(problem: MatmulProblem, *args: jax.Array) -> jax.Array:
    """XLA's product, insisting on the operands that the problem describes, folded or not."""
    assert [x.dtype for x in args] == [s.dtype for s in problem.operands()]
    sharding = rules.shard(problem)
    unfolded = split_axes(sharding, problem, [x.shape for x in args])
    (result,) = unfolded.at_once(problem, lambda p, *xs: MATMUL.library.results(p, Library(), TARGET, *xs), *args)
    assert (result.size, result.dtype) == (problem.result().size, problem.result().dtype)
    return result


def problem_of(transpose_a: bool, transpose_b: bool, batch: int, **fields: str) -> MatmulProblem:
    fields = {"dtype": "float32", **fields}
    return MatmulProblem(5, 7, 6, batch=batch, transpose_a=transpose_a, transpose_b=transpose_b, **fields)


def normal(seed: int, shape: tuple[int, ...], dtype="float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)).astype(dtype)


def posing(posed: list[MatmulProblem]):
    """`product`, which notes each problem that it is asked."""
    return lambda p, *args: posed.append(p) or product(p, *args)


def inputs(p: MatmulProblem, seed: int) -> list[jax.Array]:
    return [normal(seed + i, s.shape, s.dtype) for i, s in enumerate(p.operands())]


def close(actual, expected, tolerance=1e-5):
    assert actual.dtype == expected.dtype
    np.testing.assert_allclose(actual.astype(jnp.float32), expected.astype(jnp.float32), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("transpose_a", "transpose_b", "batch"), LAYOUTS)
def test_the_backward_products_are_those_of_the_dot_product(transpose_a, transpose_b, batch):
    p = problem_of(transpose_a, transpose_b, batch)
    a, b = inputs(p, 0)
    c, vjp = jax.vjp(lambda a, b: product(p, a, b), a, b)
    ct = normal(9, c.shape)
    da, none_a = rules.transpose(product, p, ct, (None, b))
    none_b, db = rules.transpose(product, p, ct, (a, None))
    assert none_a is None
    assert none_b is None
    for ours, theirs in zip((da, db), vjp(ct), strict=True):
        close(ours, theirs)


@pytest.mark.parametrize(
    ("dtype", "out_dtype"), [("bfloat16", "float32"), ("float16", "bfloat16"), ("float32", "bfloat16")]
)
def test_a_cotangent_of_another_dtype_keeps_the_wider_one(dtype, out_dtype):
    p = problem_of(False, True, 1, dtype=dtype, out_dtype=out_dtype)
    _, b = inputs(p, 0)
    ct = normal(9, p.result().shape, out_dtype)
    posed = []
    da, _ = rules.transpose(posing(posed), p, ct, (None, b))
    assert posed[0].dtype == "float32"
    close(da, (ct.astype(jnp.float32) @ b.astype(jnp.float32)).astype(dtype), 1e-2)


def test_precision_is_passed_on_to_the_backward_products():
    p = problem_of(False, False, 1, precision="highest")
    a, b = inputs(p, 0)
    posed = []
    rules.transpose(posing(posed), p, product(p, a, b), (None, b))
    assert [q.precision for q in posed] == ["highest"]


@pytest.mark.parametrize("moving", [(True, True), (True, False), (False, True), (False, False)])
def test_the_tangent_is_linear_in_the_tangents_that_are_there(moving):
    p = problem_of(True, False, 1)
    (a, b), (da, db) = inputs(p, 0), inputs(p, 2)
    given = (da if moving[0] else None, db if moving[1] else None)
    c, tangent = rules.jvp(product, p, (a, b), given)
    zeros = tuple(jnp.zeros_like(x) if t is None else t for x, t in zip((a, b), given, strict=True))
    expected, expected_tangent = jax.jvp(lambda a, b: product(p, a, b), (a, b), zeros)
    close(c, expected)
    if not any(moving):
        assert tangent is None
    else:
        close(tangent, expected_tangent)


@pytest.mark.parametrize(("transpose_a", "transpose_b", "batch"), LAYOUTS)
@pytest.mark.parametrize("dims", [(0, None), (1, None), (None, 0), (None, 2), (0, 0), (1, 2), (2, 0)])
def test_one_product_does_for_a_vmapped_one(transpose_a, transpose_b, batch, dims):
    p, size = problem_of(transpose_a, transpose_b, batch), 4
    args = [
        x if dim is None else normal(i, (*x.shape[:dim], size, *x.shape[dim:]))
        for i, (x, dim) in enumerate(zip(inputs(p, 0), dims, strict=True))
    ]
    posed = []
    c, dim = rules.batch(posing(posed), p, args, dims)
    expected = jax.vmap(lambda a, b: product(p, a, b), dims, out_axes=dim)(*args)
    close(c, expected)
    (q,) = posed
    assert q.flops == size * p.flops
    assert q.batch == (size * batch if None not in dims else batch), "an operand that is not batched is read once"


# What follows the sums


FUSED = [
    {"bias": "float32"},
    {"bias": "float32", "activation": "gelu", "residual": "float32"},
    {"activation": "silu", "residual": "float32"},
]


def fused(layout: tuple[bool, bool, int], fields: dict[str, str]) -> tuple[MatmulProblem, list[jax.Array]]:
    p = dataclasses.replace(problem_of(*layout), **fields)
    return p, inputs(p, 0)


@pytest.mark.parametrize("layout", [(False, True, 1), (True, False, 3)], ids=str)
@pytest.mark.parametrize("fields", FUSED, ids=str)
def test_an_epilogue_s_tangent_is_that_of_its_formula_whichever_operands_move(layout, fields):
    p, args = fused(layout, fields)
    tangents = inputs(p, 10)
    exact = lambda *args: p.reference(*args)  # noqa: E731
    for moving in itertools.product([True, False], repeat=len(args)):
        posed = []
        given = [t if moves else None for t, moves in zip(tangents, moving, strict=True)]
        result, tangent = rules.jvp(posing(posed), p, args, given)
        zeros = [jnp.zeros_like(x) if t is None else t for x, t in zip(args, given, strict=True)]
        expected, expected_tangent = jax.jvp(exact, tuple(args), tuple(zeros))
        close(result, expected)
        if any(moving):
            close(tangent, expected_tangent)
        else:
            assert tangent is None
        assert len(posed) == 1 + sum(moving[:2]), "one product for the result, one for each operand that moves"


def test_a_derivative_and_a_batch_round_the_sums_no_sooner_than_the_call_itself():
    """A sum of 257 has no bfloat16: rounded to 256 first, it would leave nothing where 256 is taken away."""
    p = MatmulProblem(4, 3, 257, bias="float32", activation="relu")
    a, b, bias = jnp.ones((4, 257), "bfloat16"), jnp.ones((257, 3), "bfloat16"), jnp.full(3, -256.0)
    one = jnp.ones((4, 3), "bfloat16")
    result, _ = rules.jvp(product, p, (a, b, bias), (a, None, None))
    close(result, one)
    results, _ = rules.batch(product, p, (a, b, jnp.stack([bias, 2 * bias])), (None, None, 0))
    close(results, jnp.stack([one, 0 * one]))


@pytest.mark.parametrize("batch", [1, 3])
def test_a_bias_gets_the_cotangent_s_sum_in_float32_and_a_residual_the_cotangent(batch):
    p = MatmulProblem(4096, 3, 2, batch=batch, bias="bfloat16", residual="float32")
    a, b, *_ = inputs(p, 0)
    ct = jnp.ones(p.result().shape, "bfloat16")
    da, db, dbias, dresidual = rules.transpose(product, p, ct, (a, b, None, None))
    assert (da, db) == (None, None)
    close(dbias, jnp.full_like(dbias, 4096))  # in bfloat16 the sum would end at 256
    close(dresidual, ct.astype("float32"))
    assert [x.shape for x in (dbias, dresidual)] == [s.shape for s in p.operands()[2:]]
    da, *others = rules.transpose(product, p, ct, (None, b, None, None))
    close(da, rules.transpose(product, p.plain, ct, (None, b))[0])
    assert all(x is not None for x in others[1:])


def test_an_activation_has_a_transpose_in_its_residual_alone():
    p = MatmulProblem(4, 3, 2, "float32", bias="float32", activation="relu", residual="float32")
    a, b, bias, residual = inputs(p, 0)
    ct = jnp.ones((4, 3))
    *none, dresidual = rules.transpose(product, p, ct, (a, b, bias, None))
    assert none == [None, None, None]
    close(dresidual, ct)
    for args in [(None, b, bias, residual), (a, b, None, residual)]:
        with pytest.raises(NotImplementedError, match=r"activation=relu .* is linear in its residual alone"):
            rules.transpose(product, p, ct, args)


AXES = [  # of a, b, bias, residual; how many products, of which problem
    ((0, None, None, 1), {"m": 20}),
    ((1, None, None, None), {"m": 20}),
    ((None, 0, None, None), {"n": 28}),
    ((None, 1, 0, 2), {"n": 28}),
    ((0, 1, None, 0), {"batch": 4}),
    ((0, 0, 1, None), {"batch": 4}),
    ((None, None, 0, None), {}),
    ((None, None, None, 0), {}),
    ((0, None, 0, 0), {"m": 20}),
]


@pytest.mark.parametrize(("dims", "wider"), AXES, ids=str)
@pytest.mark.parametrize("layout", [(False, False, 1), (True, True, 3)], ids=str)
def test_one_product_does_for_a_vmapped_one_with_an_epilogue(layout, dims, wider):
    p, args = fused(layout, FUSED[1])
    args = [
        x if dim is None else normal(i, (*x.shape[:dim], 4, *x.shape[dim:]))
        for i, (x, dim) in enumerate(zip(args, dims, strict=True))
    ]
    posed = []
    c, dim = rules.batch(posing(posed), p, args, dims)
    close(c, jax.vmap(p.reference, dims, out_axes=dim)(*args))
    apart = dims[1] is None and (dims[0] is None or dims[2] is not None)
    wider = {name: extent * (p.batch if name == "batch" else 1) for name, extent in wider.items()}
    (q,) = posed
    assert q == dataclasses.replace(p.unrounded if apart else p, **wider)
