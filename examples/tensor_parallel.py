"""A Llama of 70B parameters on four GPUs: what one of them asks in a step, so that one alone tunes it beforehand.

python examples/tensor_parallel.py
tile-scheduler extract examples/tensor_parallel.py:decode --mesh model=4 --hardware h200 > job.toml
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

import scheduler
from scheduler import tuned_flash_attention, tuned_gated_matmul, tuned_matmul, tuned_rms_norm

LAYERS, WIDTH, HIDDEN, WORDS = 80, 8192, 28672, 128256
HEADS, KV_HEADS, HEAD_DIM = 64, 8, 128
SEQUENCES, LONGEST, PROMPT = 64, 4096, 2048


def array(*shape: int, over: tuple[str | None, ...] = (), dtype: str = "bfloat16") -> jax.Array:
    """In a function that is only traced an array takes no memory; in a server this is a weight or a cache."""
    return jax.lax.with_sharding_constraint(jnp.zeros(shape, dtype), PartitionSpec(*over))


def weights() -> dict[str, jax.Array]:
    """Those of all layers: projections divided by heads and columns, those back by rows, as in Megatron."""
    columns, rows = (None, None, "model"), (None, "model")
    return {
        "norm": array(LAYERS, 2, WIDTH, dtype="float32"),
        "q": array(LAYERS, WIDTH, HEADS * HEAD_DIM, over=columns),
        "k": array(LAYERS, WIDTH, KV_HEADS * HEAD_DIM, over=columns),
        "v": array(LAYERS, WIDTH, KV_HEADS * HEAD_DIM, over=columns),
        "out": array(LAYERS, HEADS * HEAD_DIM, WIDTH, over=rows),
        "gate": array(LAYERS, WIDTH, HIDDEN, over=columns),
        "up": array(LAYERS, WIDTH, HIDDEN, over=columns),
        "down": array(LAYERS, HIDDEN, WIDTH, over=rows),
    }


def heads(x: jax.Array, w: jax.Array, length: int) -> jax.Array:
    return tuned_matmul(x, w).reshape(-1, length, w.shape[1] // HEAD_DIM, HEAD_DIM)


def feed_forward(x: jax.Array, attended: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    x = x + tuned_matmul(attended.reshape(x.shape), w["out"])
    h = tuned_gated_matmul(tuned_rms_norm(x, w["norm"][1]), (w["gate"], w["up"]))
    return x + tuned_matmul(h, w["down"])


def decode() -> jax.Array:
    """One token of each sequence."""
    lengths = array(SEQUENCES, dtype="int32")
    cache = [array(LAYERS, SEQUENCES, LONGEST, KV_HEADS, HEAD_DIM, over=(None, None, None, "model")) for _ in "kv"]

    def layer(x: jax.Array, of: tuple[dict[str, jax.Array], jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        w, keys, values = of
        h = tuned_rms_norm(x, w["norm"][0])
        # Positions are left out, which are plain JAX.
        q, k, v = (heads(h, w[name], 1) for name in "qkv")
        keys, values = keys.at[:, :1].set(k), values.at[:, :1].set(v)
        return feed_forward(x, tuned_flash_attention(q, keys, values, kv_lengths=lengths), w), None

    x, _ = jax.lax.scan(layer, array(SEQUENCES, WIDTH), (weights(), *cache))
    return tuned_matmul(x, array(WIDTH, WORDS, over=(None, "model")))


def prefill() -> jax.Array:
    """The prompt of one sequence."""

    def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        h = tuned_rms_norm(x, w["norm"][0])
        q, k, v = (heads(h, w[name], PROMPT) for name in "qkv")
        return feed_forward(x, tuned_flash_attention(q, k, v, causal=True), w), (k, v)

    return jax.lax.scan(layer, array(PROMPT, WIDTH), weights())[0]


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 4)  # they are made up: nothing is computed
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))
    for step in (prefill, decode):
        with jax.set_mesh(mesh), scheduler.target("NVIDIA H200"):
            found = scheduler.problems(step)
        print(f"{step.__name__}, on each of 4 GPUs:\n{found}\n")


if __name__ == "__main__":
    main()
