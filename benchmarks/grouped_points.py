"""The points of grouped.py: grouped products of layers of models, with the sizes of their groups."""

from __future__ import annotations

import dataclasses

from search_spaces.matmul import MatmulProblem
from search_spaces.ragged_dot.problem import (
    DISTRIBUTIONS,
    GatedRaggedDotProblem,
    GroupedProblem,
    RaggedDotProblem,
    RaggedDotWeightsProblem,
)

# Rows of all groups, k, n, groups.
Shape = tuple[int, int, int, int]
SKEWED: dict[str, Shape] = {
    "mixtral-up": (8192, 4096, 14336, 8),
    "qwen3-up": (32768, 2048, 1536, 128),
    "deepseek-up": (16384, 7168, 4096, 8),
}
OF_EACH_DISTRIBUTION: dict[str, Shape] = {
    "gpt-oss": (16384, 2880, 5760, 32),
    "mixtral-down": (8192, 14336, 4096, 8),
    "deepseek-down": (16384, 2048, 7168, 8),
}
DECODE: dict[str, Shape] = {
    f"{name}-{rows}": (rows, k, n, groups)
    for name, k, n, groups in (("mixtral", 4096, 14336, 8), ("qwen3", 2048, 1536, 128))
    for rows in (32, 64, 128, 256, 512, 1024)
}
KINDS = ("forward", "rows", "weights", "gated")


@dataclasses.dataclass(frozen=True)
class Point:
    """One problem.

    Attributes:
      name: of the layer.
      kind: "forward", "rows" (the gradient of rows), "weights" (the gradient of the matrices), "gated", or "decode"
        (forward, with few rows).
      problem: with the distribution for which it is timed. It is tuned for the distributions of calls.
    """

    name: str
    kind: str
    problem: GroupedProblem

    @property
    def tuned(self) -> GroupedProblem:
        """The problem that calls have."""
        return dataclasses.replace(self.problem, distribution="")

    @property
    def dense(self) -> MatmulProblem | None:
        """A matmul of as many FLOPs, of rows that all have one matrix; None for the gated product."""
        p = self.problem
        if self.kind == "gated":
            return None
        if self.kind == "weights":
            return MatmulProblem(p.k, p.n, p.rows, p.dtype)
        return p.product

    def __str__(self) -> str:
        return f"{self.kind} {self.name} {self.problem.distribution}"


def point(name: str, kind: str, shape: Shape, distribution: str, dtype: str = "bfloat16") -> Point:
    rows, k, n, groups = shape
    problem: GroupedProblem
    if kind == "rows":
        problem = RaggedDotProblem(rows, groups, n, k, dtype, distribution=distribution, transpose_rhs=True)
    else:
        kinds = {"weights": RaggedDotWeightsProblem, "gated": GatedRaggedDotProblem}
        problem = kinds.get(kind, RaggedDotProblem)(rows, groups, k, n, dtype, distribution=distribution)
    return Point(name, kind, problem)


def points() -> list[Point]:
    """Every point, those of each kind together."""
    shapes = [(name, shape, "skewed") for name, shape in SKEWED.items()]
    shapes += [(name, shape, each) for name, shape in OF_EACH_DISTRIBUTION.items() for each in DISTRIBUTIONS]
    made = [point(name, kind, shape, distribution) for kind in KINDS for name, shape, distribution in shapes]
    return made + [point(name, "decode", shape, "skewed") for name, shape in DECODE.items()]


# What the interpreter rehearses: a run of seconds whose times say nothing about the kernels.
REHEARSED = [point("small", kind, (24, 8, 16, 3), "skewed", "float32") for kind in (*KINDS, "decode")]
