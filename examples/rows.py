"""A new formula of one row in a few lines: its kernel, its gradient, a search; and what an H200 needs for named ones.

python examples/rows.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

import scheduler
from scheduler.core import hardware
from scheduler.model.cost import CostModel
from search_spaces import load


@scheduler.rows
def qk_norm(x: jax.Array, weight: jax.Array, *, cap: float = 30.0) -> jax.Array:
    """A root-mean-square norm of queries, with their logits capped."""
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y) + 1e-6) * weight
    return (cap * jnp.tanh(y / cap)).astype(x.dtype)


def loss(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(qk_norm(x, weight, backends="pallas")))


def plain(x: jax.Array, weight: jax.Array) -> jax.Array:
    norm = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * weight
    return jnp.sum(jnp.square(30.0 * jnp.tanh(norm / 30.0)))


def main() -> None:
    x, weight = jax.random.normal(jax.random.key(0), (8, 64, 128)), jnp.ones(128)
    record = qk_norm.tune(x, weight, budget=3)  # type: ignore[attr-defined]
    print(f"qk_norm: {record.tried} schedules tried; a problem of {qk_norm.problem(x, weight).rows} rows")  # type: ignore[attr-defined]
    for name, found, wanted in zip(
        ("x", "weight"), *(jax.grad(f, argnums=(0, 1))(x, weight) for f in (loss, plain)), strict=True
    ):
        print(f"gradient of {name}: {'right' if jnp.allclose(found, wanted, rtol=1e-4, atol=1e-4) else 'wrong'}")

    chip = hardware.find("NVIDIA H200")
    for name in ("softmax", "rms_norm", "silu_and_mul", "cross_entropy"):
        operation = load(name)
        for rows, columns in ((16384, 4096), (512, 131072)):
            problem = operation.problem(rows=rows, columns=columns)
            first = scheduler.predict(operation, problem, hardware=chip.kind)
            bound_us = CostModel(chip).lower_bound(problem) * 1e6
            chosen = " ".join(f"{field}={value}" for field, value in first.schedule.items() if value)
            print(f"{name} {rows} x {columns}: {bound_us:.0f} us at least; {first.backend} {chosen}")


if __name__ == "__main__":
    main()
