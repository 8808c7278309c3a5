"""A product whose columns come in several arrays: as a problem, as a call, differentiated, batched, searched."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scheduler
from scheduler import tuned, tuned_matmul
from search_spaces.fingerprint import all_equations
from search_spaces.kernel import Library
from search_spaces.matmul import MATMUL, MatmulProblem, rules
from search_spaces.target import Target

pytestmark = pytest.mark.slow_but_first

SIZES = (24, 8, 16)
ours = functools.partial(tuned_matmul, split_sizes=SIZES)
pallas = functools.partial(ours, backends="interpret")


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


X, W, BIAS = normal(0, 3, 10, 20), normal(1, 20, 48) / 4, normal(2, 48)


@pytest.fixture(autouse=True)
def _no_answers(_own_cache):
    scheduler.reload()


def cut(c):
    return tuple(jnp.split(c, (24, 32), axis=-1))


def formula(x, w, bias=None, activation=None):
    c = jnp.matmul(x, w) + (0 if bias is None else bias)
    return cut(c if activation is None else getattr(jax.nn, activation)(c))


def close(actual, expected, rtol=2e-4):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=2e-5), actual, expected)


def problems(f, *args):
    """What the tuned calls of a function pose, in its order."""
    called = (e for e in all_equations(jax.make_jaxpr(f)(*args)) if e.primitive.name == "tuned_call")
    return [e.params["problem"] for e in called]


# The problem


def test_it_has_a_spelling_of_its_own_and_a_product_without_it_the_one_that_it_had():
    problem = MatmulProblem(64, 48, 32, split_sizes="024+8+16")
    assert str(problem) == "m=64 n=48 k=32 dtype=bfloat16 split_sizes=24+8+16"
    assert MatmulProblem.from_canonical(problem.canonical()) == problem
    assert MatmulProblem.parse({"m": "64", "n": "48", "k": "32", "split_sizes": "24+8+16"}) == problem
    assert problem.joined.canonical() == '{"k":32,"m":64,"n":48}'


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ("24+8", "adds up to 32 columns, and the product has 48"),
        ("24+0+24", "1 or more"),
        ("24+-8+32", "1 or more"),
        ("24,24", "such as 4096"),
        ("24+", "such as 4096"),
        ("48", "a single result: leave it out"),
    ],
)
def test_sizes_that_do_not_divide_the_columns_are_refused_in_a_sentence(sizes, said):
    with pytest.raises(ValueError, match=said):
        MatmulProblem(64, 48, 32, split_sizes=sizes)


def test_a_residual_is_for_the_caller_to_add():
    with pytest.raises(ValueError, match="add it to the results"):
        MatmulProblem(64, 48, 32, split_sizes="24+24", residual="bfloat16")


def test_results_lie_side_by_side_and_the_reference_agrees_with_slices_of_one():
    problem = MatmulProblem(16, 48, 32, dtype="float32", batch=2, split_sizes="24+8+16", bias="float32")
    args = problem.inputs(seed=0)
    assert [s.shape for s in problem.results()] == [(2, 16, 24), (2, 16, 8), (2, 16, 16)]
    close(problem.reference(*args), cut(problem.joined.reference(*args)))
    for program in MATMUL.library.programs(problem):
        results = MATMUL.library.run(problem, Library(program), Target("cpu", "cpu", "cpu", 1), *args)
        close(results, problem.reference(*args), 1e-4)


def test_the_library_writes_everything_twice_and_reads_it_once():
    problem = MatmulProblem(64, 48, 32, split_sizes="24+24")
    assert problem.bytes_moved == problem.joined.bytes_moved
    assert problem.library_bytes_moved == problem.bytes_moved + 2 * 64 * 48 * 2
    assert problem.joined.library_bytes_moved == problem.bytes_moved


def test_a_neighbour_has_the_same_results_but_for_the_last_and_rows_are_those_of_all():
    problem = MatmulProblem(64, 96, 64, split_sizes="32+64")
    assert problem.neighbour() == MatmulProblem(63, 93, 59, split_sizes="32+61")
    at_rows, take = problem.at_rows(np.array([3, 60], np.int32))
    args = problem.inputs(seed=0)
    close(at_rows.reference(*take(args)), tuple(c[jnp.array([3, 60])] for c in problem.reference(*args)), 1e-5)


# Calls


@pytest.mark.parametrize("call", [ours, pallas, functools.partial(tuned("matmul"), split_sizes=SIZES)])
def test_the_results_are_the_slices_of_the_product_with_its_leading_axes(call):
    close(call(X, W), formula(X, W))
    close(jax.jit(call)(X[0], W), formula(X[0], W))
    close(call(X[0, 0], W), formula(X[0, 0], W))
    close(call(X, jnp.stack([W, -W, W])), formula(X, jnp.stack([W, -W, W])))
    close(call(X[0], jnp.stack([W, -W])), formula(X[0], jnp.stack([W, -W])))


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_bias_activation_and_layouts_go_along(activation):
    call = functools.partial(pallas, activation=activation, transpose_a=True, transpose_b=True)
    close(call(X.swapaxes(-1, -2), W.T, bias=BIAS), formula(X, W, BIAS, activation))


def test_it_is_one_call_of_one_problem():
    posed = MatmulProblem(30, 48, 20, "float32", split_sizes="24+8+16")
    assert problems(ours, X, W) == [posed]
    assert tuned("matmul").problem(X, W, split_sizes=SIZES) == posed


def test_what_no_problem_describes_comes_in_several_arrays_too():
    whole = (X * 9).astype(jnp.int32), (W * 9).astype(jnp.int32)
    close(ours(*whole), formula(*whole))
    close(ours(X[:, :0], W), formula(X[:, :0], W))
    narrow = ours(X.astype(jnp.bfloat16), W)
    assert [c.dtype for c in narrow] == [jnp.float32] * 3


def test_sizes_are_checked_whoever_answers():
    whole = X.astype(jnp.int32), W.astype(jnp.int32)
    for args in ((X, W), whole):
        with pytest.raises(ValueError, match=r"split_sizes=24\+8 adds up to 32 columns, and the product has 48"):
            tuned_matmul(*args, split_sizes=(24, 8))
    with pytest.raises(ValueError, match="a b of one axis has not"):
        tuned_matmul(X, W[:, 0], split_sizes=(1, 1))
    with pytest.raises(ValueError, match="residual and split_sizes exclude each other"):
        tuned_matmul(X, W, split_sizes=SIZES, residual=X @ W)
    with pytest.raises(TypeError, match="no sequence of integers"):
        tuned_matmul(X, W, split_sizes=(24.0, 24.0))
    with pytest.raises(ValueError, match="1 or more"):
        tuned_matmul(X, W, split_sizes=(56, -8))


def test_a_call_that_is_refused_leaves_no_trace_in_one_whose_sizes_equal_its_own():
    with pytest.raises(TypeError, match="no sequence of integers"):
        tuned_matmul(X, W, split_sizes=(40.0, 8.0))
    assert [c.shape[-1] for c in tuned_matmul(X, W, split_sizes=(40, 8))] == [40, 8]


def test_a_search_finds_and_a_call_serves_a_schedule_from_the_cache():
    problem = MatmulProblem(30, 48, 20, "float32", split_sizes="24+8+16")
    with pytest.raises(scheduler.CacheMiss, match=r"tile-scheduler tune matmul .*split_sizes=24\+8\+16"):
        ours(X, W, on_miss="error")
    record = scheduler.tune(tuned_matmul, problem, budget=3)
    assert not record.failed
    close(ours(X, W, on_miss="error"), formula(X, W))
    close(pallas(X, W, on_miss="error"), formula(X, W))


# Derivatives and batches


def loss(call, used=(True, True, True), **options):
    def of(x, w, bias):
        return sum(jnp.sum(jnp.sin(c)) for c, each in zip(call(x, w, bias=bias, **options), used, strict=True) if each)

    return of


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("used", [(True, True, True), (False, True, False)], ids=str)
def test_gradients_are_those_of_slices_of_the_product(activation, used):
    gradient, expected = (
        jax.grad(loss(f, used, activation=activation), (0, 1, 2))(X, W, BIAS) for f in (pallas, formula)
    )
    close(gradient, expected, 1e-3)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_forward_mode_agrees_and_moves_one_operand_or_all(activation):
    for moving in ((0,), (0, 1, 2)):
        tangents = tuple(jnp.cos(x) if i in moving else jnp.zeros_like(x) for i, x in enumerate((X, W, BIAS)))
        pushed, expected = (
            jax.jvp(lambda x, w, b, f=f: f(x, w, bias=b, activation=activation), (X, W, BIAS), tangents)
            for f in (pallas, formula)
        )
        close(pushed, expected, 1e-3)


@pytest.mark.parametrize("transpose_b", [False, True])
def test_backwards_is_one_product_for_each_operand_whatever_is_used(transpose_b):
    w = W.T if transpose_b else W
    for used in ((True, True, True), (True, False, False)):
        gradient = jax.grad(lambda x, w, u=used: loss(ours, u, transpose_b=transpose_b)(x, w, None), (0, 1))
        forward, *backward = problems(gradient, X[0], w)
        assert forward.split_sizes == "24+8+16"
        assert sorted((p.m, p.n, p.k, p.split_sizes) for p in backward) == sorted(
            [(10, 20, 48, ""), (48, 20, 10, "") if transpose_b else (20, 48, 10, "")]
        )


@pytest.mark.slow
def test_a_hessian_agrees():
    x, w = X[0, :2], W
    for outer, inner in ((jax.jacfwd, jax.jacrev), (jax.jacrev, jax.jacfwd)):
        close(*(outer(inner(lambda x, f=f: loss(f)(x, w, None)))(x) for f in (pallas, formula)), 1e-3)


@pytest.mark.parametrize(
    ("axes", "wider"),
    [
        ((0, None, None), {"m": 40}),
        ((1, None, None), {"m": 40}),
        ((0, 1, 0), {"batch": 4}),
        ((None, 2, None), {"batch": 4}),
        ((None, 0, 0), {"batch": 4}),
    ],
)
def test_vmap_is_one_product_that_gives_the_same_results(axes, wider):
    given = [
        x if axis is None else jnp.stack([x, 2 * x, -x, x + 1], axis)
        for x, axis in zip((X[0], W, BIAS), axes, strict=True)
    ]
    call, expected = (jax.vmap(lambda x, w, b, f=f: f(x, w, bias=b), axes) for f in (pallas, formula))
    close(jax.jit(call)(*given), expected(*given), 1e-3)
    one = MatmulProblem(10, 48, 20, "float32", bias="float32", split_sizes="24+8+16")
    assert problems(call, *given) == [dataclasses.replace(one, **wider)]


def test_vmap_over_biases_alone_accumulates_once():
    biases = jnp.stack([BIAS, -BIAS])
    call, expected = (jax.vmap(lambda b, f=f: f(X[0], W, bias=b, activation="relu")) for f in (pallas, formula))
    close(call(biases), expected(biases))
    (posed,) = problems(call, biases)
    assert (posed.flops, posed.split_sizes) == (2.0 * 10 * 48 * 20, "")


@pytest.mark.parametrize(("policy", "products"), [("dots_saveable", 3), ("nothing_saveable", 4)])
def test_a_policy_for_dots_keeps_the_results(policy, products):
    block = jax.checkpoint(lambda x, w: loss(ours)(x, w, None), policy=getattr(jax.checkpoint_policies, policy))
    gradient = jax.grad(block, (0, 1))
    assert str(jax.make_jaxpr(gradient)(X[0], W)).count("tuned_call[") == products
    close(gradient(X[0], W), jax.grad(lambda x, w: loss(formula)(x, w, None), (0, 1))(X[0], W), 1e-3)


def test_inside_shard_map_results_that_nobody_uses_have_zeros_for_cotangents():
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    spec, everywhere = jax.sharding.PartitionSpec("rows"), jax.sharding.PartitionSpec()
    first = jax.shard_map(lambda x, w: pallas(x, w)[0], mesh=mesh, in_specs=(spec, everywhere), out_specs=spec)
    close(jax.grad(lambda x: jnp.sin(first(x, W)).sum())(X), jax.grad(lambda x: jnp.sin(formula(x, W)[0]).sum())(X))


def test_cotangents_are_joined_where_they_lie_and_zeros_stand_for_none():
    p = MatmulProblem(10, 48, 20, "float32", split_sizes="24+8+16")
    posed = []

    def call(problem, *args):
        posed.append(problem)
        return MATMUL.library.run(problem, Library(), Target("cpu", "cpu", "cpu", 1), *args)

    ct = normal(5, 10, 8)
    da, none = rules.transpose(call, p, (None, ct, None), (None, W))
    assert none is None
    assert posed == [MatmulProblem(10, 20, 48, "float32", transpose_b=True)]
    close(da, ct @ W[:, 24:32].T)
