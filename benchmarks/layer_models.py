"""The MLPs that sharded_layers.py divides over devices: written once, on operations in plain jnp or in tuned calls."""

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


class Operations(Protocol):
    """What layers are made of; arrays are ``[tokens, ...]``."""

    def project(self, x: Array, w: Array, residual: Array) -> Array: ...
    def gated(self, x: Array, gate: Array, up: Array) -> Array: ...


class Jnp:
    """As people write it, in the dtype of the operands."""

    def project(self, x: Array, w: Array, residual: Array) -> Array:
        return x @ w + residual

    def gated(self, x: Array, gate: Array, up: Array) -> Array:
        return jax.nn.silu(x @ gate) * (x @ up)


class Tuned:
    """The same in tuned calls."""

    def project(self, x: Array, w: Array, residual: Array) -> Array:
        return scheduler.tuned_matmul(x, w, residual=residual)

    def gated(self, x: Array, gate: Array, up: Array) -> Array:
        return scheduler.tuned_gated_matmul(x, (gate, up))


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


@dataclasses.dataclass(frozen=True)
class Case:
    """A function that is timed whole."""

    name: str
    model: Mlp

    def function(self, ops: Operations) -> Callable[..., Array]:
        """``f(x, parameters of each layer)``."""

        def forward(x: Array, layers: tuple[Parameters, ...]) -> Array:
            for w in layers:
                x = ops.project(ops.gated(x, w["gate"], w["up"]), w["down"], x)
            return x

        forward.__qualname__ = f"{self.name} in {type(ops).__name__}"
        return forward

    def arguments(self, dtype: Any = jnp.bfloat16, seed: int = 0) -> tuple[Array, tuple[Parameters, ...]]:
        """Standard normal tokens; weights that keep them so."""
        keys = iter(jax.random.split(jax.random.key(seed), 1 + self.model.layers * len(self.model.shapes())))
        x = _drawn(next(keys), (self.model.tokens, self.model.width), 1.0, dtype)
        layers = tuple(
            {name: _drawn(next(keys), shape, shape[0] ** -0.5, dtype) for name, shape in self.model.shapes().items()}
            for _ in range(self.model.layers)
        )
        return x, layers


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _drawn(key: Array, shape: tuple[int, ...], scale: float, dtype: Any) -> Array:
    return (scale * jax.random.normal(key, shape, dtype)).astype(dtype)
