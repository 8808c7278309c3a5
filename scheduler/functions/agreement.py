"""Checks whether two runs of a function agree up to rounding."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from search_spaces.configuration import measurements
from search_spaces.problem import Problem

# Tolerances in units in the last place (ULP): root mean square, and largest error relative to the largest element.
AVERAGE, WORST = 8.0, 64.0
# Factor of the change in the results when the inputs are rounded differently.
SENSITIVITY = 8.0
# Relative rounding of matmuls whose arithmetic is coarser than their operands, and of long float32 sums.
PRODUCTS = {"tf32": 2.0**-10, "bf16_3x": 2.0**-16}
FINEST = 2.0**-20


def rounding(problems: Iterable[Problem]) -> float:
    """Returns the coarsest relative rounding of the operands, matmuls and results of these problems."""
    found = [FINEST]
    for problem in problems:
        dtypes = {s.dtype for s in (*problem.operands(), *problem.results())}
        found += [float(jnp.finfo(dtype).eps) for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)]
        found.append(PRODUCTS.get(problem.arithmetic, 0.0))
    return max(found)


def disagreement(expected: Any, actual: Any, eps: float, sensitivity: Callable[[], Any]) -> str | None:
    """Describes where `actual` differs from `expected` by more than rounding; returns None if it does not.

    A result may differ by `AVERAGE` units of its own last place, or of `eps`, in the root mean square, and by `WORST`
    units in one element. The first is relative to the root mean square of the result, the second to its largest
    element. Elements that are not finite must match. A result may consist of rounding errors alone, such as a gradient
    that is zero, or the index of the larger of two equal numbers. It may therefore differ by `SENSITIVITY` times its
    change when the inputs are rounded differently.

    Args:
      eps: Relative rounding of the computation.
      sensitivity: Computes the results for inputs rounded differently. Called only if a result exceeds the tolerances.
    """
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(expected)]
    pairs = list(zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True))
    off = [_off(right, got) for right, got in pairs]
    wrong = [i for i, (right, _) in enumerate(pairs) if not _within(off[i], _allowed(right, eps))]
    if not wrong:
        return None
    moved = jax.tree.leaves(sensitivity())
    for i in wrong:
        right, _ = pairs[i]
        by_rounding = SENSITIVITY * _off(right, moved[i])
        if not _within(off[i], np.maximum(_allowed(right, eps), by_rounding)):
            return _words(names[i], right, off[i])
    return None


@measurements()
def rounded_differently(x: Any, seed: int) -> Any:
    """Moves each element of an inexact array up or down by one unit in the last place, or not at all, at random."""
    if not isinstance(x, jax.Array | np.ndarray | np.generic) or not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    return _rounded_differently(x, seed)


@jax.jit
def _rounded_differently(x: jax.Array, seed: int) -> jax.Array:
    step = jax.random.randint(jax.random.key(seed), x.shape, -1, 2)
    return x * (1 + step * float(jnp.finfo(x.dtype).eps))  # a Python float keeps weak types


def _within(off: Any, allowed: Any) -> bool:
    return bool(np.all(off <= allowed))  # False for NaN


def _allowed(right: Any, eps: float) -> Any:
    if not jnp.issubdtype(right.dtype, jnp.inexact):
        return np.zeros(3)
    unit = max(eps, float(jnp.finfo(right.dtype).eps))
    return np.array([AVERAGE * unit, WORST * unit, 0.0])


@measurements()
def _off(right: Any, got: Any) -> Any:
    """Returns the relative RMS error, the relative largest error, and the number of mismatched non-finite elements."""
    if not right.size or right.dtype == jax.dtypes.float0:  # float0: the derivative with respect to an integer
        return np.zeros(3)
    if jnp.issubdtype(right.dtype, jax.dtypes.prng_key):
        right, got = jax.random.key_data(right), jax.random.key_data(got)
    compare = _floats_off if jnp.issubdtype(right.dtype, jnp.inexact) else _others_off
    return np.asarray(jax.device_get(compare(right, got)), np.float64)


@jax.jit
def _others_off(right: jax.Array, got: jax.Array) -> jax.Array:
    share = (right != got).mean(dtype=jnp.float32)
    return jnp.array([share, share, 0.0])


@jax.jit
def _floats_off(right: jax.Array, got: jax.Array) -> jax.Array:
    wide = functools.partial(jnp.asarray, dtype=jnp.promote_types(right.dtype, jnp.float32))
    right, got = wide(right), wide(got)
    finite = jnp.isfinite(right)
    same = (right == got) | (jnp.isnan(right) & jnp.isnan(got))
    unlike = jnp.where(finite, ~jnp.isfinite(got), ~same).sum()
    size = jnp.where(finite, jnp.abs(right), 0.0)
    # Dividing by the largest element keeps squares from overflowing or underflowing.
    largest = size.max()
    scale = jnp.where(largest > 0, largest, 1.0)
    error = jnp.where(finite & jnp.isfinite(got), jnp.abs(right - got), 0.0) / scale
    mean = jnp.sqrt((error**2).mean()) / jnp.where(largest > 0, jnp.sqrt(((size / scale) ** 2).mean()), 1.0)
    return jnp.array([mean, error.max(), unlike.astype(mean.dtype)])


def _words(name: str, right: Any, off: Any) -> str:
    what = f"result{name} {right.dtype}{list(right.shape)}"
    if not jnp.issubdtype(right.dtype, jnp.inexact):
        return f"{off[0]:.2%} of the elements of {what} differ"
    if off[2]:
        return f"{off[2]:.0f} elements of {what} are finite in one of them alone"
    return f"{what} differs by {off[0]:.2g} of its size in the mean square and by {off[1]:.2g} of its largest element"
