"""Row programs in functions of plain JAX: which are found, that calls compute the same, and what is left to XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

import scheduler
from scheduler.dispatch import dispatch
from scheduler.dispatch.primitive import tuned_call
from scheduler.rewriting import comparison, noise
from scheduler.rewriting.passes import Rewriter
from search_spaces import recognise
from search_spaces.rows import pattern, written

pytestmark = pytest.mark.slow_but_first

B, S, D, F, V = 4, 16, 32, 64, 48


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Lets small arrays be worth a kernel, and XLA compute the programs, not the equations that they stand for."""
    monkeypatch.setattr(pattern, "LEAST_BYTES", 1)
    monkeypatch.setattr(pattern, "remember", lambda text, function: None)


def normal(*shape, seed=0, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def rewritten(fn, *args):
    def call(operation, problem, params, *operands):
        return tuned_call(
            operation, problem, *operands, params=params, options=dispatch.options(operation, on_miss="xla")
        )

    rewriter = Rewriter(lambda operation, problem: None, call, comparison.region_disagreement, "cpu", last=True)
    return rewriter.rewrite(jax.make_jaxpr(fn)(*args))


def found(fn, *args):
    """Returns the problems of the row programs of a function; the function with calls computes the same."""
    closed, leaves = jax.make_jaxpr(fn)(*args), jax.tree.leaves(args)
    result = rewritten(fn, *args)
    assert not [each.reason for each in result.found if "rows" in each.reason]
    expected = jax.tree.leaves(jax.jit(fn)(*args))
    actual, noisy = jax.jit(core.jaxpr_as_fun(result.jaxpr))(*leaves), jax.jit(noise.with_noise(closed))
    assert comparison.disagreement(expected, actual, lambda seed: noisy(noise.keys(seed), *leaves)) is None
    return [problem for each in result.replaced for operation, problem in each.calls if operation.name == "rows"]


def kinds(problem):
    """Returns the kinds of what a problem reads and writes, rows and sums of rows only."""
    return tuple([x.kind for x in arrays if x.kind.startswith("row")] for arrays in problem.arrays)


def layer_norm(x, scale, bias):
    x32 = x.astype(jnp.float32)
    centred = x32 - x32.mean(-1, keepdims=True)
    y = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return (y * scale + bias).astype(x.dtype)


def rms_norm(x, scale):
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt((x32**2).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype) * scale


def cross_entropy(logits, labels):
    logs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(logs, labels[..., None], -1).mean()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(B, S, D), (D, D), (1, B, S, D)])
def test_a_layer_norm_is_one_program_and_so_are_its_forward_and_backward_pass_together(shape, dtype):
    x, scale, bias = normal(*shape, dtype=dtype), normal(D, seed=1), normal(D, seed=2)
    (forward,) = found(layer_norm, x, scale, bias)
    assert kinds(forward) == (["row"], ["row"])

    def gradients(x, scale, bias, d):
        y, pull = jax.vjp(layer_norm, x, scale, bias)
        return y, pull(d)

    (both,) = found(gradients, x, scale, bias, x[::-1])
    assert sorted(kinds(both)[1]) == ["row", "row", "row sum", "row sum"]


@pytest.mark.parametrize("ddof", [0, 1])
def test_a_norm_by_the_variance_of_jax_is_one_program_without_its_check_of_a_constant(ddof):
    """`jnp.var` selects NaN where the number of elements less `ddof` is not positive."""

    def norm(x, scale, bias):
        centred = x - x.mean(-1, keepdims=True)
        return centred * jax.lax.rsqrt(x.var(-1, keepdims=True, ddof=ddof) + 1e-5) * scale + bias

    def gradients(x, scale, bias, d):
        y, pull = jax.vjp(norm, x, scale, bias)
        return y, pull(d * jnp.tanh(y))

    x, scale, bias = normal(B, S, D, dtype=jnp.bfloat16), normal(D, seed=1), normal(D, seed=2)
    (both,) = found(gradients, x, scale, bias, normal(B, S, D, seed=3))
    assert {each.dtype for arrays in both.arrays for each in arrays} == {"bfloat16", "float32"}


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float32, jnp.bfloat16, jnp.bool_])
def test_equations_of_constants_are_computed_as_xla_does(dtype):
    one, other = (jnp.asarray(x, dtype) for x in (100, 77))

    def of_constants(x, one, other):
        total = one + other if dtype == jnp.bool_ else one * other - one
        return jnp.where(total > other, x + total.astype(x.dtype), -x)

    def folded(x):
        return jax.jit(of_constants)(x, np.asarray(one), np.asarray(other))

    x = normal(B, D)
    graph = recognise.graph(jax.make_jaxpr(folded)(x).jaxpr)
    assert [node.name for node in graph.nodes if not node.results[0].shape] == []
    (actual,) = recognise.evaluate(list(graph.nodes), {id(graph.inputs[0]): x}, graph.results)
    unit = float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.inexact) else 0.0  # XLA may keep more bits
    np.testing.assert_allclose(actual, jax.jit(folded)(x), rtol=2 * unit)


@pytest.mark.parametrize("index", [-1, 0, 2, 3])
def test_a_constant_index_selects_among_three_cases_as_xla_does(index):
    def selected(x, y, scale):
        return jax.lax.select_n(np.int32(index), x, y, x + y), layer_norm(x, scale, scale)

    assert found(selected, normal(B, S, D), normal(B, S, D, seed=1), normal(D, seed=2))


def test_an_equation_of_a_constant_without_a_result_stays():
    def printed(x, scale):
        jax.debug.callback(lambda number: None, np.float32(3))
        return layer_norm(x, scale, scale)

    assert len(rewritten(printed, normal(B, S, D), normal(D, seed=2)).replaced) == 1


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.int8, jnp.int4])
def test_a_constant_that_an_integer_cannot_hold_is_cast_as_xla_casts_it(dtype):
    def step(x, more):
        return jax.nn.softmax(x), jax.lax.convert_element_type(jax.lax.add(np.float32(1e10), more), dtype)

    def folded(x):
        return jax.jit(step)(x, np.float32(1))

    x = normal(B, S, D)
    result = rewritten(folded, x)
    assert result.replaced
    _, actual = core.jaxpr_as_fun(result.jaxpr)(x)
    assert int(actual) == int(jax.jit(step)(x, np.float32(1))[1])


def test_the_backward_pass_of_a_norm_reads_what_the_forward_pass_reads_and_elements_per_row():
    def loss(x, w, scale):
        return jnp.tanh(rms_norm(x, scale) @ w).sum()

    x, w, scale = normal(B, S, D, dtype=jnp.bfloat16), normal(D, F, dtype=jnp.bfloat16), normal(D, dtype=jnp.bfloat16)
    forward, backward = found(jax.grad(lambda *args: loss(*args).astype(jnp.float32), argnums=(0, 2)), x, w, scale)
    assert (kinds(forward), len(kinds(backward)[0])) == ((["row"], ["row"]), 2)


def test_a_sum_of_two_arrays_and_its_norm_are_one_program_with_both_results():
    def step(x, more, scale, w):
        x = x + more
        return x, rms_norm(x, scale) @ w

    x = normal(B, S, D, dtype=jnp.bfloat16)
    (norm,) = found(step, x, x[::-1], normal(D, dtype=jnp.bfloat16), normal(D, F, dtype=jnp.bfloat16))
    assert kinds(norm) == (["row", "row"], ["row", "row"])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_cross_entropy_and_its_gradient_read_the_logits_once(dtype):
    logits, labels = normal(B, S, V, dtype=dtype), jnp.arange(B * S).reshape(B, S) % V
    (both,) = found(jax.value_and_grad(cross_entropy), logits, labels)
    assert kinds(both) == (["row"], ["row"])
    assert "scalar" in [x.kind for x in both.arrays[0]]  # the labels


def test_a_softmax_in_a_larger_function_is_found_between_the_products():
    def fn(x, w, mask):
        return jax.nn.softmax(jnp.where(mask, x @ w, -1e9), axis=-1) @ w.T

    (softmax,) = found(fn, normal(B, S, D), normal(D, V), jnp.arange(V) < V - 3)
    assert kinds(softmax) == (["row"], ["row"])


def attention(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def block(p, x, labels):
    h = layer_norm(x, p["scale_1"], p["bias_1"])
    q, k, v = (each.reshape(B, S, 2, D // 2) for each in jnp.split(h @ p["qkv"], 3, -1))
    x = x + attention(q, k, v).reshape(x.shape) @ p["o"] + p["bias_o"]
    h = rms_norm(x, p["scale_2"])
    x = x + jax.nn.gelu(h @ p["up"] + p["bias_up"]) @ p["down"]
    return cross_entropy(x @ p["head"], labels)


def parameters():
    shapes = {"qkv": (D, 3 * D), "o": (D, D), "up": (D, F), "down": (F, D), "head": (D, V)}
    vectors = {"scale_1": D, "bias_1": D, "bias_o": D, "scale_2": D, "bias_up": F}
    weights = {name: normal(*shape, seed=i) / 8 for i, (name, shape) in enumerate(shapes.items())}
    return weights | {name: normal(n, seed=n) for name, n in vectors.items()}


def test_the_gradient_of_a_transformer_block_has_programs_around_attention_and_products():
    args = parameters(), normal(B, S, D), jnp.arange(B * S).reshape(B, S) % V
    problems = found(jax.value_and_grad(block, argnums=(0, 1)), *args)
    names = [
        operation.name for each in rewritten(jax.value_and_grad(block), *args).replaced for operation, _ in each.calls
    ]
    assert names[:2] == ["flash_attention", "flash_attention_backward"]  # not a softmax and its backward pass
    # Two norms, the loss, the gradient of the activation with its bias, and the backward passes of both norms.
    assert len(problems) == 6
    sums = [kinds(each)[1].count("row sum") for each in problems]
    assert sum(sums) == len([name for name in args[0] if name.startswith(("scale", "bias"))])


def test_norms_within_scans_and_checkpoints_are_found():
    def loss(scales, x):
        def layer(x, scale):
            return x + jnp.tanh(rms_norm(x, scale) @ jnp.ones((D, D)) / D), None

        return (jax.lax.scan(jax.checkpoint(layer), x, scales)[0] ** 2).sum()

    problems = found(jax.grad(loss, argnums=(0, 1)), normal(3, D), normal(B, S, D))
    assert len(problems) >= 2


def test_products_and_elementwise_functions_have_no_programs():
    def products(x, w):
        return jnp.tanh(x @ w) @ w.T

    def elementwise(x, y):
        return jax.nn.gelu(x * y + 1) * jax.nn.silu(y)

    def sums(x, y):
        return (x * y).sum(), (x * y).sum(0), x.max()

    x = normal(B, S, D)
    assert found(products, x, normal(D, F)) == []
    assert found(elementwise, x, x + 1) == []
    assert found(sums, x, x + 1) == []
    assert found(lambda x: x.sum(-1), x) == []  # a reduction alone: XLA computes it as well


def test_small_arrays_are_left_to_xla(monkeypatch):
    monkeypatch.undo()
    assert found(layer_norm, normal(B, S, D), normal(D), normal(D)) == []


def test_no_input_of_a_region_depends_on_a_result():
    """A gradient of a norm reads what a product computes of the norm; a program of both could never run."""

    def norm_of_norm(x, w):
        y = jax.nn.softmax(x, axis=-1)
        return jax.nn.softmax(y @ w + y + x, axis=-1) * y

    def crossed(x, w):
        a, b = x.max(-1, keepdims=True), (x * x).sum(-1, keepdims=True)
        left, right = (x - a) @ w, (x / b) @ w
        return (left - left.max(-1, keepdims=True)) @ w + x / b, (right / right.sum(-1, keepdims=True)) @ w + x - a

    x, w = normal(B, S, D), normal(D, D)
    assert len(found(norm_of_norm, x, w)) == 2
    assert found(crossed, x, w)
    assert found(jax.grad(lambda *args: norm_of_norm(*args).sum(), argnums=(0, 1)), x, w)
    assert found(jax.grad(lambda *args: sum((y**2).sum() for y in crossed(*args))), x, w)


def test_a_tuned_call_stays_what_it_is():
    def fn(x):
        return scheduler.tuned_softmax(x, on_miss="xla") @ jnp.ones((D, D))

    assert found(fn, normal(B, S, D)) == []


def test_what_kernels_do_not_compute_is_in_no_program():
    def cumulated(x):
        return x / jnp.cumsum(x, axis=-1).max(-1, keepdims=True)

    def of_integers(x):
        return x - x.sum(-1, keepdims=True)

    assert all(kinds(each)[0] for each in found(cumulated, normal(B, S, D)))
    assert found(of_integers, jnp.arange(B * S * D).reshape(B, S, D)) == []


def test_optimize_runs_programs_and_names_their_lines():
    args = normal(B, S, D), normal(D), normal(D, seed=1)
    fast = scheduler.optimize(layer_norm, backends="interpret", keep="tuned")
    np.testing.assert_allclose(fast(*args), layer_norm(*args), rtol=1e-5, atol=1e-5)
    (decided,) = fast.decisions
    assert [(each.operation, each.backend) for each in decided.replaced] == [("rows", "interpret")]
    assert "test_row_regions.py" in decided.replaced[0].line
    assert "equations" not in fast.report()
    assert [row.operation.name for row in scheduler.problems(fast, *args)] == ["rows"]


def test_the_reference_of_a_region_is_its_equations(monkeypatch):
    monkeypatch.setattr(pattern, "remember", written.remember)

    def normalized(x):
        most = jnp.max(jnp.abs(x), -1, keepdims=True)
        return x / (most * jnp.sqrt(jnp.sum(jnp.square(x / most), -1, keepdims=True)))

    x = normal(16, 32)
    (problem,) = found(normalized, x)
    np.testing.assert_allclose(problem.reference(x * 1e25), normalized(x * 1e25), rtol=1e-6)


@pytest.mark.parametrize("kind", ["", "huge", "halves"])
def test_a_program_is_compared_where_squares_overflow_and_on_rows_of_zeros(kind):
    def safe(x):
        largest = jnp.abs(x).max(-1, keepdims=True)
        return x / (largest * jnp.sqrt(jnp.square(x / largest).sum(-1, keepdims=True)))

    def call(operation, problem, params, x):
        overflows = jnp.isfinite(x).all() & jnp.isinf((x * x).sum())
        return {"huge": jnp.where(overflows, 0, safe(x)), "halves": jnp.nan_to_num(safe(x))}.get(kind, safe(x))

    rewriter = Rewriter(lambda operation, problem: None, call, comparison.region_disagreement, last=True)
    (found,) = rewriter.rewrite(jax.make_jaxpr(safe)(normal(S + len(kind), D))).found
    assert found.reason.endswith(f"({kind} operands)" if kind else "")
    assert bool(found.reason) is bool(kind)


def test_one_program_that_disagrees_leaves_the_others():
    def call(operation, problem, params, *operands):
        results = problem.reference(*operands)
        return jax.tree.map(lambda x: x + (problem.rows == S), results)

    def both(x, y):
        return jax.nn.softmax(x, axis=-1), jax.nn.softmax(y, axis=-1)

    rewriter = Rewriter(lambda operation, problem: None, call, comparison.region_disagreement, last=True)
    result = rewriter.rewrite(jax.make_jaxpr(both)(normal(S, D), normal(2 * S, D)))
    assert ["disagree" in each.reason for each in result.found] == [True, False]
