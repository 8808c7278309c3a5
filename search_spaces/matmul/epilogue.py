"""The epilogue of a product: ``activation(acc + bias) + residual``, one formula for every kernel.

The bias before the activation is the order of cuBLASLt (``cublasLtEpilogue_t``); the residual after it is that of
CUTLASS's ``LinearCombinationResidualBlock``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

# Of a bias and of a residual that a kernel reads.
DTYPES = ("bfloat16", "float16", "float32")
Activation = Literal["relu", "gelu", "silu"]


def _relu(x: jax.Array) -> jax.Array:
    """Zero has the slope zero, and NaN stays, as in `jax.nn.relu`."""
    return jnp.where(x <= 0, jnp.zeros_like(x), x)


def _silu(x: jax.Array) -> jax.Array:
    return x * lax.logistic(x)


def _gelu(x: jax.Array) -> jax.Array:
    """``x / 2 (1 + tanh(u))`` with ``u = sqrt(2 / pi) (x + 0.044715 x^3)``, and ``(1 + tanh(u)) / 2 = logistic(2 u)``.

    Hendrycks and Gimpel, arXiv:1606.08415; the default of `jax.nn.gelu`. An exponential is cheaper than a tanh in every
    kernel, and loses nothing where the two terms nearly cancel.
    """
    return x * lax.logistic(math.sqrt(8 / math.pi) * (x + 0.044715 * x * x * x))


# By the names in `Activation`. Mosaic GPU lowers each of them, on float32 tiles.
ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = MappingProxyType(
    {"relu": _relu, "gelu": _gelu, "silu": _silu}
)
# Exponentials of one element.
EXPONENTIALS: Mapping[str, int] = MappingProxyType({"": 0, "relu": 0, "gelu": 1, "silu": 1})
# FP32 operations that come with each of these: a GELU makes 1024 x 3072 x 768 take 2.4 us longer, of which its
# exponentials take 0.8 (H200).
ACTIVATION_OPERATIONS = 17


def apply(
    acc: jax.Array, *, bias: jax.Array | None = None, activation: str = "", residual: jax.Array | None = None
) -> jax.Array:
    """``activation(acc + bias) + residual``, for a tile inside a kernel as for whole arrays.

    Args:
      acc: float32, or wider; the arithmetic is in its dtype, and so is the result: the caller rounds once.
      bias, residual: of any dtype that converts to it, of the shape of `acc` or broadcasting to it with as many axes.
      activation: a name in `ACTIVATIONS`; "" is none.
    """
    if bias is not None:
        acc = acc + bias.astype(acc.dtype)
    if activation:
        acc = ACTIVATIONS[activation](acc)
    return acc if residual is None else acc + residual.astype(acc.dtype)
