"""The matmul epilogue ``activation(acc + bias) + residual``, one formula for every kernel.

cuBLASLt also adds the bias before the activation (``cublasLtEpilogue_t``). CUTLASS's ``LinearCombinationResidualBlock``
also adds the residual after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

# Dtypes of a bias and of a residual.
DTYPES = ("bfloat16", "float16", "float32")
Activation = Literal["relu", "gelu", "silu"]


def _relu(x: jax.Array) -> jax.Array:
    """Has slope zero at zero and propagates NaN, like `jax.nn.relu`."""
    return jnp.where(x <= 0, jnp.zeros_like(x), x)


def _silu(x: jax.Array) -> jax.Array:
    return x * lax.logistic(x)


def _gelu(x: jax.Array) -> jax.Array:
    """``x / 2 (1 + tanh(u))`` with ``u = sqrt(2 / pi) (x + 0.044715 x^3)``, and ``(1 + tanh(u)) / 2 = logistic(2 u)``.

    Source: Hendrycks and Gimpel, arXiv:1606.08415; the default of `jax.nn.gelu`. An exponential is cheaper than a tanh
    in every kernel, and loses no accuracy where the two terms nearly cancel.
    """
    return x * lax.logistic(math.sqrt(8 / math.pi) * (x + 0.044715 * x * x * x))


# Keyed by the names in `Activation`. Mosaic GPU lowers each of them on float32 tiles.
ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = MappingProxyType(
    {"relu": _relu, "gelu": _gelu, "silu": _silu}
)
# Exponentials per element.
EXPONENTIALS: Mapping[str, int] = MappingProxyType({"": 0, "relu": 0, "gelu": 1, "silu": 1})
# FP32 operations per exponential: a GELU makes 1024 x 3072 x 768 take 2.4 us longer, of which its exponentials take 0.8
# us (H200).
ACTIVATION_OPERATIONS = 17


def apply(
    acc: jax.Array, *, bias: jax.Array | None = None, activation: str = "", residual: jax.Array | None = None
) -> jax.Array:
    """Computes ``activation(acc + bias) + residual``, for a tile inside a kernel or for whole arrays.

    Args:
      acc: float32 or wider. The arithmetic and the result have its dtype; the caller rounds once.
      bias, residual: of any dtype that converts to that of `acc`. The shape is that of `acc`, or broadcasts to it with
        the same number of axes.
      activation: a name in `ACTIVATIONS`; "" means none.
    """
    if bias is not None:
        acc = acc + bias.astype(acc.dtype)
    if activation:
        acc = ACTIVATIONS[activation](acc)
    return acc if residual is None else acc + residual.astype(acc.dtype)
