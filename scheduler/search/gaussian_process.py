"""A Gaussian process over points of a unit cube, fitted to few observations, and the improvement it expects.

Matern 5/2 kernel with a length for each coordinate; formulas as in Rasmussen and Williams, Gaussian Processes for
Machine Learning (2006), chapters 2, 4.2 and 5.4.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
from scipy.linalg import cho_factor, cho_solve, solve_triangular
from scipy.optimize import minimize
from scipy.spatial.distance import cdist
from scipy.special import ndtr

Array = npt.NDArray[np.float64]

_SQRT5 = 5.0**0.5
_PRIOR_LENGTH, _PRIOR_NOISE = 0.5, 1e-2
_SPREAD = np.array([1.0, 1.5])  # of the logarithms of lengths and noise, as standard deviations of the prior


@dataclasses.dataclass(frozen=True)
class Process:
    """What is believed of a function before looking at its values.

    Attributes:
      lengths: distance along each coordinate over which the function changes.
      noise: variance of an observation over the variance of the function.
    """

    lengths: Array
    noise: float

    @classmethod
    def prior(cls, coordinates: int) -> Process:
        """The same length in each direction, growing with their number as distances do."""
        return cls(np.full(coordinates, _PRIOR_LENGTH * max(coordinates, 1) ** 0.5), _PRIOR_NOISE)

    def fit(self, x: Array, y: Array, iterations: int = 12) -> Process:
        """The most likely process for values `y` at points `x`, starting here and drawn towards the prior."""
        prior = Process.prior(x.shape[1])
        center = np.log(np.append(prior.lengths, prior.noise))
        spread = np.append(np.full(x.shape[1], _SPREAD[0]), _SPREAD[1])
        squares = (x[:, None, :] - x[None, :, :]).transpose(2, 0, 1) ** 2
        y = y - y.mean()

        def loss(theta: Array) -> tuple[float, Array]:
            inverse_squares = np.exp(-2 * theta[:-1])
            r = _SQRT5 * np.sqrt(np.tensordot(inverse_squares, squares, axes=1))
            decay = np.exp(-r)
            noise = np.exp(theta[-1])
            factor = cho_factor((1 + r + r**2 / 3) * decay + noise * np.eye(len(y)), lower=True)
            weights = cho_solve(factor, y)
            variance = max(float(y @ weights) / len(y), 1e-12)
            away = (theta - center) / spread
            value = len(y) / 2 * np.log(variance) + np.log(np.diag(factor[0])).sum() + (away**2).sum() / 2
            slope = (cho_solve(factor, np.eye(len(y))) - np.outer(weights, weights) / variance) / 2
            by_length = inverse_squares * np.tensordot(squares, slope * 5 / 3 * (1 + r) * decay, axes=([1, 2], [0, 1]))
            return float(value), np.append(by_length, noise * np.trace(slope)) + away / spread

        start = np.log(np.append(self.lengths, self.noise))
        bounds = [(c - 4 * s, c + 4 * s) for c, s in zip(center, spread, strict=True)]
        found = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": iterations})
        return Process(np.exp(found.x[:-1]), float(np.exp(found.x[-1])))

    def predict(self, x: Array, y: Array, at: Array) -> tuple[Array, Array]:
        """Mean and standard deviation of the function at points `at`, after values `y` at points `x`."""
        level = y.mean()
        lower = np.linalg.cholesky(self._correlation(x, x) + self.noise * np.eye(len(y)))
        whitened = solve_triangular(lower, y - level, lower=True)
        cross = solve_triangular(lower, self._correlation(x, at), lower=True)
        variance = max(float(whitened @ whitened) / len(y), 1e-12)
        left = np.maximum(1 - np.einsum("ij,ij->j", cross, cross), 1e-12)
        return level + whitened @ cross, np.sqrt(variance * left)

    def _correlation(self, x: Array, at: Array) -> Array:
        r = _SQRT5 * cdist(x / self.lengths, at / self.lengths)
        correlation: Array = (1 + r + r**2 / 3) * np.exp(-r)
        return correlation


def expected_improvement(mean: Array, deviation: Array, best: float) -> Array:
    """By how much a value drawn at each point is expected to fall below `best` (Jones et al., 1998)."""
    z = (best - mean) / deviation
    density = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)
    improvement: Array = deviation * (z * ndtr(z) + density)
    return improvement
