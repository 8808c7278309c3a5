"""A Flax model that knows nothing of tuned calls, compiled both ways: the faster answers, the report says why.

pip install flax; python examples/unmodified_model.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

import scheduler


class Block(nnx.Module):
    """Attention and a gated product, as models have them."""

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs) -> None:
        self.before = nnx.RMSNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.between = nnx.RMSNorm(width, rngs=rngs)
        self.gate = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(3 * width, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.before(x))
        y = self.between(x)
        return x + self.down(jax.nn.silu(self.gate(y)) * self.up(y))


def main() -> None:
    graph, state = nnx.split(Block(width=48, heads=3, rngs=nnx.Rngs(0)))
    x = jax.random.normal(jax.random.key(1), (2, 20, 48))

    def step(state: nnx.State, x: jax.Array) -> tuple[jax.Array, nnx.State]:
        """The loss, and the parameters after one step of gradient descent."""

        def loss(state: nnx.State) -> jax.Array:
            return jnp.mean((nnx.merge(graph, state)(x) - x) ** 2)

        value, gradient = jax.value_and_grad(loss)(state)
        return value, jax.tree.map(lambda w, g: w - 0.1 * g, state, gradient)

    # On a GPU: scheduler.optimize(step, donate_argnums=0). A CPU has no kernels but those of Pallas' interpreter.
    backends = "interpret" if jax.default_backend() == "cpu" else None
    fast = scheduler.optimize(step, donate_argnums=0, backends=backends, seconds=0.2)
    for _ in range(3):
        value, state = fast(state, x)
        print(f"loss {value:.4f}")
    print(fast.report())


if __name__ == "__main__":
    main()
