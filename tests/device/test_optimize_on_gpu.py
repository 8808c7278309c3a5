"""An unmodified function on a GPU: kernels in place of its products, the same numbers, and never slower."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import scheduler
from scheduler.rewriting import interleaved

WIDTH, HIDDEN = 4096, 14336


@pytest.fixture(autouse=True)
def _gpu():
    if jax.default_backend() != "gpu":
        pytest.skip("needs an NVIDIA GPU and a jax with CUDA")


def layer(x, w):
    y = x.astype(jnp.float32)
    y = (y * lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype)
    x = x + jnp.tanh(y @ w["up"]) @ w["down"]
    return x + (x @ w["o"].T) * 0.1, None


def forward(ws, x):
    return lax.scan(layer, x, ws)[0]


def step(ws, x):
    def loss(ws):
        return (forward(ws, x).astype(jnp.float32) ** 2).mean()

    value, gradient = jax.value_and_grad(loss)(ws)
    return value, jax.tree.map(lambda w, g: w - g.astype(w.dtype), ws, gradient)


def arguments(tokens, layers=2):
    shapes = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH), "o": (WIDTH, WIDTH)}
    keys = jax.random.split(jax.random.key(0), 4)
    ws = {
        name: (jax.random.normal(key, (layers, *shape)) * shape[0] ** -0.5).astype(jnp.bfloat16)
        for key, (name, shape) in zip(keys, shapes.items(), strict=False)
    }
    return ws, jax.random.normal(keys[3], (tokens, WIDTH)).astype(jnp.bfloat16)


def near(actual, expected):
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.linalg.norm(x - y) <= 0.03 * np.linalg.norm(y)


@pytest.mark.parametrize("tokens", [16, 256, 2048])
def test_a_forward_pass_gets_kernels_and_is_no_slower(tokens):
    given = arguments(tokens)
    plain, fast = jax.jit(forward), scheduler.optimize(forward, seconds=1.0)
    near(fast(*given), plain(*given))
    (decided,) = fast.decisions
    assert {each.backend for each in decided.replaced} == {"mosaic_gpu"}
    assert decided.plain is not None, decided.reason
    times = interleaved.time_interleaved({"plain": lambda: plain(*given), "fast": lambda: fast(*given)}, seconds=1.0)
    assert interleaved.margin_of(times["fast"], times["plain"]).middle > -0.02, fast.report()


def test_a_train_step_with_donated_weights_computes_the_same():
    ws, x = arguments(1024)
    value, expected = jax.jit(step)(ws, x)
    fast = scheduler.optimize(step, backends="pallas", donate_argnums=0, keep="tuned")
    loss, updated = fast(ws, x)
    near((loss, updated), (value, expected))
    assert fast.decisions[0].kept == "tuned"
    matmuls = [each.problem for each in fast.decisions[0].replaced if each.operation == "matmul"]
    assert any(each.transpose_a for each in matmuls)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_by_cudnn_and_its_gradients_become_kernels_with_the_same_numbers(causal):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (2, 1024, 16, 128), (2, 1024, 4, 128), (2, 1024, 4, 128)
    given = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]

    def loss(q, k, v):
        out = jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")
        return jnp.sin(out.astype(jnp.float32)).sum()

    gradients = jax.value_and_grad(loss, argnums=(0, 1, 2))
    fast = scheduler.optimize(gradients, backends=("mosaic_gpu",), keep="tuned")
    near(fast(*given), jax.jit(gradients)(*given))
    (decided,) = fast.decisions
    assert decided.kept == "tuned", decided.reason
    assert {each.operation for each in decided.replaced} == {"flash_attention", "flash_attention_backward"}


def test_heads_in_batches_are_the_same_numbers():
    q, k = (jax.random.normal(jax.random.key(i), (4, 512, 8, 128), jnp.bfloat16) for i in range(2))

    def scores(q, k):
        return jnp.einsum("bshe,bthe->bhst", q, k)

    fast = scheduler.optimize(scores, backends="pallas", keep="tuned")
    near(fast(q, k), jax.jit(scores)(q, k))
    assert fast.decisions[0].kept == "tuned"
