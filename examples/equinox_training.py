"""Training an Equinox model, whose leaves are arrays and functions: what a step runs, and it with tuned products.

pip install equinox optax; python examples/equinox_training.py
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import scheduler

OPTIMIZER = optax.sgd(0.1, momentum=0.9)


@eqx.filter_jit(donate="all-except-first")
def step(
    batch: tuple[jax.Array, jax.Array], model: eqx.nn.MLP, state: optax.OptState
) -> tuple[eqx.nn.MLP, optax.OptState, jax.Array]:
    """One step: the model and the optimizer's state after it, and the loss."""
    x, y = batch
    loss, gradients = eqx.filter_value_and_grad(lambda model: jnp.mean((jax.vmap(model)(x) - y) ** 2))(model)
    updates, state = OPTIMIZER.update(gradients, state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), state, loss


def main() -> None:
    model = eqx.nn.MLP(16, 16, 32, depth=1, activation=jax.nn.gelu, key=jax.random.key(0))
    state = OPTIMIZER.init(eqx.filter(model, eqx.is_array))
    x = jax.random.normal(jax.random.key(1), (32, 16))
    batch = x, jnp.roll(x, 1, axis=1)

    found = scheduler.problems(step, batch, model, state)
    print(f"A step has {len(found.untuned)} products that could be tuned, backward ones among them.")

    # On a GPU: scheduler.optimize(step). A CPU has no kernels but those of Pallas' interpreter.
    options = {"backends": "interpret", "keep": "tuned"} if jax.default_backend() == "cpu" else {}
    fast = scheduler.optimize(step, **options)
    losses = []
    for _ in range(20):
        model, state, loss = fast(batch, model, state)
        losses.append(float(loss))
    print(fast.report())
    print(
        f"The loss went from {losses[0]:.3f} to {losses[-1]:.3f}; the activation is still {model.activation.__name__}."
    )


if __name__ == "__main__":
    main()
