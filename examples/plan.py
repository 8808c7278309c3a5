"""A plan for a whole function: made once, kept in a file, and answering alone where the function is deployed.

python examples/plan.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp

import scheduler
from scheduler import Plan, tuned_matmul, tuned_silu_and_mul


@jax.jit
def step(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Two layers of a gated perceptron, as a scan over their weights."""

    def layer(x: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        gated = tuned_silu_and_mul(tuned_matmul(x, weights["up"]))
        return x + tuned_matmul(gated, weights["down"]), None

    return jax.lax.scan(layer, x, params)[0]


def main() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "up": 0.1 * jax.random.normal(keys[0], (2, 64, 256)),
        "down": 0.1 * jax.random.normal(keys[1], (2, 128, 64)),
    }
    x = jax.random.normal(keys[2], (32, 64))
    expected = step(params, x)

    print("1. Tune what the step calls, and keep what makes the whole step faster. (On a CPU that is XLA.)")
    plan = scheduler.tune_function(step, params, x, minutes=0.1, budget=4)
    print(plan)

    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "step.plan.json"
        plan.save(file)
        print(f"2. Saved as {file.name}, {file.stat().st_size} bytes; the same digest when it is read: ", end="")
        print(Plan.load(file).digest == plan.digest)

        print("3. Where it is deployed it answers alone: no store, no model, and an error for what it does not hold.")
        with scheduler.plan(file, missing="error"):
            assert jnp.allclose(step(params, x), expected, rtol=1e-2, atol=1e-2)
            try:
                step(params, x[:8])
            except scheduler.CacheMiss as error:
                print(f"   of another batch: {error}")
    print("   the step's result is the same")


if __name__ == "__main__":
    main()
