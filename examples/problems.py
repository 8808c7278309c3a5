"""What a training step runs: its tuned problems as a job, and what of it is not tuned and could be.

python examples/problems.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp

import scheduler
from scheduler import tuned_matmul

LAYERS, TOKENS, WIDTH, WORDS = 12, 2048, 1024, 32000


def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
    h = tuned_matmul(x, w["in"])
    gate, up = jnp.split(h, 2, axis=-1)
    return x + tuned_matmul(jax.nn.silu(gate) * up, w["out"]), None


def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, {name: params[name] for name in ("in", "out")})
    words = jax.nn.softmax((x @ params["words"]).astype(jnp.float32))
    return -jnp.mean(jnp.log(words[:, 0]))


def main() -> None:
    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    params = {
        "in": array(LAYERS, WIDTH, 4 * WIDTH),
        "out": array(LAYERS, 2 * WIDTH, WIDTH),
        "words": array(WIDTH, WORDS),
    }
    with scheduler.target("NVIDIA H200"):
        found = scheduler.problems(jax.value_and_grad(loss), params, array(TOKENS, WIDTH))
    print(found)

    job = Path(tempfile.mkdtemp()) / "job.toml"
    found.save(job)
    calls = sum(row.count for row in found)
    print(f"\n{len(found)} problems, posed {calls} times in a step; to tune them: tile-scheduler tune-job {job}")


if __name__ == "__main__":
    main()
