"""A Gaussian process over points of a unit cube, and the improvement it expects.

Matern 5/2 kernel of one length for all coordinates, not fitted: on recorded shapes whose model was shuffled, fitted
lengths found no more in 16 and 32 trials. Formulas as in Rasmussen and Williams, Gaussian Processes for Machine
Learning (2006), chapters 2 and 4.2.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

# Distance over which the function changes, times the root of the coordinates, as distances grow; and the variance of an
# observation over that of the function.
_LENGTH, _NOISE = 0.5, 1e-2
# Multiplications above which LAPACK's threads are worth what they cost the processes beside this one.
_THREADED = 2**28


def predict(x: Array, y: Array, at: Array) -> tuple[Array, Array]:
    """Mean and standard deviation of the function at points `at`, after values `y` at points `x`."""
    level = y.mean()
    lower: Array = np.linalg.cholesky(_correlation(x, x) + _NOISE * np.eye(len(y))).astype(np.float64, copy=False)
    whitened = _solved(lower, (y - level)[:, None])[:, 0]
    cross = _solved(lower, _correlation(x, at))
    variance = max(float(whitened @ whitened) / len(y), 1e-12)
    left = np.maximum(1 - np.einsum("ij,ij->j", cross, cross), 1e-12)
    return level + whitened @ cross, np.sqrt(variance * left)


def _solved(lower: Array, right: Array) -> Array:
    """The solution of ``lower @ solution = right``, by this thread alone where that takes tens of milliseconds at most.

    After each solution of many columns OpenBLAS's threads, one a core, spin for some 0.1 s, as if more were to come. A
    search solves so every 0.1 s, beside workers that compile: two of these on two cores got 70 % of their work done.
    """
    if lower.size * right.shape[1] > _THREADED:
        from scipy.linalg import solve_triangular  # SciPy takes 0.7 s to import

        solution: Array = solve_triangular(lower, right, lower=True)
        return solution
    solved = np.empty_like(right)
    for row, factors in enumerate(lower):
        solved[row] = (right[row] - np.einsum("i,ij->j", factors[:row], solved[:row])) / factors[row]
    return solved


def expected_improvement(mean: Array, deviation: Array, best: float) -> Array:
    """By how much a value drawn at each point is expected to fall below `best` (Jones et al., 1998)."""
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
