"""A perceptron divided over four devices on tuned calls: what each device asks, tuned beforehand, answers it.

python examples/sharded_mlp.py
"""

from __future__ import annotations

import os

# Before JAX starts: a CPU's devices are made up, as many as are asked for.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import scheduler
from scheduler import tuned_gated_matmul, tuned_matmul

TOKENS, WIDTH, HIDDEN = 64, 32, 256


def mlp(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """SwiGLU: the columns of gate and up are divided, and so the rows of down, whose products are summed."""
    return tuned_matmul(tuned_gated_matmul(x, (gate, up)), down, residual=x)


def main() -> None:
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))
    specs = {"x": P(), "gate": P(None, "model"), "up": P(None, "model"), "down": P("model", None)}
    shapes = {"x": (TOKENS, WIDTH), "gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    step = jax.jit(mlp, out_shardings=shardings["x"])

    print("1. What each device asks, known before there is any array:")
    found = scheduler.problems(
        step, *(jax.ShapeDtypeStruct(shapes[name], jnp.bfloat16, sharding=shardings[name]) for name in shapes)
    )
    for row in found:
        print(f"   {row.operation.name} {row.problem}")

    print("2. Tuned. (On GPUs: found.save('job.toml'), and tile-scheduler tune-job job.toml --devices all.)")
    for row in found:
        record = scheduler.tune(row.operation, row.problem, budget=3)
        print(f"   {row.operation.name}: {record.winner.backend}, {record.tried} trials")

    print("3. Called: records answer, and where one were missing that would be an error.")
    keys = jax.random.split(jax.random.key(0), len(shapes))
    args = [
        jax.device_put(0.1 * jax.random.normal(key, shapes[name], jnp.bfloat16), shardings[name])
        for key, name in zip(keys, shapes, strict=True)
    ]
    os.environ["TILE_SCHEDULER_ON_MISS"] = "error"
    y = step(*args)
    x, gate, up, down = (arg.astype(jnp.float32) for arg in args)
    assert jnp.allclose(y.astype(jnp.float32), (jax.nn.silu(x @ gate) * (x @ up)) @ down + x, atol=2e-2)
    print(f"   right, of shape {y.shape} on {len(y.sharding.device_set)} devices")


if __name__ == "__main__":
    main()
