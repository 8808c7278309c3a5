"""An unmodified mixture of experts: `optimize` replaces its grouped products, forward and backward.

The layer is written as for `jax.jit`: tokens are sorted by expert, and `jax.lax.ragged_dot` multiplies those of each
expert by its matrix. On a Hopper GPU the kernels are Pallas's; here the interpreter runs them if there is none.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import scheduler

TOKENS, WIDTH, HIDDEN, EXPERTS, ACTIVE = 64, 32, 16, 4, 2


def layer(x: jax.Array, router: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    scores, chosen = jax.lax.top_k(jax.nn.softmax(x @ router), ACTIVE)
    order = jnp.argsort(chosen.ravel())
    sizes = jnp.bincount(chosen.ravel(), length=EXPERTS).astype(jnp.int32)
    rows = x[order // ACTIVE]
    hidden = jax.nn.silu(jax.lax.ragged_dot(rows, gate, sizes)) * jax.lax.ragged_dot(rows, up, sizes)
    out = jax.lax.ragged_dot(hidden, down, sizes) * scores.ravel()[order][:, None]
    return jnp.zeros_like(x).at[order // ACTIVE].add(out)


def with_tuned_calls(x: jax.Array, router: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """Computes the same layer; the gate and its product are one kernel."""
    scores, chosen = jax.lax.top_k(jax.nn.softmax(x @ router), ACTIVE)
    order = jnp.argsort(chosen.ravel())
    sizes = jnp.bincount(chosen.ravel(), length=EXPERTS).astype(jnp.int32)
    hidden = scheduler.tuned_gated_ragged_dot(x[order // ACTIVE], gate, up, sizes)
    out = scheduler.tuned_ragged_dot(hidden, down, sizes) * scores.ravel()[order][:, None]
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
    print(f"the layer of tuned calls differs by {float(jnp.abs(layer(*args) - with_tuned_calls(*args)).max()):.1e}")


if __name__ == "__main__":
    main()
