"""The gated product: what a call means, its problem, its derivatives, and under which transformations it works."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scheduler
from scheduler import tuned_gated_matmul
from search_spaces import Columns, load
from search_spaces.fingerprint import all_equations
from search_spaces.gated_matmul import GATED_MATMUL, GatedMatmulProblem
from search_spaces.kernel import Library
from search_spaces.target import Target

pytestmark = pytest.mark.slow_but_first

CPU = Target("cpu", "cpu", "cpu", 1)
M, N, K = 24, 20, 48
ACTIVATIONS = {"silu": jax.nn.silu, "gelu": jax.nn.gelu, "relu": jax.nn.relu}


def normal(number, *shape, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(number), shape, jnp.float32).astype(dtype)


X, GATE, UP = normal(0, 2, 3, 4, K) * K**-0.5, normal(1, K, N), normal(2, K, N)
GATE_BIAS, UP_BIAS = normal(3, N), normal(4, N)
W, BIAS = jnp.concatenate([GATE, UP], axis=1), jnp.concatenate([GATE_BIAS, UP_BIAS])
X = X.astype(jnp.bfloat16)


def formula(x, gate, up, gate_bias=None, up_bias=None, activation="silu"):
    x, gate, up = (y.astype(jnp.float32) for y in (x, gate, up))
    g, u = x @ gate, x @ up
    if gate_bias is not None:
        g, u = g + gate_bias.astype(jnp.float32), u + up_bias.astype(jnp.float32)
    return ACTIVATIONS[activation](g) * u


def close(actual, expected, times=1.0):
    eps = 2.0**-8
    assert actual.shape == expected.shape
    np.testing.assert_allclose(
        np.asarray(actual, np.float32), np.asarray(expected, np.float32), rtol=times * eps, atol=times * 2e-3
    )


def near(actual, expected):
    """As two ways to round in between differ: by a share of the largest."""
    assert actual.shape == expected.shape
    actual, expected = (np.asarray(x, np.float32) for x in (actual, expected))
    assert np.abs(actual - expected).max() < 2.0**-6 * np.abs(expected).max()


COTANGENT = normal(9, 2, 3, 4, N, dtype=jnp.float32)


@pytest.fixture(autouse=True)
def _no_answers():
    scheduler.reload()


FORMS = {  # name: w, bias, options
    "joined": (W, None, {}),
    "joined, bias": (W, BIAS, {}),
    "a pair": ((GATE, UP), None, {}),
    "a pair, bias": ((GATE, UP), (GATE_BIAS, UP_BIAS), {}),
    "joined, transposed": (W.T, BIAS, {"transpose_w": True}),
    "a pair, transposed": ((GATE.T, UP.T), (GATE_BIAS, UP_BIAS), {"transpose_w": True}),
    "joined, a pair of biases": (W, (GATE_BIAS, UP_BIAS), {}),
    "a pair, one bias": ((GATE, UP), BIAS, {}),
}
every = pytest.mark.parametrize("form", FORMS)


def expected(form, x=X, **how):
    biases = () if FORMS[form][1] is None else (GATE_BIAS, UP_BIAS)
    return formula(x, GATE, UP, *biases, **how)


@every
def test_every_form_of_weights_and_biases_means_the_same(form):
    w, bias, how = FORMS[form]
    for backends in (None, "pallas"):
        close(tuned_gated_matmul(X, w, bias=bias, backends=backends, **how), expected(form))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_jaxs(activation):
    out = tuned_gated_matmul(X, W, activation=activation, backends="pallas")
    close(out, formula(X, GATE, UP, activation=activation))


def test_one_row_and_jitted_calls_and_float16():
    close(jax.jit(tuned_gated_matmul)(X[0, 0, 0], W), expected("joined", X[0, 0, 0]))
    half = [y.astype(jnp.float16) for y in (X, W)]
    out = tuned_gated_matmul(*half, backends="pallas")
    assert out.dtype == jnp.float16
    np.testing.assert_allclose(
        out.astype(jnp.float32), formula(half[0], *jnp.split(half[1], 2, 1)), rtol=2**-10, atol=2e-4
    )


def test_the_result_is_rounded_once():
    out, exact = tuned_gated_matmul(X, W, backends="pallas"), expected("joined")
    np.testing.assert_allclose(out.astype(jnp.float32), exact, rtol=0.51 * 2**-7, atol=2e-6)


def test_the_interpret_kernel_is_in_the_program_where_it_is_asked_for():
    assert "while" in jax.jit(lambda x: tuned_gated_matmul(x, W, backends="pallas")).lower(X).as_text()
    assert "while" not in jax.jit(lambda x: tuned_gated_matmul(x, W)).lower(X).as_text()


@every
def test_gradients_are_those_of_the_formula(form):
    w, bias, how = FORMS[form]

    def loss(x, w, bias):
        return jnp.sum(COTANGENT * tuned_gated_matmul(x, w, bias=bias, **how).astype(jnp.float32))

    def plain(x, gate, up, *biases):
        return jnp.sum(COTANGENT * formula(x, gate, up, *biases))

    arguments = (0, 1) if bias is None else (0, 1, 2)
    dx, dw, *dbias = jax.jit(jax.grad(loss, argnums=arguments))(X, w, bias)
    biases = () if bias is None else (GATE_BIAS, UP_BIAS)
    wanted = jax.grad(plain, argnums=tuple(range(3 + len(biases))))(X, GATE, UP, *biases)
    near(dx, wanted[0])
    dw = jax.tree.map(lambda y: y.T, dw) if how else dw
    joined = dw if isinstance(dw, jax.Array) else jnp.concatenate(dw, axis=1)
    near(joined, jnp.concatenate(wanted[1:3], axis=1))
    if dbias:
        (dbias,) = dbias
        joined = dbias if isinstance(dbias, jax.Array) else jnp.concatenate(dbias)
        near(joined, jnp.concatenate(wanted[3:]))


def test_forward_mode_agrees_with_the_formula():
    out = jax.jvp(lambda x: tuned_gated_matmul(x, W), (X,), (jnp.cos(X),))
    for actual, wanted in zip(out, jax.jvp(lambda x: formula(x, GATE, UP), (X,), (jnp.cos(X),)), strict=True):
        near(actual, wanted)


def called(jaxpr):
    """The problems that a jaxpr's tuned calls pose, as text."""
    calls = (eqn.params for eqn in all_equations(jaxpr) if eqn.primitive.name == "tuned_call")
    return [f"{params['operation'].name} {params['problem']}" for params in calls]


def test_backward_products_are_tuned_matmuls_of_both_halves_at_once():
    def loss(x, w):
        return jnp.sum(tuned_gated_matmul(x, w).astype(jnp.float32))

    problems = called(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(X, W))
    assert sorted(problems) == sorted(
        [
            f"matmul m={M} n={2 * N} k={K} dtype=bfloat16",
            f"silu_and_mul rows={M} columns={N} dtype=bfloat16",
            f"silu_and_mul_backward rows={M} columns={N} dtype=bfloat16",
            f"matmul m={M} n={K} k={2 * N} dtype=bfloat16 transpose_b=True",
            f"matmul m={K} n={2 * N} k={M} dtype=bfloat16 transpose_a=True",
        ]
    )


def test_a_checkpoint_that_saves_dots_recomputes_no_product():
    def loss(x):
        block = jax.checkpoint(lambda x: tuned_gated_matmul(x, W), policy=jax.checkpoint_policies.dots_saveable)
        return jnp.sum(COTANGENT * block(x).astype(jnp.float32))

    problems = called(jax.make_jaxpr(jax.grad(loss))(X))
    assert problems.count(f"matmul m={M} n={2 * N} k={K} dtype=bfloat16") == 1
    near(jax.grad(loss)(X), jax.grad(lambda x: jnp.sum(COTANGENT * formula(x, GATE, UP)))(X))


def test_vmapped_rows_are_more_rows_of_one_call():
    mapped = jax.vmap(lambda x: tuned_gated_matmul(x, (GATE, UP), backends="pallas"), in_axes=1)
    close(mapped(X), jnp.moveaxis(expected("joined"), 1, 0))
    assert called(jax.make_jaxpr(mapped)(X)) == [f"gated_matmul m={M} n={N} k={K} dtype=bfloat16 pair=True"]


def test_vmapped_weights_take_a_call_each():
    experts, biases = jnp.stack([W, W * 2]), jnp.stack([BIAS, -BIAS])
    out = jax.vmap(lambda x, w, b: tuned_gated_matmul(x, w, bias=b))(X, experts, biases)
    for number, (x, w, b) in enumerate(zip(X, experts, biases, strict=True)):
        close(out[number], formula(x, *jnp.split(w, 2, 1), *jnp.split(b, 2)))
    shared = jax.vmap(lambda w: tuned_gated_matmul(X, w))(experts)
    close(shared[1], formula(X, *jnp.split(experts[1], 2, 1)))


def test_inside_shard_map_and_scan():
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("rows")
    whole = jax.sharding.PartitionSpec()
    mapped = jax.shard_map(
        lambda x, w: tuned_gated_matmul(x, w, backends="pallas"), mesh=mesh, in_specs=(rows, whole), out_specs=rows
    )
    close(mapped(X, W), expected("joined"))
    _, out = jax.lax.scan(lambda carry, x: (carry, tuned_gated_matmul(x, W)), 0, X)
    close(out, expected("joined"))


def test_other_dtypes_are_answered_by_the_formula():
    wide = [y.astype(jnp.float32) for y in (X, W)]
    out = tuned_gated_matmul(*wide)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, expected("joined"), rtol=1e-5, atol=1e-5)
    mixed = tuned_gated_matmul(wide[0], W)
    assert mixed.dtype == jnp.float32
    assert tuned_gated_matmul(X[:0], W).shape == (0, 3, 4, N)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda **how: tuned_gated_matmul(X.astype("float32"), W.astype("float32"), **how), "x is float32; kernels"),
        (lambda **how: tuned_gated_matmul(X, W.astype("float16"), **how), "x is bfloat16 and the weights are float16"),
        (lambda **how: tuned_gated_matmul(X[:0], W, **how), "x is empty"),
    ],
)
def test_who_leaves_xla_out_is_told_why_no_kernel_can_be_asked(call, why, caplog):
    with pytest.raises(scheduler.NoCandidate, match=rf"{why}.*only xla can run"):
        call(backends="pallas")
    with caplog.at_level(logging.DEBUG, "scheduler"):
        call(on_miss="error")
    assert why in caplog.text


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: tuned_gated_matmul(X, W[:, :-1]), ValueError, "has 39 columns: gate and up are halves of it"),
        (lambda: tuned_gated_matmul(X, W[:-1]), ValueError, r"x \(2, 3, 4, 48\) and w \(47, 40\) do not multiply"),
        (lambda: tuned_gated_matmul(X, (GATE, UP[:, 1:])), ValueError, r"of a pair one shape, not \(48, 20\) and"),
        (lambda: tuned_gated_matmul(X, (GATE, UP, UP)), ValueError, r"w must be one array or a pair .*found 3"),
        (lambda: tuned_gated_matmul(X, W, bias=BIAS[1:]), ValueError, r"the bias has shape \(40,\), not \(39,\)"),
        (lambda: tuned_gated_matmul(X, W, bias=(BIAS, BIAS)), ValueError, r"each bias of a pair has shape \(20,\)"),
        (lambda: tuned_gated_matmul(X, W, activation="tanh"), ValueError, "activation='tanh' is not one of relu"),
        (
            lambda: tuned_gated_matmul(X.astype("int8"), W.astype("int8")),
            TypeError,
            "products of int8 take no activation: give x and w as real numbers of 16 bits or more",
        ),
        (lambda: tuned_gated_matmul(X, W, on_miss="error"), scheduler.CacheMiss, "tile-scheduler tune gated_matmul m="),
    ],
)
def test_wrong_operands_raise_one_sentence(call, error, says):
    with pytest.raises(error, match=says):
        call()


def test_a_problem_says_what_is_moved_and_computed():
    p = GatedMatmulProblem(4096, 14336, 4096)
    assert p.flops == 4 * 4096 * 14336 * 4096
    assert p.bytes_moved == 2 * (4096 * 4096 + 2 * 4096 * 14336 + 4096 * 14336)
    assert p.library_bytes_moved == p.bytes_moved + 2 * (2 * 4096 * 14336 * 4)
    assert p.canonical() == '{"k":4096,"m":4096,"n":14336}'
    pair = dataclasses.replace(p, pair=True, bias="bfloat16", transpose_w=True)
    assert [s.shape for s in pair.operands()] == [(4096, 4096), *[(14336, 4096)] * 2, *[(14336,)] * 2]
    assert GatedMatmulProblem.of(*pair.operands(), pair=True, transpose_w=True) == pair
    assert GatedMatmulProblem.from_canonical(pair.canonical()) == pair
    assert p.neighbour() == GatedMatmulProblem(4095, 14333, 4091)


def test_rows_of_a_problem_are_a_problem_of_those_rows():
    p = GatedMatmulProblem(30, 24, 40, bias="float32")
    args, rows = p.inputs(0), np.array([2, 3, 17])
    few, take = p.at_rows(rows)
    np.testing.assert_array_equal(few.reference(*take(args)), p.reference(*args)[rows])


@pytest.mark.parametrize("fields", [{"m": 0}, {"activation": ""}, {"dtype": "float32"}, {"bias": "int8"}], ids=str)
def test_fields_that_cannot_be_meant_are_refused(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        GatedMatmulProblem(**{"m": 8, "n": 8, "k": 8} | fields)


@pytest.mark.parametrize("program", ["float32", "plain"])
@pytest.mark.parametrize("fields", [{}, {"pair": True, "bias": "float32"}, {"bias": "bfloat16", "transpose_w": True}])
def test_both_programs_of_the_library_are_right(program, fields):
    p = GatedMatmulProblem(64, 48, 96, **fields)
    args, library = p.inputs(0), GATED_MATMUL.library
    tolerance = library.tolerance(p, Library(program))
    out = library.run(p, Library(program), CPU, *args)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        out.astype(jnp.float32), p.reference(*args), atol=tolerance.absolute, rtol=tolerance.relative
    )


@pytest.mark.parametrize(
    "problem",
    [
        GatedMatmulProblem(33, 20, 70, bias="bfloat16"),
        GatedMatmulProblem(70, 33, 40, transpose_w=True, pair=True, activation="gelu"),
    ],
    ids=str,
)
def test_schedules_of_the_interpreter_are_right(problem):
    kernel = GATED_MATMUL.kernel("interpret")
    args, tolerance = problem.inputs(0), problem.tolerance()
    space = kernel.space(problem, CPU)
    points, _ = space.legal()
    assert kernel.footprint(problem, points, CPU).onchip_bytes.min() > 0
    for one in list(space.schedules(points))[:: max(1, len(points) // 6)]:
        out = jax.jit(lambda *args, one=one: kernel.run(problem, one, CPU, *args))(*args)
        np.testing.assert_allclose(
            out.astype(jnp.float32), problem.reference(*args), atol=tolerance.absolute, rtol=tolerance.relative
        )


def test_a_search_finds_and_a_call_serves_a_schedule():
    record = scheduler.tune("gated_matmul", GatedMatmulProblem(M, N, K), budget=3)
    assert record.tried >= 2
    close(tuned_gated_matmul(X, W, on_miss="error", backends="pallas"), expected("joined"))
    schedule = {"tile_m": 16, "tile_n": 16, "tile_k": 16}
    close(tuned_gated_matmul(X, W, schedule=schedule), expected("joined"))


def test_tuned_takes_the_operands_of_the_problem():
    call = scheduler.tuned(load("gated_matmul"))
    flat = X.reshape(M, K)
    close(call(flat, GATE, UP, pair=True, backends="pallas"), expected("joined", flat))
    close(call(flat, W, bias=BIAS), expected("joined, bias", flat))
    assert call.problem(flat, W, activation="relu") == GatedMatmulProblem(M, N, K, activation="relu")


def test_the_model_ranks_the_fused_kernel_before_the_library_without_being_told_of_it():
    from scheduler.core import hardware
    from scheduler.model.cost import CostModel
    from scheduler.model.pruning import prune

    h200 = hardware.find("NVIDIA H200")
    for m in (16, 256):
        problem = GatedMatmulProblem(m, 14336, 4096)
        first = prune(GATED_MATMUL.kernel("mosaic_gpu"), problem, h200, CostModel(h200)).candidates()[0]
        library = prune(GATED_MATMUL.library, problem, h200, CostModel(h200)).candidates()[0]
        assert first.predicted_s < library.predicted_s
        kernel = GATED_MATMUL.kernel("mosaic_gpu")
        one = Columns.of([kernel.space(problem, h200.target).decode(first.schedule)])
        assert kernel.footprint(problem, one, h200.target).launches[0] == 1
