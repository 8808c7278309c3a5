"""Attention in functions of plain JAX: which is found, that what replaces it computes the same, and what is left."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core

import scheduler
from scheduler.cli.app import main
from scheduler.dispatch.primitive import library
from scheduler.rewriting import comparison, noise
from scheduler.rewriting.passes import Rewriter
from scheduler.search import jobs

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from attention_corpus import FORMS, Form, einsum, rewritten

pytestmark = pytest.mark.slow_but_first

SHAPE = (2, 64, 4, 16)


def _qkv(dtype=jnp.float32, shape=SHAPE):
    keys = jax.random.split(jax.random.key(0), 3)
    return tuple(jax.random.normal(key, shape, jnp.float32).astype(dtype) for key in keys)


def _by_library(operation, problem, params, *operands):
    return problem.pack(library(operation, problem, params, *operands))


def _rewritten(fn, *args):
    rewriter = Rewriter(lambda operation, problem: None, _by_library, comparison.region_disagreement)
    return rewriter.rewrite(jax.make_jaxpr(fn)(*args))


def _reasons(fn, *args):
    return [each.reason for each in _rewritten(fn, *args).found]


def _is_close(expected, actual):
    for right, got in zip(expected, actual, strict=True):
        right, got = (np.asarray(x, np.float64) for x in (right, got))
        assert np.linalg.norm(right - got) <= 0.03 * np.linalg.norm(right) + 1e-6


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_attention_of_every_form_is_found_and_computes_the_same(form: Form):
    closed = jax.jit(form.function).trace(*form.arguments).jaxpr
    found = Rewriter(lambda operation, problem: None, _by_library, lambda region, calls: None).rewrite(closed)
    if form.why_not:
        assert [form.why_not in each.reason for each in found.found] == [True]
        assert found.jaxpr is closed
        return
    assert [each.reason for each in found.found] == [""] * form.attention
    if "gradient" not in form.name and "training" not in form.name:  # the gradient depends on the result, too
        return
    leaves = jax.tree.leaves(form.arguments)
    plain, tuned = (jax.jit(core.jaxpr_as_fun(each)) for each in (closed, found.jaxpr))
    noisy = jax.jit(noise.with_noise(closed))
    moved = lambda seed: noisy(noise.keys(seed), *leaves)  # noqa: E731
    assert comparison.disagreement(plain(*leaves), tuned(*leaves), moved) is None


def test_noise_keeps_a_python_bool_of_a_mask():
    x = jnp.arange(4.0)
    closed = jax.make_jaxpr(lambda x: jnp.where(True & (x > 1), jnp.exp(x), 0))(x)
    (found,) = jax.jit(noise.with_noise(closed))(noise.keys(0), x)
    np.testing.assert_allclose(found, np.where(x > 1, np.exp(x), 0), rtol=1e-5)


def test_most_of_the_corpus_is_found():
    found = [not any(each.reason for each in rewritten(form)) for form in FORMS]
    assert sum(found) / len(found) >= 0.9


def softmax(logits):
    return jax.nn.softmax(logits, axis=-1)


def _with(change_logits=lambda s: s, weights=softmax, change=lambda p: p):
    def attention(q, k, v):
        logits = jnp.einsum("bthd,bshd->bhts", q, k)
        return jnp.einsum("bhts,bshd->bthd", change(weights(change_logits(logits))), v)

    return attention


def _causal(s, hidden=-1e30):
    return jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, hidden)


def _windowed(s):
    return jnp.where(jnp.triu(jnp.ones(s.shape[-2:], bool), -3), s, -1e30)


def _capped(s):
    return 3 * jnp.tanh(s / 3)


@jax.custom_vjp
def tenth(x):
    return x


tenth.defvjp(lambda x: (x, None), lambda _, g: (g / 10,))


def _off_by_one(s):
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return e / (1 + e.sum(-1, keepdims=True))


SEGMENTS = jnp.array([[0] * 40 + [1] * 24] * 2)
LEFT_ALONE = {
    "softmax with one more in the denominator": _with(weights=_off_by_one),
    "softmax along the queries": _with(weights=lambda s: jax.nn.softmax(s, axis=-2)),
    "probabilities that are squared": _with(change=lambda p: p * p),
    "probabilities of a temperature per head": _with(lambda s: s * jnp.arange(1.0, 5.0)[:, None, None]),
    "a negative scale": _with(lambda s: -s),
    "a dropout": _with(change=lambda p: p * jax.random.bernoulli(jax.random.key(0), 0.9, p.shape)),
    "a mask of random keys": _with(lambda s: jnp.where(jax.random.bernoulli(jax.random.key(1), 0.5, s.shape), s, -1e9)),
    "a mask of segments": _with(lambda s: jnp.where((SEGMENTS[:, :, None] == SEGMENTS[:, None])[:, None], s, -1e9)),
    "a mask along the other diagonal": _with(lambda s: jnp.where(jnp.tril(jnp.ones(s.shape[-2:]))[::-1] > 0, s, -1e9)),
    "a mask of small numbers": _with(lambda s: jnp.where(jnp.tril(jnp.ones(s.shape[-2:])) > 0, s, -3.0)),
    "a bias": _with(lambda s: s + jnp.linspace(0, 1, s.shape[-1])),
    "logits that are clipped": _with(lambda s: jnp.clip(s, -1, 1)),
    "logits that are cubed": _with(lambda s: s**3),
    "a softcap after the mask": _with(lambda s: _capped(_causal(s))),
    "a softcap after a mask that is added": _with(lambda s: _capped(s + _causal(jnp.zeros_like(s)))),
    "masked logits that are scaled to nothing": _with(lambda s: _causal(s) * 1e-30),
    "a mask that a scale weakens": _with(lambda s: _causal(s, -2e4) / 4),
    "the probabilities as a second result": lambda q, k, v: (
        _with()(q, k, v),
        softmax(jnp.einsum("bthd,bshd->bhts", q, k)),
    ),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_is_no_attention_is_left_alone(name):
    operands = _qkv()
    for fn in (
        LEFT_ALONE[name],
        jax.grad(lambda *args: sum(jnp.sum(x) for x in jax.tree.leaves(LEFT_ALONE[name](*args)))),
    ):
        found = _rewritten(fn, *operands)
        replaced = [each for each in found.found if not each.reason]
        if "second result" in name and replaced:  # each is computed by itself, and the second does not need the first
            _is_close(
                *(
                    jax.tree.leaves(core.jaxpr_as_fun(x)(*operands))
                    for x in (jax.make_jaxpr(fn)(*operands), found.jaxpr)
                )
            )
            continue
        assert not replaced


def test_the_loss_of_a_language_model_is_no_attention():
    def loss(weights, x, labels):
        logits = x @ weights
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1).mean()

    args = jnp.ones((32, 64)), jnp.ones((4, 16, 32)), jnp.zeros((4, 16), jnp.int32)
    assert _reasons(jax.grad(loss, argnums=(0, 1)), *args) == []


def test_a_region_whose_calls_disagree_is_left_alone():
    def wrong(operation, problem, params, *operands):
        return jax.tree.map(lambda x: x * 1.05, _by_library(operation, problem, params, *operands))

    found = Rewriter(lambda operation, problem: None, wrong, comparison.region_disagreement).rewrite(
        jax.make_jaxpr(lambda q, k, v: _with(lambda s: s * 0.3)(q, k, v))(*_qkv())
    )
    assert ["disagree with its equations" in each.reason for each in found.found] == [True]


@pytest.mark.parametrize("seed", range(10))
def test_random_attention_computes_the_same(seed):
    """Extents, layouts, scales, masks, softcaps and gradients are drawn."""
    rng = np.random.default_rng(seed)
    batch, heads, group, d, e = (int(rng.choice(x)) for x in ((1, 2, 3), (1, 2, 4), (1, 2, 3), (8, 16), (8, 24)))
    q_len, kv_len = int(rng.integers(2, 70)), int(rng.integers(2, 70))
    letters = {"q": "btkgd", "k": "bskd", "v": "bske"}
    orders = {name: "".join(rng.permutation(list(axes))) for name, axes in letters.items()}
    extents = dict(zip("btkgsde", (batch, q_len, heads, group, kv_len, d, e), strict=True))
    logits_order, out_order = ("".join(rng.permutation(list(axes))) for axes in ("bkgts", "btkge"))
    scale, cap = float(rng.uniform(0.1, 1)), float(rng.choice([0, 5]))
    left, right = int(rng.integers(0, 80)), int(rng.integers(0, 80))
    masked = rng.random() < 0.7 and q_len <= kv_len

    def attention(q, k, v):
        s = jnp.einsum(f"{orders['q']},{orders['k']}->{logits_order}", q, k) * scale
        s = cap * jnp.tanh(s / cap) if cap else s
        if masked:
            rows, columns = (
                jax.lax.broadcasted_iota(jnp.int32, s.shape, logits_order.index(axis)) for axis in ("t", "s")
            )
            s = jnp.where((columns - rows <= right) & (rows - columns <= left), s, -1e30)
        p = jax.nn.softmax(s, axis=logits_order.index("s"))
        return jnp.einsum(f"{logits_order},{orders['v']}->{out_order}", p, v)

    keys = jax.random.split(jax.random.key(seed), 3)
    operands = [
        jax.random.normal(key, [extents[axis] for axis in orders[name]]) for key, name in zip(keys, "qkv", strict=True)
    ]
    for fn in (attention, jax.grad(lambda *args: jnp.sum(jnp.sin(attention(*args))), argnums=(0, 1, 2))):
        found = _rewritten(fn, *operands)
        assert [each.reason for each in found.found] == [""]
        _is_close(*(jax.jit(core.jaxpr_as_fun(x))(*operands) for x in (jax.make_jaxpr(fn)(*operands), found.jaxpr)))


def test_optimize_replaces_attention_by_kernels_and_names_the_line():
    def step(q, k, v):
        return jax.value_and_grad(lambda *args: (einsum(*args) ** 2).sum(), argnums=(0, 1, 2))(q, k, v)

    operands = _qkv(jnp.bfloat16, (1, 128, 4, 32))
    optimized = scheduler.optimize(step, backends="interpret", keep="tuned")
    _is_close(jax.tree.leaves(jax.jit(step)(*operands)), jax.tree.leaves(optimized(*operands)))
    (decision,) = optimized.decisions
    assert decision.kept == "tuned"
    attention = [each for each in decision.replaced if each.line]
    assert {each.operation for each in attention} == {"flash_attention", "flash_attention_backward"}
    assert all("attention_corpus.py:" in each.line for each in attention)


def test_optimize_changes_the_gradient_of_a_cross_entropy_and_reports_its_line():
    def step(weights, x, labels):
        def loss(weights):
            logs = jax.nn.log_softmax(x @ weights)
            return -jnp.take_along_axis(logs, labels[:, None], -1).mean()

        return jax.value_and_grad(loss)(weights)

    x, weights = jax.random.normal(jax.random.key(0), (16, 8)), jnp.ones((8, 32))
    optimized = scheduler.optimize(step, backends=("xla", "interpret"), keep="tuned")
    _is_close(*(jax.tree.leaves(fn(weights, x, jnp.arange(16))) for fn in (jax.jit(step), optimized)))
    (decision,) = optimized.decisions
    assert (decision.kept, decision.replaced, len(decision.changes)) == ("tuned", (), 1)
    assert "scatter of one number per row into float32[16, 32], as a selection, for " in optimized.report()
    assert "test_rewriting.py:" in decision.changes[0]


def scanned_step(weights, x):
    def loss(weights, x):
        def layer(x, w):
            q, k, v = ((x @ w[name]).reshape(1, 128, 4, 32) for name in "qkv")
            return x + einsum(q, k, v).reshape(x.shape), None

        return (jax.lax.scan(layer, x, weights)[0] ** 2).sum()

    return jax.value_and_grad(loss)(weights, x)


WEIGHT = jax.ShapeDtypeStruct((3, 128, 128), jnp.bfloat16)
STEP_ARGUMENTS = ({"q": WEIGHT, "k": WEIGHT, "v": WEIGHT}, jax.ShapeDtypeStruct((1, 128, 128), jnp.bfloat16))


def test_the_problems_that_optimize_poses_are_listed_with_counts_and_lines():
    found = {row.operation.name: row for row in scheduler.problems(scheduler.optimize(scanned_step), *STEP_ARGUMENTS)}
    assert found.keys() == {"flash_attention", "flash_attention_backward", "matmul"}
    for name in ("flash_attention", "flash_attention_backward"):
        row = found[name]
        assert (row.count, row.problem.q_len, row.problem.causal) == (3, 128, True)
        assert [line.file.endswith("attention_corpus.py") for line in row.lines] == [True]


def test_extract_writes_what_optimize_poses_as_a_job(capfd, tmp_path):
    file = tmp_path / "attention.py"
    file.write_text(
        "import jax, jax.numpy as jnp\n"
        "def attention(q, k, v):\n"
        "    return jax.nn.dot_product_attention(q, k, v, is_causal=True)\n"
    )
    operand = "bfloat16[1,128,4,32]"
    with pytest.raises(SystemExit) as ended:
        main(["extract", f"{file}:attention", operand, operand, operand, "--optimize"])
    assert not ended.value.code
    (task,) = jobs.parse(capfd.readouterr().out)
    assert (task.operation.name, task.problem.causal, task.problem.heads) == ("flash_attention", True, 4)


def test_rewrite_is_a_function_that_jax_transforms():
    def loss(q, k, v, activation=jnp.sin):
        def body(x, _):
            return activation(einsum(x, k, v)), None

        return jax.lax.scan(body, q, None, length=2)[0].sum()

    tuned, operands = scheduler.rewrite(loss, backends="interpret"), _qkv(jnp.float32, (1, 128, 4, 32))
    _is_close([loss(*operands)], [tuned(*operands)])
    _is_close(jax.grad(loss, (0, 1, 2))(*operands), jax.jit(jax.grad(tuned, (0, 1, 2)))(*operands))
    assert "flash_attention" in tuned.report()
    assert "left to XLA" not in tuned.report()
    saved = str(jax.make_jaxpr(jax.grad(tuned))(*operands))
    assert "128,128]" not in saved.split("pallas_call")[0]
    many = [jnp.stack([x, x]) for x in operands]
    _is_close([jax.vmap(loss)(*many)], [jax.vmap(tuned)(*many)])


KEPT = {
    "held logits": (_with(jax.lax.stop_gradient), False),
    "held probabilities": (_with(change=jax.lax.stop_gradient), False),
    "half of the logits is held": (_with(lambda s: (s + jax.lax.stop_gradient(s)) / 2), False),
    "a held sum": (
        _with(weights=lambda s: jnp.exp(s) / jax.lax.stop_gradient(jnp.exp(s).sum(-1, keepdims=True))),
        False,
    ),
    "a rule of the logits": (_with(tenth), False),
    "a rule of the probabilities": (_with(change=tenth), False),
    "held keys": (lambda q, k, v: _with()(q, jax.lax.stop_gradient(k), v), True),
    "a rule of the values": (lambda q, k, v: _with()(q, k, tenth(v)), True),
    "a rule of the result": (lambda q, k, v: tenth(_with()(q, k, v)), True),
    "relu, which has a rule at 0": (lambda q, k, v: _with()(jax.nn.relu(jnp.maximum(q, 0)), k, v), True),
    "a softcap before a mask and a window": (_with(lambda s: _causal(_windowed(_capped(s)))), True),
}


@pytest.mark.parametrize("name", KEPT)
def test_rewrite_keeps_the_rules_of_derivatives(name):
    function, found = KEPT[name]
    operands, tuned = _qkv(shape=(1, 16, 2, 8)), scheduler.rewrite(function, backends="interpret")

    def gradients(fn):
        return jax.jit(jax.grad(lambda *args: (fn(*args) ** 2).sum(), (0, 1, 2)))(*operands)

    _is_close(gradients(function), gradients(tuned))
    assert ("flash_attention batch" in tuned.report()) is found


def test_rewrite_keeps_the_rule_of_a_function_around_attention():
    whole = jax.custom_vjp(_with())
    whole.defvjp(lambda *args: (_with()(*args), args), lambda args, g: tuple(x * g.sum() for x in args))
    operands, tuned = _qkv(shape=(1, 16, 2, 8)), scheduler.rewrite(whole, backends="interpret")
    _is_close([whole(*operands)], [tuned(*operands)])
    _is_close(*(jax.grad(lambda *args, fn=fn: fn(*args).sum(), (0, 1, 2))(*operands) for fn in (whole, tuned)))
    assert "flash_attention batch" in tuned.report()


def test_results_that_are_constants_stay_arrays_of_their_types():
    def attended(q, k, v):
        total, index = lax.add(1.0, 2.0), lax.select_n(True, 3, 4)
        return _with()(q, k, v), total, index, lax.select_n(np.bool_(False), total, 5.0 * q[0, 0, 0, 0]), 1, 2.0

    operands = _qkv(shape=(1, 16, 2, 8))
    tuned = scheduler.rewrite(attended, backends="interpret")
    for expected, found in zip(jax.jit(attended)(*operands), tuned(*operands), strict=True):
        assert isinstance(found, jax.Array)
        assert (found.dtype, found.weak_type) == (expected.dtype, expected.weak_type)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert "flash_attention batch" in tuned.report()


def test_the_gradient_of_calls_is_compared_too():
    def check(region, calls):
        def held(*operands):
            return jax.lax.stop_gradient(calls[0](*operands))

        return comparison.region_disagreement(region, calls, "held", [held])

    rewriter = Rewriter(lambda operation, problem: None, _by_library, check)
    (found,) = rewriter.rewrite(jax.make_jaxpr(_with())(*_qkv())).found
    assert "disagree with its equations: gradients: " in found.reason


def test_regions_are_compared_on_special_operands():
    def wrong_for_equal_elements(operation, problem, params, *operands):
        results = _by_library(operation, problem, params, *operands)
        return jax.tree.map(lambda x: jnp.where((operands[0] == 1.5).all(-1).any(), 2 * x, x), results)

    rewriter = Rewriter(lambda operation, problem: None, wrong_for_equal_elements, comparison.region_disagreement)
    (found,) = rewriter.rewrite(jax.make_jaxpr(_with(lambda s: s * 0.4))(*_qkv())).found
    assert found.reason.endswith("(halves operands)")


def slots(q, k, v):
    """Queries compete for each key: probabilities sum to one along queries."""
    return jax.nn.softmax(q @ k.swapaxes(-1, -2), axis=-2) @ v


def test_operands_that_depend_on_the_result_are_no_region():
    operands = _qkv(shape=(1, 2, 8, 8))
    step = jax.grad(lambda *args: (slots(*args) ** 2).sum(), (0, 1, 2))
    fast = scheduler.optimize(step, backends="interpret", keep="tuned")
    _is_close(jax.jit(step)(*operands), fast(*operands))
    (decision,) = fast.decisions
    assert decision.kept == "tuned"
    assert "flash_attention: an operand is computed from its result" in decision.left


def test_an_error_of_one_region_leaves_the_others():
    def call(operation, problem, params, *operands):
        if problem.causal:
            raise ValueError("no kernel\nof causal attention")
        return _by_library(operation, problem, params, *operands)

    rewriter = Rewriter(lambda operation, problem: None, call, comparison.region_disagreement)
    found = rewriter.rewrite(jax.make_jaxpr(lambda *args: (_with(_causal)(*args), _with()(*args)))(*_qkv())).found
    failed = "flash_attention: its kernels failed: ValueError: no kernel"
    assert [each.reason for each in found] == [failed, ""]


def test_an_error_of_one_operation_leaves_the_others(monkeypatch):
    def broken(graph):
        raise IndexError("no axis")

    rewriter = Rewriter(lambda operation, problem: None, _by_library, lambda region, calls: None)
    rewriter._passes = [
        each._replace(operations=[dataclasses.replace(each.operations[0], regions=broken), *each.operations])
        for each in rewriter._passes
    ]
    found = rewriter.rewrite(jax.make_jaxpr(_with())(*_qkv())).found
    assert [each.reason for each in found] == ["flash_attention: IndexError: no axis", ""]


def test_rewrite_leaves_symbolic_extents():
    (batch,) = jax.export.symbolic_shape("batch")
    spec = jax.ShapeDtypeStruct((batch, 16, 2, 8), jnp.float32)
    tuned, operands = scheduler.rewrite(_with(), backends="interpret"), _qkv(shape=(3, 16, 2, 8))
    exported = jax.export.export(jax.jit(jax.grad(lambda *args: tuned(*args).sum())))(spec, spec, spec)
    _is_close([jax.grad(lambda *args: _with()(*args).sum())(*operands)], [exported.call(*operands)])
    assert "has symbols for extents" in tuned.report()
    with pytest.raises(ValueError, match="give the shapes of one call"):
        scheduler.problems(scheduler.optimize(_with()), spec, spec, spec)


def test_rewrite_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="on_miss"):
        scheduler.rewrite(einsum, on_miss="never")
