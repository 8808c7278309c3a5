"""The layers that layer.py and many_gpus.py time: each written once, on operations in plain jnp or in tuned calls."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp

import scheduler

Array = jax.Array
Parameters = Mapping[str, Array]
EPS = 1e-5
ROPE_BASE = 500_000.0


class Operations(Protocol):
    """What layers are made of; arrays are ``[tokens, ...]``."""

    def rms_norm(self, x: Array, weight: Array) -> Array: ...
    def project(self, x: Array, w: Array, residual: Array | None = None, bias: Array | None = None) -> Array: ...
    def project_gelu(self, x: Array, w: Array, bias: Array) -> Array: ...
    def divided(self, x: Array, w: Array, sizes: tuple[int, ...], bias: Array | None = None) -> tuple[Array, ...]: ...
    def gated(self, x: Array, w: Array | tuple[Array, Array]) -> Array: ...
    def attention(self, q: Array, k: Array, v: Array, causal: bool) -> Array: ...


class Jnp:
    """As people write it, in the dtype of the operands, with cuDNN's attention where there is one."""

    def rms_norm(self, x: Array, weight: Array) -> Array:
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + EPS)
        return (normed * weight.astype(jnp.float32)).astype(x.dtype)

    def project(self, x: Array, w: Array, residual: Array | None = None, bias: Array | None = None) -> Array:
        y = x @ w
        y = y if bias is None else y + bias
        return y if residual is None else y + residual

    def project_gelu(self, x: Array, w: Array, bias: Array) -> Array:
        return jax.nn.gelu(x @ w + bias)

    def divided(self, x: Array, w: Array, sizes: tuple[int, ...], bias: Array | None = None) -> tuple[Array, ...]:
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
        return tuple(jnp.split(self.project(x, w, bias=bias), ends, axis=-1))

    def gated(self, x: Array, w: Array | tuple[Array, Array]) -> Array:
        gate, up = (x @ w[0], x @ w[1]) if isinstance(w, tuple) else jnp.split(x @ w, 2, axis=-1)
        return jax.nn.silu(gate) * up

    def attention(self, q: Array, k: Array, v: Array, causal: bool) -> Array:
        on_gpu = jax.default_backend() == "gpu" and q.dtype in (jnp.bfloat16, jnp.float16)
        return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn" if on_gpu else None)


class Tuned:
    """The same in tuned calls."""

    def rms_norm(self, x: Array, weight: Array) -> Array:
        return scheduler.tuned_rms_norm(x, weight, eps=EPS)

    def project(self, x: Array, w: Array, residual: Array | None = None, bias: Array | None = None) -> Array:
        return scheduler.tuned_matmul(x, w, residual=residual, bias=bias)

    def project_gelu(self, x: Array, w: Array, bias: Array) -> Array:
        return scheduler.tuned_matmul(x, w, bias=bias, activation="gelu")

    def divided(self, x: Array, w: Array, sizes: tuple[int, ...], bias: Array | None = None) -> tuple[Array, ...]:
        return scheduler.tuned_matmul(x, w, bias=bias, split_sizes=sizes)

    def gated(self, x: Array, w: Array | tuple[Array, Array]) -> Array:
        return scheduler.tuned_gated_matmul(x, w)

    def attention(self, q: Array, k: Array, v: Array, causal: bool) -> Array:
        return scheduler.tuned_flash_attention(q, k, v, causal=causal)


@dataclasses.dataclass(frozen=True)
class Llama:
    """A layer of Llama 3 (arXiv:2407.21783, table 3: 8B): RMS norm, rotary positions, grouped queries, SwiGLU.

    Attributes:
      cache: keys and values of each of `tokens` sequences that a decoding step attends to; 0 is one sequence of
        `tokens` that attends to itself. What the step adds to the cache are results; writing it is the caller's.
    """

    tokens: int
    layers: int = 4
    cache: int = 0
    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    hidden: int = 14336

    @property
    def sizes(self) -> tuple[int, ...]:
        kv = self.kv_heads * self.head_dim
        return self.heads * self.head_dim, kv, kv

    def shapes(self) -> dict[str, tuple[int, ...]]:
        d, h = self.width, self.hidden
        cache = (self.tokens, self.cache, self.kv_heads, self.head_dim)
        weights = {"norm1": (d,), "qkv": (d, sum(self.sizes)), "o": (self.sizes[0], d), "norm2": (d,)}
        caches = {"k_cache": cache, "v_cache": cache} if self.cache else {}
        return weights | {"gate_up": (d, 2 * h), "down": (h, d)} | caches

    def layer(self, ops: Operations, x: Array, w: Parameters) -> tuple[Array, tuple[Array, ...]]:
        q, k, v = (
            part.reshape(self.tokens, -1, self.head_dim)
            for part in ops.divided(ops.rms_norm(x, w["norm1"]), w["qkv"], self.sizes)
        )
        q, k = self._rotated(q), self._rotated(k)
        if self.cache:
            attended = ops.attention(q[:, None], w["k_cache"], w["v_cache"], causal=False)
        else:
            attended = ops.attention(q[None], k[None], v[None], causal=True)
        x = ops.project(attended.reshape(self.tokens, -1), w["o"], residual=x)
        x = ops.project(ops.gated(ops.rms_norm(x, w["norm2"]), w["gate_up"]), w["down"], residual=x)
        return x, (k, v) if self.cache else ()

    def _rotated(self, x: Array) -> Array:
        """Rotary positions; of a decoding step, that of the last key of the cache."""
        frequencies = ROPE_BASE ** (-jnp.arange(0, self.head_dim, 2, dtype=jnp.float32) / self.head_dim)
        positions = jnp.full(self.tokens, self.cache - 1) if self.cache else jnp.arange(self.tokens)
        angles = positions[:, None, None] * frequencies
        low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class Mlp:
    """What a layer of Llama 3 70B (arXiv:2407.21783, table 3) has behind its second norm: SwiGLU, and the residual.

    The weights of gate and up are two arrays, so that devices can divide the columns of both.
    """

    tokens: int
    layers: int = 4
    width: int = 8192
    hidden: int = 28672

    def shapes(self) -> dict[str, tuple[int, ...]]:
        d, h = self.width, self.hidden
        return {"gate": (d, h), "up": (d, h), "down": (h, d)}

    def layer(self, ops: Operations, x: Array, w: Parameters) -> tuple[Array, tuple[Array, ...]]:
        return ops.project(ops.gated(x, (w["gate"], w["up"])), w["down"], residual=x), ()


@dataclasses.dataclass(frozen=True)
class Gpt2:
    """A layer like those of GPT-2 XL: layer norms and biases, heads of 64, GELU."""

    tokens: int = 4096
    layers: int = 4
    length: int = 1024
    width: int = 1600
    heads: int = 25

    def shapes(self) -> dict[str, tuple[int, ...]]:
        d = self.width
        weights: dict[str, tuple[int, ...]] = {"qkv": (d, 3 * d), "o": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}
        biases = {f"{name}_bias": shape[-1:] for name, shape in weights.items()}
        return weights | biases | dict.fromkeys(("norm1", "norm1_bias", "norm2", "norm2_bias"), (d,))

    def layer(self, ops: Operations, x: Array, w: Parameters) -> tuple[Array, tuple[Array, ...]]:
        normed = _layer_norm(x, w["norm1"], w["norm1_bias"])
        q, k, v = (
            part.reshape(-1, self.length, self.heads, self.width // self.heads)
            for part in ops.divided(normed, w["qkv"], (self.width,) * 3, bias=w["qkv_bias"])
        )
        attended = ops.attention(q, k, v, causal=True).reshape(x.shape)
        x = ops.project(attended, w["o"], residual=x, bias=w["o_bias"])
        hidden = ops.project_gelu(_layer_norm(x, w["norm2"], w["norm2_bias"]), w["up"], w["up_bias"])
        return ops.project(hidden, w["down"], residual=x, bias=w["down_bias"]), ()


def _layer_norm(x: Array, weight: Array, bias: Array) -> Array:
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + EPS)
    return (normed * weight.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class Case:
    """A function that is timed whole.

    Attributes:
      name: of its ratio in the summary, without ``_vs_jnp``.
      train: the loss and its gradients by all parameters, in place of the results.
    """

    name: str
    model: Llama | Gpt2 | Mlp
    train: bool = False

    def function(self, ops: Operations) -> Callable[..., Any]:
        """``f(x, parameters of each layer)``."""

        def forward(x: Array, layers: tuple[Parameters, ...]) -> Any:
            added = []
            for w in layers:
                x, new = self.model.layer(ops, x, w)
                added.append(new)
            return x, added

        def loss(layers: tuple[Parameters, ...], x: Array) -> Array:
            return jnp.mean(forward(x, layers)[0].astype(jnp.float32) ** 2)

        def step(x: Array, layers: tuple[Parameters, ...]) -> Any:
            return jax.value_and_grad(loss)(layers, x)

        chosen = step if self.train else forward
        chosen.__qualname__ = f"{self.name} in {type(ops).__name__}"
        return chosen

    def arguments(self, dtype: Any = jnp.bfloat16, seed: int = 0) -> tuple[Array, tuple[Parameters, ...]]:
        """Standard normal tokens; weights that keep them so."""
        keys = iter(jax.random.split(jax.random.key(seed), 1 + self.model.layers * len(self.model.shapes())))
        x = _drawn(next(keys), (self.model.tokens, self.model.width), 1.0, dtype)
        layers = tuple(
            {name: self._parameter(next(keys), name, shape, dtype) for name, shape in self.model.shapes().items()}
            for _ in range(self.model.layers)
        )
        return x, layers

    def _parameter(self, key: Array, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        if name.startswith("norm") and not name.endswith("bias"):
            return jnp.ones(shape, dtype)
        return _drawn(key, shape, 1.0 if len(shape) == 4 else shape[0] ** -0.5, dtype)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _drawn(key: Array, shape: tuple[int, ...], scale: float, dtype: Any) -> Array:
    return (scale * jax.random.normal(key, shape, dtype)).astype(dtype)


CASES = (
    Case("prefill", Llama(4096)),
    Case("decode256", Llama(256, layers=2, cache=4096)),
    Case("decode16", Llama(16, cache=4096)),
    Case("gpt2", Gpt2()),
    Case("train", Llama(4096), train=True),
)
# Where the interpreter rehearses: seconds, whose times say nothing about the kernels.
_SMALL = Llama(16, layers=1, width=32, heads=2, kv_heads=1, head_dim=16, hidden=48)
REHEARSED = (
    Case("prefill", _SMALL),
    Case("decode16", dataclasses.replace(_SMALL, tokens=4, cache=24)),
    Case("gpt2", Gpt2(tokens=32, layers=1, length=16, width=32, heads=2)),
    Case("train", _SMALL, train=True),
)
