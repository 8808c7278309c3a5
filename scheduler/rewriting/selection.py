"""Selects the kernels of a function's calls: for their problems, or for one device's part where XLA partitions them."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from scheduler.core.errors import NoCandidate
from scheduler.dispatch import dispatch
from scheduler.dispatch.dispatch import Decision, Options
from scheduler.dispatch.primitive import tuned_call
from scheduler.dispatch.query_recorder import QueryRecorder, Shardings
from scheduler.rewriting import posed_calls
from scheduler.rewriting.automatic_axes import on_automatic_axes
from search_spaces import lowering_compat, partitioning_compat
from search_spaces.operation import Operation
from search_spaces.problem import Problem

# The operation and the problem of a call, before XLA partitions it -> the queries of one device.
Recorders = Mapping[tuple[Operation[Any], Problem], QueryRecorder]


@dataclasses.dataclass(frozen=True)
class KernelSelection:
    """How kernels are selected.

    Attributes:
      options: Operation name -> options for selecting its kernel.
      partitioned: The problems of one device, if XLA partitions the function over several devices, else None.
    """

    options: Mapping[str, Options]
    partitioned: Partitioned | None = None

    def of(self, operation: Operation[Any], problem: Problem, platform: str) -> list[tuple[Problem, Decision]]:
        """Returns the problems that each device computes for a call, with the decisions.

        Raises:
          NoCandidate: No kernel can be selected, or a library is selected; the message has the reason.
          CacheMiss: There is no record and the policy is "error".
        """
        options = self.options[operation.name]
        queries = [(operation, problem)]
        if self.partitioned is not None:
            queries = self.partitioned.queries(operation, problem)
            options = dataclasses.replace(options, divided=True)
        found = [(local, dispatch.decide(of, local, platform, options)) for of, local in queries]
        if library := next((decision for _, decision in found if decision.kernel.library), None):
            raise NoCandidate(library.reason)
        return found

    def call(self, operation: Operation[Any], problem: Problem, params: Any, *operands: Any) -> Any:
        """Makes a tuned call."""
        return tuned_call(operation, problem, *operands, params=params, options=self.options[operation.name])

    def placed_call(self, operation: Operation[Any], problem: Problem, params: Any, *operands: Any) -> Any:
        """Makes a tuned call on operands that are divided over devices as those of the function are."""
        return self.call(operation, problem, params, *self.placed(operation, problem, operands))

    def placed(self, operation: Operation[Any], problem: Problem, operands: Sequence[Any]) -> Sequence[Any]:
        """Returns operands of a call that are divided over devices as those of the function are."""
        for sizes, specs in self.shardings(operation, problem)[:1]:
            shardings = partitioning_compat.shardings(sizes, specs)
            return [*map(jax.lax.with_sharding_constraint, operands, shardings)]
        return operands

    def shardings(self, operation: Operation[Any], problem: Problem) -> Sequence[Shardings]:
        """Returns how XLA divides the operands of a call over several devices, for each way once."""
        recorder = None if self.partitioned is None else self.partitioned.recorder(operation, problem)
        return [] if recorder is None else list(dict.fromkeys(recorder.shardings))


@dataclasses.dataclass(frozen=True, eq=False)
class Partitioned:
    """The problems of one device in a function that XLA partitions.

    Only XLA knows how it partitions intermediate arrays. The function is therefore compiled, with tuned calls in place
    of all regions and products, which XLA computes.

    Attributes:
      traced: The result of a `jax.jit` trace.
      platform: For which other equations are changed, too.
    """

    traced: Any
    platform: str
    _found: dict[int, Recorders] = dataclasses.field(default_factory=dict)

    def queries(self, operation: Operation[Any], problem: Problem) -> list[tuple[Operation[Any], Problem]]:
        """Returns what one device computes for calls with this problem, without duplicates.

        Raises:
          NoCandidate: Such a call is not divided; the message has the reason.
        """
        recorder = self.recorder(operation, problem)
        if recorder is None:
            raise NoCandidate("how XLA partitions it is not known")
        if not recorder.queries:
            raise NoCandidate(recorder.reason)
        return list(dict.fromkeys(recorder.queries))

    def recorder(self, operation: Operation[Any], problem: Problem) -> QueryRecorder | None:
        """Returns the queries of one device for a call with this problem; None if the function makes no such call."""
        for number, replaces in enumerate(_REPLACED):
            if number not in self._found:
                self._found[number] = _recorded(self.traced, self.platform, replaces)
            if (found := self._found[number].get((operation, problem))) is not None:
                return found
        return None


def where(traced: Any, platform: str) -> Mapping[str, Any]:
    """Returns what is lowered and where it runs, as arguments of `lowering.lower_with_kernels`.

    Args:
      traced: The result of a `jax.jit` trace.
      platform: The platform of the devices.
    """
    if lowering_compat.device_count(traced.lower()) == 1:
        return {"traced": traced, "regions_on": platform}
    try:
        traced = lowering_compat.with_jaxpr(traced, on_automatic_axes(traced.jaxpr))
    except NotImplementedError:
        return {"traced": traced}
    return {"traced": traced, "regions_on": platform, "partitioned": Partitioned(traced, platform)}


# Selects the operations of replaced regions. If attention stays with XLA, the rows and products in it may be replaced;
# if rows stay, the products in them. Each of these programs is compiled only if a call is in none before.
_REPLACED: tuple[Callable[[Operation[Any]], bool], ...] = (
    lambda operation: True,
    lambda operation: operation.regions_last,
    lambda operation: False,
)


def _recorded(traced: Any, platform: str, replaces: Callable[[Operation[Any]], bool]) -> Recorders:
    recorders: dict[tuple[Operation[Any], Problem], QueryRecorder] = collections.defaultdict(QueryRecorder)
    jaxpr, _ = posed_calls.recorded(
        posed_calls.with_regions(traced.jaxpr, platform, replaces), recorder_of=lambda *call: recorders[call]
    )
    lowering_compat.with_jaxpr(traced, jaxpr).lower().compile(compiler_options=posed_calls.PARTITIONING_ONLY)
    return recorders
