"""A matrix product answered by the model, then searched, then found in the cache.

python examples/quickstart.py
"""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp

import scheduler
from scheduler import tuned_matmul


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="    log: %(message)s")
    logging.getLogger("jax").setLevel(logging.WARNING)
    key_a, key_b = jax.random.split(jax.random.key(0))
    a, b = jax.random.normal(key_a, (256, 128)), jax.random.normal(key_b, (128, 256))

    print("1. Nothing is known of this shape yet: the cost model answers.")
    expected = tuned_matmul(a, b)

    print("2. Search its schedules on this device, and store the best.")
    record = scheduler.tune("matmul", {"m": 256, "n": 256, "k": 128, "dtype": "float32"}, budget=12)
    for entry in record.entries:
        schedule = " ".join(f"{name}={value}" for name, value in entry.schedule.items())
        print(f"   {1e6 * entry.measurement.median_s:9.1f} us  {entry.backend} {schedule}")

    print("3. The same call now finds it, eager and under jit and grad.")
    c = tuned_matmul(a, b, on_miss="error")
    assert jnp.allclose(c, expected, rtol=1e-2, atol=1e-2)
    gradient = jax.jit(jax.grad(lambda a, b: tuned_matmul(a, b).sum()))(a, b)
    print(f"   {record.winner.backend} answers; the gradient has shape {gradient.shape}")


if __name__ == "__main__":
    main()
