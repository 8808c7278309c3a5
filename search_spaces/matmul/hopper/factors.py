"""The products that a launch computes with one `a` and multiplies: one, or the two of a gated matmul.

For ``activation(a @ b + bias) * (a @ up + up_bias)``, each step multiplies its stage of `a` by a stage of both weights.
`a` is loaded once, and accumulators stay in registers until the epilogue combines them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from search_spaces.matmul.problem import MatmulProblem


@dataclasses.dataclass(frozen=True)
class Gate:
    """Makes a matmul the gate of another one, of the same shapes and dtypes and without activation.

    Attributes:
      joined: both read their columns from one array, ``[batch, k, 2 n]``, the gate first; otherwise from one array
        each.
      bias_joined: the same for the biases, ``[batch, 2 n]``.
    """

    joined: bool
    bias_joined: bool


class Source(NamedTuple):
    """An array in device memory, and the offset of an operand within it along each of its last axes."""

    array: Any
    first: tuple[int, ...] = ()

    def at(self, *corner: Any) -> tuple[Any, ...]:
        """Converts coordinates within the operand to coordinates of the array."""
        return tuple(x + by if by else x for x, by in zip(corner, self.first or (0,) * len(corner), strict=True))


class Sources(NamedTuple):
    """The operands of a launch, with one `b` and one bias per factor; `bias` is empty and `residual` None if absent."""

    a: Any
    b: tuple[Source, ...]
    bias: tuple[Source, ...]
    residual: Any


def factors(problem: MatmulProblem, gate: Gate | None) -> tuple[MatmulProblem, ...]:
    """Returns the matmuls that are multiplied, `problem` first."""
    return (problem,) if gate is None else (problem, dataclasses.replace(problem, activation=""))


def sources(problem: MatmulProblem, gate: Gate | None, arrays: Sequence[Any]) -> tuple[Sources, list[Any]]:
    """Returns a launch's operands, and the arrays that follow them."""
    count = len(problem.operands())
    if gate is None:
        a, b, bias, residual = problem.named(arrays[:count])
        biases: tuple[Source, ...] = () if bias is None else (Source(bias),)
        return Sources(a, (Source(b),), biases, residual), list(arrays[count:])
    a, *left = arrays
    n = problem.n
    along = (n, 0) if problem.transpose_b else (0, n)
    weights = (Source(left[0]), Source(left[0], along)) if gate.joined else (Source(left[0]), Source(left[1]))
    left = left[1 if gate.joined else 2 :]
    if not problem.bias:
        return Sources(a, weights, (), None), left
    biases = (Source(left[0]), Source(left[0], (n,))) if gate.bias_joined else (Source(left[0]), Source(left[1]))
    return Sources(a, weights, biases, None), left[1 if gate.bias_joined else 2 :]
