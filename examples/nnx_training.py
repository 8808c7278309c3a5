"""Training a flax.nnx model that is updated in place: what a step runs, and the step with tuned products.

pip install flax optax; python examples/nnx_training.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import scheduler


class Mlp(nnx.Module):
    """A product, statistics that are updated at each call, random numbers, and another product."""

    def __init__(self, width: int, *, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(width, 2 * width, rngs=rngs)
        self.norm = nnx.BatchNorm(2 * width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.dropout(nnx.gelu(self.norm(self.up(x)))))


@nnx.jit(donate_argnames=("model", "optimizer"))
def step(model: Mlp, optimizer: nnx.Optimizer[Mlp], x: jax.Array, y: jax.Array) -> jax.Array:
    """One step: returns the loss, and updates parameters, statistics and the optimizer in place."""
    loss, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
    optimizer.update(model, gradients)
    return loss


def main() -> None:
    model = Mlp(16, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    x = jax.random.normal(jax.random.key(1), (32, 16))
    y = jnp.roll(x, 1, axis=1)

    found = scheduler.problems(step, model, optimizer, x, y)
    print(f"A step has {len(found.untuned)} products that could be tuned, backward ones among them.")

    # On a GPU: scheduler.optimize(step). A CPU has no kernels but those of Pallas' interpreter.
    options = {"backends": "interpret", "keep": "tuned"} if jax.default_backend() == "cpu" else {}
    fast = scheduler.optimize(step, **options)
    losses = [float(fast(model, optimizer, x, y)) for _ in range(20)]
    print(fast.report())
    print(f"After {int(optimizer.step[...])} steps the loss went from {losses[0]:.3f} to {losses[-1]:.3f}.")
    print("The model was updated in place:", "yes" if losses[-1] < losses[0] / 2 else "no")


if __name__ == "__main__":
    main()
