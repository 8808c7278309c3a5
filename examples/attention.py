"""Attention: as `jax.nn.dot_product_attention`, tuned forward and backward, here by Pallas's interpreter.

python examples/attention.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import scheduler
from scheduler import tuned_flash_attention
from scheduler.core import hardware
from scheduler.model.cost import CostModel
from search_spaces.flash_attention import FlashAttentionProblem


def main() -> None:
    chip = hardware.find("NVIDIA H200")
    for causal in (False, True):
        long = FlashAttentionProblem(2, 8192, 8192, 16, 16, 128, causal=causal)
        model = CostModel(chip)
        bound_us, xla_us = model.lower_bound(long) * 1e6, model.library_seconds(long) * 1e6
        print(
            f"on an {chip.kind} {long} takes {bound_us:.0f} us at least, by XLA, which writes logits, {xla_us:.0f} us"
        )

    shape = {"batch": 1, "q_len": 64, "kv_len": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "causal": True}
    for name, fields in (("flash_attention", {"return_lse": True}), ("flash_attention_backward", {})):
        record = scheduler.tune(name, shape | fields | {"dtype": "float32"}, budget=3)
        print(f"{name}: {record.winner.backend} after {record.tried} trials")

    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (1, 64, heads, 32)) for key, heads in zip(keys, (4, 2, 2), strict=True))

    def ours(q: jax.Array) -> jax.Array:
        return jnp.sum(tuned_flash_attention(q, k, v, causal=True, backends="pallas") ** 2)

    def jaxs(q: jax.Array) -> jax.Array:
        return jnp.sum(jax.nn.dot_product_attention(q, k, v, is_causal=True) ** 2)

    right = jnp.allclose(jax.grad(ours)(q), jax.grad(jaxs)(q), atol=1e-4)
    print(f"the gradient is {'right' if right else 'wrong'}")


if __name__ == "__main__":
    main()
