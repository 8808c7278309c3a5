"""Finds the tuned calls of a function, and those that `scheduler.optimize` makes in it, and records their queries."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core.primitives import closed_call_p

from scheduler.core.frames import Call
from scheduler.dispatch.dispatch import Options
from scheduler.dispatch.primitive import tuned_call, tuned_call_p
from scheduler.dispatch.query_recorder import QueryRecorder, RecordingOptions
from scheduler.rewriting import equations
from scheduler.rewriting.equations import Body
from scheduler.rewriting.passes import Rewriter
from search_spaces.operation import MatchedEquation, Operation, Params
from search_spaces.problem import Problem

# A program that is compiled for its partitioning alone: no optimization, no autotuning, and no constant folding of
# arrays that a function without arguments creates.
PARTITIONING_ONLY: dict[str, str | bool] = {
    "xla_backend_optimization_level": "0",
    "xla_gpu_autotune_level": "0",
    "xla_disable_hlo_passes": "constant_folding",
}


@dataclasses.dataclass(frozen=True, eq=False)
class PosedCall:
    """A call for which a kernel is selected.

    Attributes:
      problem: The problem in the function, before partitioning.
      count: How often one call of the function runs it.
      line: The line of the user's code; None if unknown.
      recorder: Records the queries of each device where XLA partitions the call; None if the call runs on one device.
    """

    operation: Operation[Any]
    problem: Problem
    count: int
    line: Call | None
    recorder: QueryRecorder | None

    @property
    def queries(self) -> Sequence[tuple[Operation[Any], Problem]]:
        """The problems that the call queries from a store; empty if XLA computes it."""
        return [(self.operation, self.problem)] if self.recorder is None else self.recorder.queries


def with_regions(
    closed: Any, platform: str, replaces: Callable[[Operation[Any]], bool] = lambda operation: True
) -> Any:
    """Returns a closed jaxpr with a tuned call in place of each region, whichever kernel is selected for it.

    Args:
      platform: For which other equations are changed, too.
      replaces: Whether the regions of an operation are replaced.
    """

    def unless(operation: Operation[Any], problem: Problem) -> str | None:
        return None if replaces(operation) else "left alone"

    def call(operation: Operation[Any], problem: Problem, params: Any, *operands: Any) -> Any:
        return tuned_call(operation, problem, *operands, params=params, options=RecordingOptions())

    return Rewriter(unless, call, lambda region, calls: None, platform, last=True).rewrite(closed).jaxpr


def recorded(
    jaxpr: Any,
    *,
    own: bool = False,
    on_one_device: bool = False,
    recorder_of: Callable[[Operation[Any], Problem], QueryRecorder] = lambda operation, problem: QueryRecorder(),
) -> tuple[Any, list[PosedCall]]:
    """Returns a jaxpr with tuned calls that record their queries and use no store, and the calls that are listed.

    Args:
      jaxpr: The jaxpr of a function, from `with_regions` unless `own`.
      own: Whether the calls of the function itself are listed, without those with a `schedule=`, which make no query.
        Otherwise those in place of regions and single equations are.
      on_one_device: Whether XLA does not partition the function.
      recorder_of: Returns the recorder of a call.
    """
    primitives = () if own else equations.operations_by_primitive().keys()
    stored, found = equations.layouts_around(jaxpr, primitives), list[PosedCall]()

    def listed(body: Body, equation: Any, operation: Operation[Any], problem: Problem) -> QueryRecorder:
        recorder = None if body.manual else recorder_of(operation, problem)
        found.append(PosedCall(operation, problem, body.count, body.line_of(equation), recorder))
        return recorder or QueryRecorder()

    def recording(body: Body, equation: Any) -> Any:
        params = equation.params
        if equation.primitive is tuned_call_p:
            given, operation = params["options"], params["operation"]
            # XLA partitions calls that allow only the library by itself.
            allowed = given.backends if given.backends == {operation.library.backend} else None
            recorder = QueryRecorder()
            if body.count and given.schedule is None and own != isinstance(given, RecordingOptions):
                recorder = listed(body, equation, operation, params["problem"])
            return equation.replace(params=params | {"options": RecordingOptions(recorder=recorder, backends=allowed)})
        if body.count and equation.primitive in primitives:
            if (matched := equations.match_equation(equation, stored)) is None:
                return equation
            recorder = listed(body, equation, matched[0], matched[1].problem)
            if body.manual:
                return equation
            avals = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in equation.invars]
            with equation.ctx.manager:  # the mesh of its types
                call = jax.make_jaxpr(by_tuned_call(*matched, RecordingOptions(recorder=recorder)))(*avals)
            return equation.replace(primitive=closed_call_p, params={"call_jaxpr": call})
        times = {id(inner): n for inner, n in equations.held(equation)}
        manual, line = body.manual or equations.is_manual(equation), body.line_of(equation)

        def inside(inner: Any) -> Any:
            return in_body(Body(inner, body.count * times.get(id(inner), 0), manual, line))

        return equations.with_inside(equation, inside)

    def in_body(body: Body) -> Any:
        return equations.replaced(body.jaxpr, functools.partial(recording, body))

    return in_body(Body(jaxpr, 1, manual=on_one_device)), found


def by_tuned_call(
    operation: Operation[Any],
    matched: MatchedEquation[Any],
    options: Options,
    placed: Callable[[Sequence[Any]], Sequence[Any]] = tuple,
) -> Callable[..., tuple[Any, ...]]:
    """Returns a function that computes an equation by a tuned call. `placed` divides its operands over devices."""
    params = Params(matched.params.items())
    how = {"operation": operation, "problem": matched.problem, "params": params, "options": options}
    return lambda *args: matched.restore(*tuned_call_p.bind(*placed(matched.operands(*args)), **how))
