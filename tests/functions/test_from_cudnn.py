"""Attention that a function asks cuDNN for, answered by a kernel: traced here, where there is no cuDNN."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scheduler
from scheduler.dispatch import dispatch
from scheduler.rewriting import lowering
from scheduler.rewriting.equations import replacing_operations
from search_spaces import fingerprint
from search_spaces.flash_attention import FLASH_ATTENTION
from search_spaces.operation import MatchedEquation

pytestmark = pytest.mark.slow

BINDING = "jax._src.cudnn.fused_attention_stablehlo"
BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 2, 24, 4, 2, 16
attention = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
plain = functools.partial(jax.nn.dot_product_attention, implementation="xla")


@pytest.fixture(autouse=True)
def cudnn_is_said_to_be_here(monkeypatch):
    monkeypatch.setattr(f"{BINDING}.check_cudnn_version", lambda: 91900)
    monkeypatch.setattr(f"{BINDING}.check_compute_capability", lambda capability: True)
    monkeypatch.setattr(f"{BINDING}.is_cuda_compute_capability_equal", lambda capability: False)


def draw(q_len=LENGTH, kv_len=LENGTH):
    shapes = (BATCH, q_len, HEADS, HEAD_DIM), *((BATCH, kv_len, KV_HEADS, HEAD_DIM),) * 2
    random = np.random.default_rng(0)
    return [jnp.asarray(random.standard_normal(shape).astype(jnp.bfloat16)) for shape in shapes]


def lowered(fn, *args, backends="interpret"):
    asked = {
        operation.name: dispatch.options(operation, backends=(backends,))
        for operation in replacing_operations()
        if backends in operation.backends
    }
    library = {
        operation.name: dispatch.options(operation)
        for operation in replacing_operations()
        if operation.name not in asked
    }
    return lowering.lower_with_kernels(jax.jit(fn).trace(*args), asked | library)


LENGTHS = [jnp.array(each, jnp.int32) for each in ([LENGTH, 7], [9, LENGTH])]
CASES = {
    "plain": (draw(), {}),
    "causal": (draw(), {"is_causal": True}),
    "fewer queries": (draw(q_len=5), {}),
    "a window": (draw(), {"is_causal": True, "local_window_size": (6, 0)}),
    "another scale": (draw(), {"scale": 0.7}),
    "lengths of keys": (draw(), {"key_value_seq_lengths": LENGTHS[1]}),
    "lengths": (draw(), {"query_seq_lengths": LENGTHS[0], "key_value_seq_lengths": LENGTHS[1]}),
}


def close(found, right):
    np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(right, np.float32), atol=0.04, rtol=0.02)


@pytest.mark.parametrize("name", CASES)
def test_what_cudnn_is_asked_for_a_kernel_computes(name):
    args, options = CASES[name]
    found = lowered(functools.partial(attention, **options), *args)
    assert [each.operation for each in found.replaced] == ["flash_attention"]
    close(found.lowered.compile()(*args), plain(*args, **options))


@pytest.mark.parametrize("name", ["plain", "causal", "another scale"])
def test_gradients_come_from_kernels_too(name):
    args, options = CASES[name]

    def loss(call, q, k, v):
        return jnp.sum(jnp.sin(call(q, k, v, **options).astype(jnp.float32)))

    found = lowered(jax.grad(functools.partial(loss, attention), argnums=(0, 1, 2)), *args)
    assert {each.operation for each in found.replaced} == {"flash_attention", "flash_attention_backward"}
    right = jax.grad(functools.partial(loss, plain), argnums=(0, 1, 2))(*args)
    for one, wanted in zip(found.lowered.compile()(*args), right, strict=True):
        close(one, wanted)


def test_a_batch_and_a_scan_are_answered():
    args = draw()

    def step(total, _):
        return total + jax.vmap(attention)(*(jnp.stack([0 * x, x]) for x in args))[1], None

    def fn(start):
        return jax.lax.scan(step, start, length=2)[0]

    start = jnp.zeros(args[0].shape, jnp.bfloat16)
    found = lowered(fn, start)
    assert len(found.replaced) == 1
    close(found.lowered.compile()(start), 2 * plain(*args).astype(jnp.float32))


REFUSED = {
    "a bias": {"bias": jnp.zeros((1, HEADS, LENGTH, LENGTH), jnp.bfloat16)},
    "a causal mask of other than as many queries as keys": {"is_causal": True},
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_no_problem_says_is_left_with_the_reason(what):
    args = draw(q_len=LENGTH if what == "a bias" else 8)
    (equation,) = [
        each
        for each in fingerprint.all_equations(
            jax.make_jaxpr(functools.partial(attention, **REFUSED[what]))(*args).jaxpr
        )
        if _asks(each)
    ]
    reason = FLASH_ATTENTION.equations[equation.primitive](*(x.aval for x in equation.invars), **equation.params)
    assert not isinstance(reason, MatchedEquation)
    assert reason == f"attention by cuDNN with {what} is left to it"


def test_a_parameter_that_nobody_here_knows_leaves_it_to_cudnn():
    args = draw()
    (equation,) = [each for each in fingerprint.all_equations(jax.make_jaxpr(attention)(*args).jaxpr) if _asks(each)]
    posed = functools.partial(FLASH_ATTENTION.equations[equation.primitive], *(x.aval for x in equation.invars))
    assert isinstance(posed(**equation.params), MatchedEquation)
    assert isinstance(posed(**equation.params, stored=(None,) * 11), MatchedEquation)
    assert "a function of logits" in posed(**equation.params, logits_by="cap")


def _asks(equation):
    return equation.primitive in FLASH_ATTENTION.equations


@pytest.mark.parametrize(
    ("batch", "length", "heads", "head_dim", "by"), [(16, 1024, 32, 64, "cudnn"), (4, 4096, 16, 128, "mosaic_gpu")]
)
def test_a_record_says_who_answers(batch, length, heads, head_dim, by):
    """Those of an H200 that are shipped."""
    shapes = [jax.ShapeDtypeStruct((batch, length, heads, head_dim), jnp.bfloat16)] * 3
    options = {op.name: dispatch.options(op, target="NVIDIA H200") for op in replacing_operations()}
    traced = jax.jit(functools.partial(attention, is_causal=True)).trace(*shapes)
    with scheduler.target("NVIDIA H200"):
        found = lowering.lower_with_kernels(traced, options, ("cuda",))
    assert [each.backend for each in found.replaced] == ([] if by == "cudnn" else [by])
    assert [reason.startswith("flash_attention: cudnn is selected") for reason in found.left] == [True] * (
        by == "cudnn"
    )
    called = re.findall(r"custom_call @(\S+?)\(", found.lowered.as_text())
    assert ("__cudnn$fmhaSoftmax" in called) == (by == "cudnn")
