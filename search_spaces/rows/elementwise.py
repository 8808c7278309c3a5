"""The meaning of a program's equations, in operations that compilers of kernels have, and what they cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from search_spaces.random_bits import threefry2x32, threefry2x32_13, threefry2x32_20

F32 = np.float32
BIG = float(np.finfo(np.float32).max)


def _tanh(x: jax.Array) -> jax.Array:
    # The hardware's tanh is off by 2^-11 (PTX ISA, tanh.approx). Near 0 the quotient cancels, and a series does not.
    square = x * x
    near = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    far = 1 - 2 / (1 + jnp.exp(2 * x))
    return jnp.where(jnp.abs(x) < F32(0.3), near, far)


def _expm1(x: jax.Array) -> jax.Array:
    tail = 1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720 + x * (1 / 5040))))
    return jnp.where(jnp.abs(x) < F32(0.3), x * (1 + x * (0.5 + x * tail)), jnp.exp(x) - 1)


def _log1p(x: jax.Array) -> jax.Array:
    # log(1 + x) with the error of 1 + x taken out (Goldberg, ACM Computing Surveys 23, 1991, theorem 4).
    one = 1 + x
    series = x * (1 + x * (-0.5 + x * (1 / 3 + x * (-0.25 + x * 0.2))))
    return jnp.where(jnp.abs(x) < F32(2.0**-5), series, jnp.log(one))


def _logistic(x: jax.Array) -> jax.Array:
    return 1 / (1 + jnp.exp(-x))


def _sign(x: jax.Array) -> jax.Array:
    # Pallas asks the device how to lower `jnp.sign` for a TPU: without one, it fails.
    return jnp.where(x > 0, jnp.ones_like(x), jnp.where(x < 0, -jnp.ones_like(x), x))


def _floor(x: jax.Array) -> jax.Array:
    nearest = lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)
    return jnp.where(nearest > x, nearest - 1, nearest)


def narrow(x: jax.Array, dtype: str, bounded: bool = False) -> jax.Array:
    """Converts to a narrower type. The hardware's conversions to 8 bits saturate; JAX's give NaN or infinity.

    Args:
      bounded: whether all finite elements are in the range of the type.
    """
    if dtype == "float8_e4m3fn" and not bounded:  # 464 is halfway to the next number, which there is not
        x = jnp.where(jnp.abs(x) <= F32(464.0), x, F32(np.nan))
    return x.astype(dtype)


def _round(x: jax.Array, dtype: str, bounded: bool = False) -> jax.Array:
    """Rounds to a narrower type, and widens again."""
    return narrow(x, dtype, bounded).astype(jnp.float32)


def _flushed(x: jax.Array) -> jax.Array:
    """Returns zeros, with their sign, for subnormal numbers of float16, which `lax.reduce_precision` does not have."""
    return jnp.where(jnp.abs(x) < F32(2.0**-14), x * F32(0), x)


def _to_int(x: jax.Array, least: float, most: float) -> jax.Array:
    """Converts to integers as XLA does: towards zero, clipped to the range of the type, and NaN to 0."""
    bounded = jnp.minimum(jnp.maximum(x, F32(least)), F32(most))
    found = jnp.where(x == x, bounded, F32(0)).astype(jnp.int32)
    # The largest int32 is no float32: `most` is the float32 before it.
    return jnp.where(x > F32(most), np.int32(2**31 - 1), found) if most > 2**24 else found


def _where(pred: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.where(pred, x, y)


ELEMENTWISE: Mapping[str, Callable[..., jax.Array]] = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "div": jnp.divide,
    "int_div": lambda x, y: lax.div(x, y),
    "rem": lambda x, y: lax.rem(x, y),
    "max": jnp.maximum,
    "min": jnp.minimum,
    "neg": jnp.negative,
    "abs": jnp.abs,
    "sign": _sign,
    "exp": jnp.exp,
    "exp2": lambda x: lax.exp2(x),
    "log": jnp.log,
    "log1p": _log1p,
    "expm1": _expm1,
    "tanh": _tanh,
    "logistic": _logistic,
    "erf": lambda x: lax.erf(x),
    "sqrt": jnp.sqrt,
    "rsqrt": lambda x: lax.rsqrt(x),
    "floor": _floor,
    "ceil": lambda x: -_floor(-x),
    "nearest": lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN),
    "away": lambda x: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO),
    "round": _round,
    "flushed": _flushed,
    "to_int": _to_int,
    "to_float": lambda x: x.astype(jnp.float32),
    "bool_to_float": lambda x: jnp.where(x, F32(1), F32(0)),
    "bool_to_int": lambda x: jnp.where(x, np.int32(1), np.int32(0)),
    "is_nonzero": lambda x: x != 0,
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
    "shift_left": lambda x, y: lax.shift_left(x, y),
    "shift_right_arithmetic": lambda x, y: lax.shift_right_arithmetic(x, y),
    "shift_right_logical": lambda x, y: lax.shift_right_logical(x, y),
    "bitcast": lambda x, dtype: lax.bitcast_convert_type(x, dtype),
    "threefry2x32_13": lambda *x: threefry2x32(*x[:4], rounds=13)[x[4]],
    "threefry2x32_20": lambda *x: threefry2x32(*x[:4], rounds=20)[x[4]],
    "where": _where,
}

# FP32 and special-function instructions of one element; all others take one instruction. A random word counts twice the
# instructions that only the ALUs compute (`random_bits`), which have half the rate; JAX's keys draw two words.
COSTS: Mapping[str, tuple[float, float]] = {
    "exp": (1, 1),
    "exp2": (0, 1),
    "log": (1, 1),
    "log1p": (9, 1),
    "expm1": (11, 1),
    "tanh": (14, 2),
    "logistic": (3, 2),
    "erf": (20, 1),
    "div": (1, 1),
    "sqrt": (1, 1),
    "rsqrt": (0, 1),
    "floor": (3, 0),
    "ceil": (5, 0),
    "round": (1, 0),
    "flushed": (3, 0),
    "to_int": (4, 0),
    "sign": (3, 0),
    "int_div": (15, 1),
    "rem": (16, 1),
    "threefry2x32_13": (54, 0),
    "threefry2x32_20": (45, 0),
}


@dataclasses.dataclass(frozen=True)
class Reduction:
    """How elements become one number: the number of no element, and what joins two vectors or two numbers."""

    identity: float
    join: Callable[[jax.Array, jax.Array], jax.Array]
    along: Callable[..., jax.Array]


# `builder.online` makes the last two, which kernels compute along with another reduction of the same elements.
# "sum_exp" is the sum of exponentials relative to the maximum clamped to finite numbers, corrected when that maximum
# grows (Milakov, Gimelshein, arXiv:1805.02867). "centred_squares" is the sum of squares of differences from the mean.
REDUCTIONS: Mapping[str, Reduction] = {
    "reduce_sum": Reduction(0.0, jnp.add, jnp.sum),
    "reduce_max": Reduction(-np.inf, jnp.maximum, jnp.max),
    "reduce_min": Reduction(np.inf, jnp.minimum, jnp.min),
    "sum_exp": Reduction(-np.inf, jnp.maximum, jnp.max),
    "centred_squares": Reduction(0.0, jnp.add, jnp.sum),
}


def clamped(maximum: jax.Array) -> jax.Array:
    """Returns a finite shift of exponents: the difference of two shifts is then never NaN."""
    return jnp.minimum(jnp.maximum(maximum, F32(-BIG)), F32(BIG))


# Equations that XLA computes by functions of its own.
OF_XLA: Mapping[str, Callable[..., jax.Array]] = {
    "tanh": jnp.tanh,
    "expm1": jnp.expm1,
    "log1p": jnp.log1p,
    "logistic": lax.logistic,
    "floor": jnp.floor,
    "ceil": jnp.ceil,
    "round": lambda x, dtype, bounded=False: x.astype(dtype).astype(x.dtype),
    "flushed": lambda x: lax.reduce_precision(x, 5, 10),
    "threefry2x32_13": lambda *x: threefry2x32_13(*x[:4])[x[4]],
    "threefry2x32_20": lambda *x: threefry2x32_20(*x[:4])[x[4]],
}


# ------------------------------------------------------------------------------
# JAX primitives that compute each element from elements at the same place.

# The equation of each primitive that has one with the same operands.
SAME_NAMES: Mapping[str, str] = {
    "add": "add", "add_any": "add", "sub": "sub", "mul": "mul", "max": "max", "min": "min", "neg": "neg",
    "abs": "abs", "sign": "sign", "exp": "exp", "exp2": "exp2", "log": "log", "log1p": "log1p", "expm1": "expm1",
    "tanh": "tanh", "logistic": "logistic", "erf": "erf", "sqrt": "sqrt", "rsqrt": "rsqrt", "floor": "floor",
    "ceil": "ceil", "eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge", "and": "and", "or": "or",
    "xor": "xor", "shift_left": "shift_left", "shift_right_arithmetic": "shift_right_arithmetic",
    "shift_right_logical": "shift_right_logical",
}  # fmt: skip
_MAPPED = frozenset(
    {"div", "rem", "square", "one_minus_square", "integer_pow", "not", "is_finite", "clamp", "round", "select_n"}
    | {"convert_element_type", "reduce_precision", "copy", "copy_p", "stop_gradient", "name"}
)


# Elementwise primitives of which the dtype of the operands has all results.
EXACT = frozenset(
    {"max", "min", "and", "or", "xor", "not", "rem", "clamp", "select_n", "convert_element_type", "reduce_precision"}
)


def is_elementwise(name: str) -> bool:
    """Returns whether a primitive computes each element from elements at the same place."""
    return name in SAME_NAMES or name in _MAPPED
