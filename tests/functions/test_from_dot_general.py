"""A dot_general as a matrix product with views."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from search_spaces.fingerprint import all_equations
from search_spaces.kernel import Library
from search_spaces.matmul import MATMUL
from search_spaces.matmul.equations import problem_of_dot_general
from search_spaces.target import Target

pytestmark = pytest.mark.slow

ANY = Target("any", "any", "any", 1)


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def equation(text, *shapes):
    """The one dot_general of an einsum."""
    jaxpr = jax.make_jaxpr(lambda *xs: jnp.einsum(text, *xs))(*(array(*shape) for shape in shapes))
    return next(each for each in all_equations(jaxpr) if each.primitive is lax.dot_general_p)


def of(text, *shapes):
    dot = equation(text, *shapes)
    return problem_of_dot_general(*(x.aval for x in dot.invars), **dot.params)


def copies(found, *shapes):
    """How many arrays are moved before the kernel and after it."""

    def run(*args):
        return found.restore(MATMUL.library.run(found.problem, Library(), ANY, *found.operands(*args)))[0]

    jaxpr = jax.make_jaxpr(run)(*(array(*shape) for shape in shapes))
    return sum(each.primitive is lax.transpose_p for each in jaxpr.eqns)


@st.composite
def dots(draw):
    """Any dimension numbers, small integers for elements, and any order in which arrays may be said to lie."""
    extents = st.integers(1, 4)
    batch, contract = draw(st.lists(extents, max_size=2)), draw(st.lists(extents, min_size=1, max_size=2))
    names = [("b", i) for i in range(len(batch))] + [("k", i) for i in range(len(contract))]
    shapes, places = [], []
    for _ in range(2):
        free = draw(st.lists(extents, max_size=2))
        axes = draw(st.permutations([*names, *(("f", i) for i in range(len(free)))]))
        shapes.append([{"b": batch, "k": contract, "f": free}[kind][i] for kind, i in axes])
        places.append(
            [[axes.index((kind, i)) for i in range(n)] for kind, n in (("k", len(contract)), ("b", len(batch)))]
        )
    numbers = tuple(tuple(tuple(place[kind]) for place in places) for kind in range(2))
    rng = np.random.default_rng(draw(st.integers(0, 9)))
    a, b = (jnp.asarray(rng.integers(-3, 4, shape), jnp.float32) for shape in shapes)
    ndims = (a.ndim, b.ndim, lax.dot_general(a, b, numbers).ndim)
    stored = [draw(st.none() | st.permutations(range(ndim)).map(tuple)) for ndim in ndims]
    return a, b, numbers, stored


@given(dots())
@settings(max_examples=40, deadline=None)
def test_any_dot_general_is_xlas_or_computed_alike(dot):
    a, b, numbers, stored = dot
    found = problem_of_dot_general(a, b, dimension_numbers=numbers, stored=stored)
    if isinstance(found, str):
        assert "cuBLAS takes it without a copy" in found
        return
    operands = found.operands(a, b)
    assert [x.shape for x in operands] == [s.shape for s in found.problem.operands()]
    (result,) = found.restore(MATMUL.library.run(found.problem, Library(), ANY, *operands))
    np.testing.assert_array_equal(result, lax.dot_general(a, b, numbers))


@pytest.mark.parametrize(
    ("text", "a", "b", "problem"),
    [
        ("mk,kn->mn", (5, 7), (7, 9), {"m": 5, "n": 9, "k": 7}),
        ("km,kn->mn", (7, 5), (7, 9), {"m": 5, "n": 9, "k": 7, "transpose_a": True}),
        ("mk,nk->mn", (5, 7), (9, 7), {"m": 5, "n": 9, "k": 7, "transpose_b": True}),
        ("bsd,dhe->bshe", (2, 3, 4), (4, 5, 6), {"m": 6, "n": 30, "k": 4}),
        ("bshe,hed->bsd", (2, 3, 5, 6), (5, 6, 4), {"m": 6, "n": 4, "k": 30}),
        ("bhse,bhte->bhst", (2, 5, 3, 6), (2, 5, 4, 6), {"batch": 10, "m": 3, "n": 4, "k": 6, "transpose_b": True}),
        ("bhst,bhte->bhse", (2, 5, 3, 4), (2, 5, 4, 6), {"batch": 10, "m": 3, "n": 6, "k": 4}),
        ("k,kn->n", (7,), (7, 9), {"m": 1, "n": 9, "k": 7}),
        ("mk,k->m", (5, 7), (7,), {"m": 5, "n": 1, "k": 7}),
    ],
)
def test_axes_that_lie_together_are_read_as_they_lie(text, a, b, problem):
    found = of(text, a, b)
    swapped = {"m": problem["n"], "n": problem["m"]}  # einsum may take b first
    given = [MATMUL.problem(dtype="float32", **problem)]
    if found.problem != given[0]:
        assert (found.problem.m, found.problem.n) == (swapped["m"], swapped["n"])
    assert found.problem.k == problem["k"]
    assert found.problem.batch == problem.get("batch", 1)
    dot = equation(text, a, b)
    assert copies(found, *(x.aval.shape for x in dot.invars)) == 0


def test_heads_between_length_and_batch_are_copied_as_xla_copies_them():
    shape = (2, 8, 4, 6)
    found = of("bshe,bthe->bhst", shape, shape)
    assert found.problem == MATMUL.problem(batch=8, m=8, n=8, k=6, dtype="float32", transpose_b=True)
    assert copies(found, shape, shape) == 2


def test_heads_in_the_middle_of_one_sequence_are_left_to_xla():
    assert "lies between" in of("bshe,bthe->bhst", (1, 8, 4, 6), (1, 8, 4, 6))


def test_an_axis_of_one_element_lies_anywhere():
    found = of("bshe,bthe->bhst", (2, 8, 1, 6), (2, 8, 1, 6))
    assert found.problem.batch == 2
    assert copies(found, (2, 8, 1, 6), (2, 8, 1, 6)) == 0


def test_what_lies_transposed_is_read_and_written_there():
    numbers = (((1,), (0,)), ((), ()))
    found = problem_of_dot_general(array(5, 7), array(7, 9), dimension_numbers=numbers, stored=((1, 0), (1, 0), None))
    assert (found.problem.transpose_a, found.problem.transpose_b) == (True, True)
    found = problem_of_dot_general(array(5, 7), array(7, 9), dimension_numbers=numbers, stored=(None, None, (1, 0)))
    assert (found.problem.m, found.problem.n) == (9, 5)
    assert (found.problem.transpose_a, found.problem.transpose_b) == (True, True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"b": array(7, 9, dtype=jnp.bfloat16)}, "one dtype"),
        ({"a": array(0, 7)}, "empty"),
        ({"a": array(5, 7, dtype=jnp.int16), "b": array(7, 9, dtype=jnp.int16)}, "dtype='int16'"),
        ({"preferred_element_type": jnp.float64}, "out_dtype='float64'"),
        ({"precision": lax.DotAlgorithmPreset.F32_F32_F32}, "precision"),
        ({"precision": (lax.Precision.HIGH, lax.Precision.DEFAULT)}, "precision"),
        ({"out_sharding": object()}, "sharded"),
    ],
)
def test_what_no_problem_says_is_xlas_in_words(changes, words):
    given = {"a": array(5, 7), "b": array(7, 9), "dimension_numbers": (((1,), (0,)), ((), ()))} | changes
    assert words in problem_of_dot_general(given.pop("a"), given.pop("b"), **given)


@pytest.mark.parametrize("precision", [None, "default", "high", "highest"])
def test_precision_and_the_dtype_of_the_result_are_the_equations(precision):
    numbers = (((1,), (0,)), ((), ()))
    asked = None if precision is None else (lax.Precision(precision),) * 2
    with jax.default_matmul_precision("highest"):  # has had its say when the equation was made
        found = problem_of_dot_general(array(5, 7), array(7, 9), dimension_numbers=numbers, precision=asked)
    assert found.problem.precision == (precision or "default")
    wide = problem_of_dot_general(
        *[array(4, 4, dtype=jnp.bfloat16)] * 2, dimension_numbers=numbers, preferred_element_type=jnp.float32
    )
    assert wide.problem.out_dtype == "float32"
