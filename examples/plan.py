"""The plan of an optimized function: made once, kept in a file, and used alone where the function is deployed.

python examples/plan.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp

import scheduler
from scheduler import Plan


def step(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Two layers of a gated perceptron, as a scan over their weights."""

    def layer(x: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        gate, up = jnp.split(x @ weights["up"], 2, axis=-1)
        return x + (jax.nn.silu(gate) * up) @ weights["down"], None

    return jax.lax.scan(layer, x, params)[0]


def main() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "up": 0.1 * jax.random.normal(keys[0], (2, 64, 256)),
        "down": 0.1 * jax.random.normal(keys[1], (2, 128, 64)),
    }
    x = jax.random.normal(keys[2], (32, 64))
    expected = step(params, x)

    print(
        "1. Optimize the step, and take its decisions as a plan. (On a CPU its kernels are interpreted, and not timed.)"
    )
    on_cpu = {"backends": "interpret", "keep": "tuned"} if jax.default_backend() == "cpu" else {}
    fast = scheduler.optimize(step, **on_cpu)
    fast(params, x)
    plan = fast.plan()
    print(plan)

    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "step.plan.json"
        plan.save(file)
        print(f"2. Saved as {file.name}, {file.stat().st_size} bytes; the same digest when it is read: ", end="")
        print(Plan.load(file).digest == plan.digest)

        print("3. Where it is deployed its kernels are used alone: no store, no model, nothing compared or timed.")
        deployed = scheduler.optimize(step)
        with scheduler.plan(file):
            assert jnp.allclose(deployed(params, x), expected, rtol=1e-2, atol=1e-2)
        print(deployed.report())
    print("   the step's result is the same")


if __name__ == "__main__":
    main()
