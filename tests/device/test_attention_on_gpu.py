"""Attention on a GPU: every kernel that is asked is right, forward, backward and in decoding, and so is the call."""

import os
import random
import subprocess
import sys

import pytest

from scheduler.measure.runner import Task
from scheduler.model.cost import CostModel
from scheduler.model.pruning import prune
from search_spaces.flash_attention import FLASH_ATTENTION, FlashAttentionProblem
from search_spaces.flash_attention_backward import FLASH_ATTENTION_BACKWARD, FlashAttentionBackwardProblem

# batch, q_len, kv_len, heads, kv_heads, head_dim
SHAPES = {
    "d64": (2, 1024, 1024, 8, 8, 64),
    "d128": (2, 1024, 1024, 4, 4, 128),
    "d256": (1, 1024, 1024, 4, 4, 256),
    "grouped": (2, 512, 512, 16, 2, 128),
    "ragged": (2, 1001, 777, 4, 2, 128),
    "ragged d64": (2, 300, 515, 6, 3, 64),
    "short": (3, 33, 65, 4, 4, 128),
    "d96": (2, 512, 512, 4, 4, 96),
    "odd": (1, 3001, 3001, 2, 2, 128),
    "odd d96": (2, 129, 77, 4, 2, 96),
    "odd d192": (1, 333, 333, 2, 2, 192),
    "ragged d256": (1, 500, 333, 4, 2, 256),
    "d192": (1, 512, 512, 4, 4, 192),
    "decode": (4, 1, 8192, 32, 4, 128),
    "decode d64": (2, 1, 3001, 16, 16, 64),
    "few queries": (2, 5, 4096, 16, 2, 128),
}
SQUARE = ("d64", "d128", "d256", "grouped", "d96")
MASKS = {
    "causal": {"causal": True},
    "window": {"causal": True, "window_left": 200},
    "both sides": {"window_left": 100, "window_right": 50},
    "lengths": {"q_lengths": True, "kv_lengths": True},
    "causal lengths": {"causal": True, "kv_lengths": True},
    "softcap": {"softcap": True},
    "float16": {"dtype": "float16"},
}


def posed(problem, shape, **fields):
    names = ("batch", "q_len", "kv_len", "heads", "kv_heads", "head_dim")
    return problem(**dict(zip(names, SHAPES[shape], strict=True)), **fields)


FORWARD = [
    *(posed(FlashAttentionProblem, shape) for shape in SHAPES),
    *(posed(FlashAttentionProblem, shape, causal=True, return_lse=True) for shape in (*SQUARE, "ragged")),
    *(posed(FlashAttentionProblem, "d128", **fields) for fields in MASKS.values()),
    *(posed(FlashAttentionProblem, "ragged", **fields, return_lse=True) for fields in MASKS.values()),
    *(posed(FlashAttentionProblem, "ragged d64", **fields, return_lse=True) for fields in MASKS.values()),
    posed(FlashAttentionProblem, "odd", causal=True, return_lse=True),
    posed(FlashAttentionProblem, "decode", kv_lengths=True),
    posed(FlashAttentionProblem, "decode d64", kv_lengths=True, return_lse=True),
    posed(FlashAttentionProblem, "decode", return_lse=True),
    posed(FlashAttentionProblem, "decode", window_right=4000),
]
BACKWARD = [
    *(posed(FlashAttentionBackwardProblem, shape) for shape in (*SQUARE, "ragged", "ragged d64", "short", "odd d96")),
    *(posed(FlashAttentionBackwardProblem, shape, causal=True) for shape in (*SQUARE, "ragged")),
    *(posed(FlashAttentionBackwardProblem, "d128", **fields) for fields in MASKS.values()),
    posed(FlashAttentionBackwardProblem, "ragged", kv_lengths=True, lse_cotangent=True),
    posed(FlashAttentionBackwardProblem, "ragged d256", causal=True, window_left=100, kv_lengths=True),
    posed(FlashAttentionBackwardProblem, "ragged d256", softcap=True, lse_cotangent=True),
    posed(FlashAttentionBackwardProblem, "d192", causal=True),
    posed(FlashAttentionBackwardProblem, "odd", causal=True),
    posed(FlashAttentionBackwardProblem, "odd d192", causal=True),
    posed(FlashAttentionBackwardProblem, "ragged", causal=True, deterministic=True),
    posed(FlashAttentionBackwardProblem, "d128", causal=True, deterministic=True),
    posed(FlashAttentionBackwardProblem, "grouped", deterministic=True),
]
KERNELS = [
    (operation, backend, problems)
    for operation, problems in ((FLASH_ATTENTION, FORWARD), (FLASH_ATTENTION_BACKWARD, BACKWARD))
    for backend in ("mosaic_gpu", "mosaic_gpu_decode", "cudnn", "xla")
    if backend in operation.backends
]


@pytest.mark.parametrize(("operation", "backend", "problems"), KERNELS, ids=lambda x: getattr(x, "name", None))
def test_sampled_schedules_agree_with_the_reference(pool, all_right, operation, backend, problems):
    kernel, tasks = operation.kernel(backend), []
    for problem in problems:
        if kernel.supports(problem, pool.hardware.target) is None:
            candidates = prune(kernel, problem, pool.hardware, CostModel(pool.hardware)).candidates()
            sample = candidates[:3] + random.Random(0).sample(candidates, min(5, len(candidates)))
            chosen = {str(candidate.schedule): candidate for candidate in sample}.values()
            tasks += [Task(operation, problem, c.backend, c.schedule, 3) for c in chosen]
    assert tasks
    all_right(tasks)


CALLS = """
import functools
import jax
import jax.numpy as jnp
import numpy as np
from scheduler import NoCandidate, tuned_flash_attention
from search_spaces.flash_attention import FLASH_ATTENTION

def draw(dtype, q_len=512, kv_len=512, heads=8, kv_heads=2, head_dim=128):
    shapes = (2, q_len, heads, head_dim), *((2, kv_len, kv_heads, head_dim),) * 2
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes)]

def right(actual, expected, name):
    scale = float(jnp.max(jnp.abs(expected.astype("float32"))))
    error = float(jnp.max(jnp.abs(actual.astype("float32") - expected.astype("float32"))))
    assert actual.dtype == expected.dtype and error <= 2e-2 * scale, (name, error, scale)

lengths = {"kv_lengths": jnp.array([512, 77], "int32")}
every_backend = (None, *(name for name in FLASH_ATTENTION.backends if name != "interpret"))
every_option = ({"causal": True}, {"causal": True, "window": 100}, lengths)
for dtype, backends, asked in (("bfloat16", every_backend, every_option), ("float16", (None,), every_option[:1])):
    q, k, v = draw(dtype)
    for options in asked:
        names = {"kv_lengths": "key_value_seq_lengths", "causal": "is_causal", "window": "local_window_size"}
        theirs = functools.partial(jax.nn.dot_product_attention, **{names[n]: x for n, x in options.items()})

        def every(call, q, k, v):
            loss = lambda *qkv: (jnp.sum(jnp.sin((x := call(*qkv)).astype("float32"))), x)
            gradients, out = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)
            return out, *gradients, jax.vmap(call, (None, 0, 0))(q[0], k, v) if options is not lengths else out

        expected = jax.jit(functools.partial(every, theirs))(q, k, v)
        for backend in backends:
            ours = functools.partial(tuned_flash_attention, **options, backends=backend)
            try:
                found = jax.jit(functools.partial(every, ours))(q, k, v)
            except NoCandidate as error:
                print("refused", backend, dtype, sorted(options), error)
                continue
            for n, (a, b) in enumerate(zip(found, expected)):
                right(a, b, (backend, dtype, sorted(options), n))
            print("right", backend, dtype, sorted(options))
q, k, v = draw("bfloat16", q_len=1, kv_len=8192, heads=32, kv_heads=4)
lengths = jnp.array([8192, 0], "int32")
for backend in (None, "pallas", "cudnn", "xla"):
    try:
        out, lse = jax.jit(functools.partial(tuned_flash_attention, return_lse=True, backends=backend))(
            q, k, v, kv_lengths=lengths)
    except (NoCandidate, ValueError) as error:
        print("refused", backend, error)
        continue
    right(out[0], jax.nn.dot_product_attention(q[0], k[0], v[0]), ("decode", backend))
    assert not out[1].any() and (lse[1] == -jnp.inf).all() and jnp.isfinite(lse[0]).all(), backend
    print("right", backend, "decode")
"""


def test_the_call_and_its_gradients_are_right_by_every_backend(pool):
    # Beside the workers, which hold their share of the memory.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    ended = subprocess.run([sys.executable, "-c", CALLS], capture_output=True, text=True, check=False, env=environment)
    print(ended.stdout)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.count("right None") == 5  # bfloat16 by three options, float16, and decoding
    assert ended.stdout.count("right xla") == 4
