"""An unmodified mixture of experts: `optimize` replaces its grouped products, forward and backward.

The layer is written as for `jax.jit`: tokens are sorted by expert, and `jax.lax.ragged_dot` multiplies those of each
expert by its matrix. On a Hopper GPU the kernels are Pallas's; here the interpreter runs them if there is none.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

import scheduler

Experts = Callable[..., jax.Array]
TOKENS, WIDTH, HIDDEN, EXPERTS, ACTIVE = 64, 32, 16, 4, 2


def experts(rows: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array, sizes: jax.Array) -> jax.Array:
    hidden = jax.nn.silu(jax.lax.ragged_dot(rows, gate, sizes)) * jax.lax.ragged_dot(rows, up, sizes)
    return jax.lax.ragged_dot(hidden, down, sizes)


def tuned_experts(rows: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array, sizes: jax.Array) -> jax.Array:
    """Computes the same by tuned calls; the gate and its product are one kernel."""
    hidden = scheduler.tuned_gated_ragged_dot(rows, gate, up, sizes)
    return scheduler.tuned_ragged_dot(hidden, down, sizes)


def layer(x: jax.Array, router: jax.Array, *weights: jax.Array, multiply: Experts = experts) -> jax.Array:
    scores, chosen = jax.lax.top_k(jax.nn.softmax(x @ router), ACTIVE)
    order = jnp.argsort(chosen.ravel())
    sizes = jnp.bincount(chosen.ravel(), length=EXPERTS).astype(jnp.int32)
    out = multiply(x[order // ACTIVE], *weights, sizes) * scores.ravel()[order][:, None]
    return jnp.zeros_like(x).at[order // ACTIVE].add(out)


def gradient(*args: jax.Array) -> tuple[jax.Array, ...]:
    return jax.grad(lambda *args: jnp.sum(layer(*args) ** 2), argnums=(0, 2, 3, 4))(*args)


def main() -> None:
    shapes = [(TOKENS, WIDTH), (WIDTH, EXPERTS), *[(EXPERTS, WIDTH, HIDDEN)] * 2, (EXPERTS, HIDDEN, WIDTH)]
    keys = jax.random.split(jax.random.key(0), len(shapes))
    args = [jax.random.normal(key, shape) * shape[-2] ** -0.5 for key, shape in zip(keys, shapes, strict=True)]
    on_cpu = jax.default_backend() == "cpu"
    fast = scheduler.optimize(gradient, backends="interpret" if on_cpu else None, keep="tuned" if on_cpu else "faster")
    wanted, found = gradient(*args), fast(*args)
    print(fast.report())
    errors = [float(jnp.abs(a - b).max()) for a, b in zip(wanted, found, strict=True)]
    print(f"the gradients of tokens and experts are {'right' if max(errors) < 1e-4 else 'wrong'}")
    apart = jnp.abs(layer(*args) - layer(*args, multiply=tuned_experts)).max()
    print(f"the layer of tuned calls differs by {float(apart):.1e}")


if __name__ == "__main__":
    main()
