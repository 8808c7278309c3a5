"""A Gaussian process over points of a unit cube, and its expected improvement.

The kernel is Matern 5/2 with one length for all coordinates. The length is not fitted: on recorded shapes with a
shuffled model, fitted lengths found no better schedules in 16 and 32 trials. Formulas: Rasmussen and Williams, Gaussian
Processes for Machine Learning (2006), chapters 2 and 4.2.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

# The length scale, which is multiplied by the root of the number of coordinates because distances grow with it; and the
# variance of the noise relative to that of the function.
_LENGTH, _NOISE = 0.5, 1e-2
# Number of multiplications above which LAPACK's threads are worth their cost to concurrent processes.
_THREADED = 2**28


def predict(x: Array, y: Array, at: Array) -> tuple[Array, Array]:
    """Returns the mean and standard deviation of the function at points `at`, given values `y` at points `x`."""
    level = y.mean()
    lower: Array = np.linalg.cholesky(_correlation(x, x) + _NOISE * np.eye(len(y))).astype(np.float64, copy=False)
    whitened = _solved(lower, (y - level)[:, None])[:, 0]
    cross = _solved(lower, _correlation(x, at))
    variance = max(float(whitened @ whitened) / len(y), 1e-12)
    left = np.maximum(1 - np.einsum("ij,ij->j", cross, cross), 1e-12)
    return level + whitened @ cross, np.sqrt(variance * left)


def _solved(lower: Array, right: Array) -> Array:
    """Solves ``lower @ solution = right``, in this thread alone if that takes at most tens of milliseconds.

    After each solution with many columns, OpenBLAS's threads (one per core) spin for about 0.1 s, waiting for more
    work. A search solves every 0.1 s while workers compile: on two cores, two workers got only 70 % of their work done.
    """
    if lower.size * right.shape[1] > _THREADED:
        from scipy.linalg import solve_triangular  # importing SciPy takes 0.7 s

        solution: Array = solve_triangular(lower, right, lower=True)
        return solution
    solved = np.empty_like(right)
    for row, factors in enumerate(lower):
        solved[row] = (right[row] - np.einsum("i,ij->j", factors[:row], solved[:row])) / factors[row]
    return solved


def expected_improvement(mean: Array, deviation: Array, best: float) -> Array:
    """Returns the expected improvement below `best` at each point (Jones et al., 1998)."""
    z = (best - mean) / deviation
    density = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)
    below = np.array([*map(math.erfc, -z / 2**0.5)]) / 2
    improvement: Array = deviation * (z * below + density)
    return improvement


def _correlation(x: Array, at: Array) -> Array:
    squares = sum((np.subtract.outer(a, b) ** 2 for a, b in zip(x.T, at.T, strict=True)), np.zeros((len(x), len(at))))
    r = 5.0**0.5 / (_LENGTH * max(x.shape[1], 1) ** 0.5) * np.sqrt(squares)
    correlation: Array = (1 + r + r**2 / 3) * np.exp(-r)
    return correlation
