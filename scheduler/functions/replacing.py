"""Lowers a function with selected kernels in place of its equations, and lists the replacements."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from scheduler.core.errors import NoCandidate
from scheduler.core.records import schedule_text
from scheduler.dispatch import dispatch
from scheduler.dispatch.dispatch import ON_A_MESH, Options
from scheduler.dispatch.primitive import tuned_call_p
from scheduler.functions import layouts
from search_spaces import OPERATIONS, load, lowering_compat
from search_spaces.operation import Operation
from search_spaces.problem import Problem


@dataclasses.dataclass(frozen=True)
class Replaced:
    """A kernel that replaces equations of the same kind.

    Attributes:
      reason: Why this schedule was selected.
    """

    operation: str
    problem: Problem
    backend: str
    schedule: str
    reason: str

    def __str__(self) -> str:
        return f"{self.operation} {self.problem} by {self.backend} {self.schedule} ({self.reason})"


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A lowered function.

    Attributes:
      lowered: The `jax.stages.Lowered`.
      replaced: The kernels in it. Equal equations in one module are lowered once and listed once.
      left: Why equations are left to XLA -> number of kinds of such equations.
    """

    lowered: Any
    replaced: tuple[Replaced, ...]
    left: Mapping[str, int]


@functools.cache
def answering() -> Mapping[Any, Operation[Any]]:
    """Returns the JAX primitives that operations can replace, with their operations."""
    operations = [load(name) for name in OPERATIONS]
    return {primitive: operation for operation in operations for primitive in operation.equations}


def lower(traced: Any, options: Mapping[str, Options], platforms: tuple[str, ...] | None = None) -> Lowered:
    """Lowers the result of a `jax.jit` trace, replacing equations for which a kernel is selected.

    If XLA or a vendor's library is selected, JAX's own equation is kept unchanged, so that XLA fuses it as usual.

    Args:
      options: Operation name -> options for selecting its kernel.
      platforms: Platforms to lower for. None uses the platform of the arguments.

    Raises:
      CacheMiss: There is no record and the policy is "error".
    """
    around = layouts.around(traced.jaxpr, answering().keys())
    replaced: dict[Replaced, None] = {}
    left: collections.Counter[str] = collections.Counter()

    def answer(
        primitive: Any, platform: str, partitioned: bool, avals: tuple[Any, ...], params: Mapping[str, Any]
    ) -> Any:
        operation = answering()[primitive]
        stored = around.get(layouts.key(primitive, avals, params))
        posed = operation.equations[primitive](*avals, **params, **({"stored": stored} if stored else {}))
        if isinstance(posed, str) or partitioned:
            left[posed if isinstance(posed, str) else ON_A_MESH] += 1
            return None
        problem = posed.problem
        try:
            found = dispatch.decide(operation, problem, platform, options[operation.name])
        except NoCandidate as error:
            left[str(error)] += 1
            return None
        if found.kernel.library or found.kernel.vendor:
            left[f"{found.kernel.backend} answers {operation.name} {problem}: {found.reason}"] += 1
            return None
        words = schedule_text(dataclasses.asdict(found.schedule))
        replaced[Replaced(operation.name, problem, found.kernel.backend, words, found.reason)] = None

        def run(*args: Any) -> tuple[Any, ...]:
            operands = posed.operands(*args)
            return posed.restore(
                *found.kernel.results(problem, found.schedule, found.target, *operands, **posed.params)
            )

        return run

    answers = {primitive: functools.partial(answer, primitive) for primitive in answering()}
    lowered = lowering_compat.lower(traced, answers, untouched=(tuned_call_p,), platforms=platforms)
    return Lowered(lowered, tuple(replaced), dict(left))
