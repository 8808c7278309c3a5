"""Every backend keeps what docs/use/calls.md promises of NaN, of lengths, and of queries that see no key."""

import dataclasses

import attention_promises as promises
import hopper
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from scheduler import tuned_flash_attention
from scheduler.core.hardware import find
from search_spaces.attention import xla
from search_spaces.attention.interpret import InterpretedAttention
from search_spaces.attention.xla import attention
from search_spaces.contrib.tpu.flash_attention import TpuFlashAttentionSchedule
from search_spaces.flash_attention import FLASH_ATTENTION
from search_spaces.flash_attention.hopper import FlashAttentionSchedule, FlashDecodingSchedule
from search_spaces.flash_attention_backward import FLASH_ATTENTION_BACKWARD
from search_spaces.flash_attention_backward.hopper import FlashAttentionBackwardSchedule
from search_spaces.jax_compat import HAS_GPU_INTERPRETER, gpu_interpreter
from search_spaces.kernel import Library
from search_spaces.target import Target

pytestmark = pytest.mark.slow

interpreted_only = pytest.mark.skipif(not HAS_GPU_INTERPRETER, reason="JAX interprets GPU kernels from 0.11 on")
LENGTHS = {"q_lengths": True, "kv_lengths": True}
MASKS = {
    "lengths": LENGTHS,
    "causal": LENGTHS | {"causal": True},
    "window": LENGTHS | {"window_left": 9, "window_right": 5, "softcap": True},
    "lengths of queries": {"q_lengths": True, "causal": True},
    "lengths of keys": {"kv_lengths": True, "window_left": 3},
    "keys that no query sees": {"window_right": 2},
    "queries that see no key": {"window_left": 2, "causal": True},
}
CPU = Target("cpu", "cpu", 2, "cpu")


def posed(mask, q_len, kv_len, *rest, **fields):
    """More queries than keys, where it is about queries."""
    lengths = (kv_len, q_len) if mask == "queries that see no key" else (q_len, kv_len)
    return promises.problem(*lengths, *rest, **MASKS[mask], **fields)


def check_forward(kernel, schedule, problem, target, tolerance, *, with_lse=True):
    problem = dataclasses.replace(problem, return_lse=with_lse)
    s = promises.situation(problem)
    run = jax.jit(lambda *args: kernel.results(problem, schedule, target, *args, softcap=promises.SOFTCAP))
    results = run(*promises.operands(s))
    found = dict(zip(("out", "lse"), results, strict=False))
    assert not promises.broken_promises(s, promises.oracle(s), tolerance, **found)


def check_backward(kernel, schedule, problem, target, tolerance, **fields):
    s = promises.situation(problem)
    gradients, operands = promises.backward(s, **fields)
    expected = promises.oracle(s, with_d_lse=gradients.lse_cotangent)
    run = jax.jit(lambda *args: kernel.results(gradients, schedule, target, *args, softcap=promises.SOFTCAP))
    results = run(*operands)
    found = dict(zip(("dq", "dk", "dv"), results, strict=True))
    assert not promises.broken_promises(s, expected, tolerance, **found)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("program", ["float32", "blocks", "plain"])
def test_programs_of_xla(program, mask, monkeypatch):
    problem = posed(mask, 12, 30, 4, 2, 8, dtype="float32")
    forward, backward = FLASH_ATTENTION.kernel("xla"), FLASH_ATTENTION_BACKWARD.kernel("xla")
    if program == "blocks":
        monkeypatch.setattr(xla, "MOST_LOGITS", 5 * problem.batch * problem.heads * problem.kv_len)
    one = Library("plain" if program == "plain" else "float32")
    if program == "plain" and problem.softcap:
        problem = dataclasses.replace(problem, softcap=False)
    check_forward(forward, one, problem, CPU, 1e-4, with_lse=program != "plain")
    check_backward(backward, one, problem, CPU, 1e-4, lse_cotangent=program != "plain")


@pytest.mark.parametrize("mask", MASKS)
def test_the_reference(mask):
    s = promises.situation(posed(mask, 12, 30, 4, 2, 8, dtype="float32"))
    problem, (d_out, d_lse) = s.problem, s.cotangents
    q, k, v, *lengths = promises.operands(s)
    (out, lse), vjp = jax.vjp(lambda *qkv: attention(problem, *qkv, *lengths, softcap=promises.SOFTCAP), q, k, v)
    gradients = vjp((jnp.asarray(d_out, out.dtype), jnp.asarray(d_lse, lse.dtype)))
    found = {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}
    assert not promises.broken_promises(s, promises.oracle(s, with_d_lse=True), 1e-4, **found)


@pytest.mark.parametrize("mask", MASKS)
def test_interpreted_kernels(mask):
    problem = posed(mask, 12, 30, 4, 2, 8, dtype="float32")
    one = InterpretedAttention(block_q=8, block_kv=8)
    check_forward(FLASH_ATTENTION.kernel("interpret"), one, problem, CPU, 1e-4)
    check_backward(FLASH_ATTENTION_BACKWARD.kernel("interpret"), one, problem, CPU, 1e-4, lse_cotangent=True)


SCHEDULE = FlashAttentionSchedule(
    consumers=1,
    block_kv=64,
    stages=2,
    ping_pong=False,
    persistent=False,
    order="plain",
    section=1,
    epi_tile_n=64,
)
FORWARD = {
    "one consumer": SCHEDULE,
    "persistent": dataclasses.replace(SCHEDULE, consumers=2, ping_pong=True, persistent=True, block_kv=48),
}


def hopper_target(cores):
    return dataclasses.replace(hopper.H200.target, cores=cores)


@interpreted_only
@pytest.mark.parametrize(
    ("schedule", "mask", "extents"),
    [
        ("one consumer", "lengths", (40, 88)),
        ("one consumer", "window", (71, 137)),
        ("one consumer", "keys that no query sees", (40, 88)),
        ("persistent", "causal", (71, 73)),
        ("persistent", "lengths of queries", (72, 88)),
        ("persistent", "queries that see no key", (40, 136)),
    ],
)
def test_hopper_forward(schedule, mask, extents):
    problem = posed(mask, *extents, 1, 1, 64, few=True)
    with gpu_interpreter():
        check_forward(FLASH_ATTENTION.kernel("mosaic_gpu"), FORWARD[schedule], problem, hopper_target(4), 2e-2)


DECODE = {
    "one split": FlashDecodingSchedule(block_kv=64, stages=2, split_kv=1, cluster=1),
    "a cluster": FlashDecodingSchedule(block_kv=64, stages=2, split_kv=2, cluster=2),
    "two launches": FlashDecodingSchedule(block_kv=64, stages=2, split_kv=3, cluster=1),
}


@interpreted_only
@pytest.mark.parametrize(
    ("schedule", "mask", "extents"),
    [
        ("one split", "lengths", (3, 137)),
        ("a cluster", "window", (5, 200)),
        ("a cluster", "causal", (9, 136)),
        ("two launches", "lengths", (1, 200)),
        ("one split", "keys that no query sees", (3, 88)),
    ],
)
def test_hopper_decoding(schedule, mask, extents):
    problem = posed(mask, *extents, 2, 1, 64, few=True)
    with gpu_interpreter():
        check_forward(FLASH_ATTENTION.kernel("mosaic_gpu_decode"), DECODE[schedule], problem, hopper_target(4), 2e-2)


GRADIENTS = FlashAttentionBackwardSchedule(64, 2, 2, 2, True, 1)
BACKWARD = {
    "overlap": (GRADIENTS, 64, {"lse_cotangent": True}),
    "rotated": (dataclasses.replace(GRADIENTS, overlap=False, rotate=True), 64, {}),
    "rows": (dataclasses.replace(GRADIENTS, overlap=False, block_q=128, ds_stages=1), 64, {}),
    "separate dq": (dataclasses.replace(GRADIENTS, ds_stages=1, dq="separate"), 64, {"deterministic": True}),
    "wide": (dataclasses.replace(GRADIENTS, do_stages=1, ds_stages=1), 192, {"lse_cotangent": True}),
}


@interpreted_only
@pytest.mark.parametrize(
    ("schedule", "mask", "extents"),
    [
        ("overlap", "lengths", (72, 137)),
        ("overlap", "queries that see no key", (40, 136)),
        ("rotated", "lengths", (72, 72)),
        ("rows", "lengths of queries", (72, 72)),
        ("separate dq", "causal", (72, 72)),
        ("wide", "lengths", (72, 72)),
        ("wide", "window", (71, 73)),
    ],
)
def test_hopper_backward(schedule, mask, extents):
    one, head_dim, fields = BACKWARD[schedule]
    problem = posed(mask, *extents, 1, 1, head_dim, few=True)
    with gpu_interpreter():
        kernel = FLASH_ATTENTION_BACKWARD.kernel("mosaic_gpu")
        check_backward(kernel, one, problem, hopper_target(4), 3e-2, **fields)


TPU = {
    "one": TpuFlashAttentionSchedule("one", 128, 128, 128, 0),
    "group": TpuFlashAttentionSchedule("group", 128, 256, 128, 0),
    "all": TpuFlashAttentionSchedule("all", 128, 128, 128, 0),
}


@pytest.mark.parametrize(
    ("schedule", "mask", "extents"),
    [
        ("one", "lengths", (40, 200)),
        ("group", "window", (40, 200)),
        ("all", "lengths", (3, 200)),
        ("all", "causal", (20, 200)),
        ("one", "lengths of queries", (40, 200)),
        ("one", "lengths of keys", (40, 120)),
        ("group", "keys that no query sees", (40, 200)),
        ("one", "queries that see no key", (40, 200)),
    ],
)
def test_tpu(schedule, mask, extents):
    problem = posed(mask, *extents, 4, 2, 64, dtype="float32", few=schedule != "one")
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        check_forward(FLASH_ATTENTION.kernel("mosaic_tpu"), TPU[schedule], problem, find("v6e").target, 1e-4)


CALLS = {
    "xla": {"backends": "xla"},
    "interpret": {"backends": "interpret"},
    "no kernel can be selected": {},  # lengths of 16 bits
}


@pytest.mark.parametrize("how", CALLS)
@pytest.mark.parametrize("mask", ["lengths", "window"])
def test_calls_under_jit_and_grad(how, mask):
    problem = posed(mask, 12, 30, 4, 2, 8, dtype="float32")
    s = promises.situation(problem)
    q, k, v, *lengths = promises.operands(s)
    width = "int16" if how == "no kernel can be selected" else "int32"
    d_out, d_lse = (jnp.asarray(x, jnp.float32) for x in s.cotangents)

    def call(q, k, v, q_lengths, kv_lengths):
        options = {"softcap": promises.SOFTCAP, "window": (9, 5)} if mask == "window" else {}
        lengths = {"q_lengths": q_lengths, "kv_lengths": kv_lengths}
        return tuned_flash_attention(q, k, v, **lengths, **options, return_lse=True, **CALLS[how])

    @jax.jit
    def both(q, k, v, *lengths):
        results, vjp = jax.vjp(lambda q, k, v: call(q, k, v, *lengths), q, k, v)
        return *results, *vjp((d_out, d_lse))

    @jax.jit
    def mapped(*args):
        return jax.vmap(lambda *one: [x[0] for x in call(*(x[None] for x in one))])(*args)

    args = q, k, v, *(x.astype(width) for x in lengths)
    found = dict(zip(promises.Answer._fields, both(*args), strict=True))
    expected = promises.oracle(s, with_d_lse=True)
    assert not promises.broken_promises(s, expected, 1e-4, **found)
    assert not promises.broken_promises(s, expected, 1e-4, **dict(zip(("out", "lse"), mapped(*args), strict=True)))


def test_queries_that_are_mapped_on_keys_that_they_share():
    k = v = jnp.ones((2, 6, 1, 8)).at[:, 3:].set(jnp.nan)
    q = jax.random.normal(jax.random.key(0), (3, 2, 4, 2, 8))
    lengths = jnp.array([3, 0], jnp.int32)
    out = jax.vmap(lambda q: tuned_flash_attention(q, k, v, kv_lengths=lengths))(q)
    np.testing.assert_allclose(out[:, 0], 1, rtol=1e-6)
    assert not out[:, 1].any()


@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_large_logits_and_infinite_ones(backend):
    """+inf among visible logits is NaN, -inf is a key that has no weight; what is finite and large is no problem."""
    q = jnp.ones((1, 4, 1, 8)) * jnp.array([1.0, -1.0, 1e6, 0.0])[:, None, None]
    k = jnp.zeros((1, 3, 1, 8)).at[0, :, 0, 0].set(jnp.array([1.0, 2.0, jnp.inf]))
    v = jnp.arange(3.0)[None, :, None, None] * jnp.ones((1, 3, 1, 8))

    def call(n, **options):
        return tuned_flash_attention(q, k[:, :n], v[:, :n], return_lse=True, backends=backend, **options)

    with_infinity, lse = call(3)
    sees = jnp.array([0, 2, 3])
    assert np.isnan(with_infinity[0, sees]).all()
    assert not np.isfinite(lse[0, 0, sees]).any()
    without, lse_without = call(2)
    np.testing.assert_allclose(with_infinity[0, 1], without[0, 1], rtol=1e-6)
    np.testing.assert_allclose(without[0, 2], 1.0)  # one key has all of it
    np.testing.assert_allclose(lse_without[0, 0, 2], 2e6 * 8**-0.5, rtol=1e-6)
    for scale in (0.0, -1.0, 1e8):
        x = scale * np.asarray(q[0, :, 0] @ k[0, :2, 0].T, np.float64)
        w = np.exp(x - x.max(axis=1, keepdims=True))
        right = (w / w.sum(axis=1, keepdims=True)) @ np.asarray(v[0, :2, 0], np.float64)
        np.testing.assert_allclose(call(2, scale=scale)[0][0, :, 0], right, rtol=1e-5, atol=1e-6)
