"""Replaces regions of a jaxpr, such as attention, by tuned calls."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import partial_eval

from scheduler.core.frames import Call
from scheduler.functions import comparison, equations
from search_spaces import OPERATIONS, fingerprint, load, lowering_compat, recognise
from search_spaces.operation import Operation
from search_spaces.problem import Problem
from search_spaces.recognise import CALLS, Graph, Inlined, Left, Node, Region, Stage, Value

# Calls whose bodies are searched together with the equations around them. Not `jax.checkpoint`: its body is computed
# again on purpose.
_INLINED = CALLS - {"checkpoint", "remat", "remat2"}

# (operation, problem, params, operands) -> results of a tuned call.
TunedCall = Callable[..., Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """A region that the rewriting replaces, or leaves alone.

    Attributes:
      calls: the operation and the problem of each tuned call of the region.
      count: how often one call of the function runs the region.
      line: the line of the user's code; None if unknown.
      reason: why the region is left alone; "" if it is replaced.
    """

    calls: tuple[tuple[Operation[Any], Problem], ...]
    count: int
    line: Call | None
    reason: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Rewritten:
    """A closed jaxpr with tuned calls in place of regions.

    Attributes:
      jaxpr: the same object as before if nothing is replaced.
    """

    jaxpr: Any
    found: tuple[Found, ...]

    @property
    def replaced(self) -> tuple[Found, ...]:
        return tuple(each for each in self.found if not each.reason)

    @property
    def left(self) -> Mapping[str, int]:
        """Why regions are left alone -> number of such regions."""
        return collections.Counter(each.reason for each in self.found if each.reason)


class Rewriter:
    """Finds regions in jaxprs and replaces them.

    Args:
      unless: ``unless(operation, problem)`` returns why a call should not replace equations, or None.
      call: makes a tuned call: ``call(operation, problem, params, *operands)``.
      check: ``check(region, calls)`` returns how the calls disagree with the equations of a region, or None.
    """

    def __init__(
        self,
        unless: Callable[[Operation[Any], Problem], str | None],
        call: TunedCall,
        check: Callable[[Region, Sequence[TunedCall]], str | None],
    ) -> None:
        self._unless, self._call, self._check = unless, call, check
        self._operations = [operation for name in OPERATIONS if (operation := load(name)).regions is not None]
        self._found: list[Found] = []

    def rewrite(self, jaxpr: Any) -> Rewritten:
        """Returns a closed jaxpr with regions replaced by tuned calls, at any nesting."""
        self._found = []
        return Rewritten(self._rewritten(jaxpr, {}, 1), tuple(self._found))

    def _rewritten(self, closed: Any, known: Mapping[Any, Value], count: int) -> Any:
        jaxpr = fingerprint.opened_jaxpr(closed)
        graph = recognise.graph(jaxpr, {**recognise.constants(closed), **known}, _INLINED)
        regions = list(self._regions(graph, count))
        bodies = dict(self._bodies(graph, count))
        if not regions and not bodies:
            return closed
        inputs = [graph.values.get(atom) or Value(atom.aval.shape, atom.aval.dtype) for atom in jaxpr.invars]
        held = [*zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=False)]

        def run(*args: Any) -> list[Any]:
            given = {id(x): each for x, each in zip(inputs, args, strict=True)}
            given |= {id(graph.values[atom]): x for atom, x in held if atom in graph.values}
            evaluation = _Evaluation(given, regions, bodies)
            evaluation.run(graph.items)
            return [
                atom.val if isinstance(atom, core.Literal) else evaluation.read(graph.values[atom])
                for atom in jaxpr.outvars
            ]

        return _retraced(run, closed)

    def _regions(self, graph: Graph, count: int) -> Iterator[_Replacement]:
        for operation in self._operations:
            assert operation.regions is not None
            for each in operation.regions(graph):
                line = equations.line_of(each.shown[0].equation if isinstance(each, Region) else each.shown.equation)
                if isinstance(each, Left):
                    self._found.append(Found((), count, line, f"{operation.name}: {each.reason}"))
                    continue
                stages = [(stage.operation or operation, stage) for stage in each.stages]
                calls = tuple((of, stage.problem) for of, stage in stages)
                reason = next((why for of, problem in calls if (why := self._unless(of, problem))), None)
                tuned = [self._calling(of, stage) for of, stage in stages]
                if reason is None and (wrong := self._check(each, tuned)):
                    reason = f"{operation.name}: its kernels disagree with its equations: {wrong}"
                self._found.append(Found(calls, count, line, reason or ""))
                if reason is None:
                    yield _Replacement(each, tuned)

    def _calling(self, operation: Operation[Any], stage: Stage) -> TunedCall:
        return lambda *operands: self._call(operation, stage.problem, stage.params, *operands)

    def _bodies(self, graph: Graph, count: int) -> Iterator[tuple[int, Any]]:
        """Yields the equations with replaced bodies, by the ``id`` of their nodes."""
        for node in graph.nodes:
            times = {id(fingerprint.opened_jaxpr(body)): n for body, n in equations.held(node.equation)}
            changed: dict[int, Any] = {}
            for body in [body for body, _ in equations.held(node.equation)]:
                opened = fingerprint.opened_jaxpr(body)
                new = self._rewritten(body, recognise.arguments(node, opened), count * times[id(opened)])
                if new is not body:
                    changed[id(body)] = new if body is not opened else _without_constants(new)
            if changed:
                yield id(node), equations.with_inside(node.equation, lambda body: changed.get(id(body), body))


@dataclasses.dataclass(frozen=True, eq=False)
class _Replacement:
    region: Region
    calls: Sequence[TunedCall]


class _Evaluation:
    """Evaluates a graph with regions and bodies replaced.

    Args:
      given: the arguments and constants, by the ``id`` of their values.
      bodies: equations with replaced bodies, by the ``id`` of their nodes.
    """

    def __init__(
        self, given: Mapping[int, Any], regions: Sequence[_Replacement], bodies: Mapping[int, Any]
    ) -> None:
        self._values, self._bodies = dict(given), bodies
        self._stage_of = {
            id(x): (each, i) for each in regions for i, stage in enumerate(each.region.stages) for x in stage.results
        }
        self._handed_on: dict[tuple[int, int], Any] = {}
        # Calls are opened only where a part of their bodies is needed.
        self._needed = {id(x) for each in regions for x in each.region.results}
        self._needed |= {id(x) for each in regions for stage in each.region.stages for x in stage.inputs}

    def read(self, x: Value) -> Any:
        return self._values[id(x)] if id(x) in self._values else x.literal

    def run(self, items: Sequence[Node | Inlined]) -> None:
        for item in items:
            if isinstance(item, Inlined) and self._is_opened(item):
                self.run(item.items)
                continue
            results = item.results
            equation = item.equation if isinstance(item, Inlined) else self._bodies.get(id(item), item.equation)
            if isinstance(item, Node) and any(id(x) in self._stage_of for x in results):
                (result,) = results
                self._run_stage(*self._stage_of[id(result)])
                continue
            found = lowering_compat.evaluate_equation(equation, *map(self.read, item.inputs))
            self._values.update((id(x), each) for x, each in zip(results, found, strict=True))

    def _is_opened(self, item: Inlined) -> bool:
        return any(
            self._is_opened(each)
            if isinstance(each, Inlined)
            else id(each) in self._bodies or any(id(x) in self._needed for x in each.results)
            for each in item.items
        )

    def _run_stage(self, replacement: _Replacement, number: int) -> None:
        """Computes the results of a stage, after those of the stages before, unless they are there already."""
        key = id(replacement), number
        if key in self._handed_on:
            return
        if number:
            self._run_stage(replacement, number - 1)
        stage = replacement.region.stages[number]
        before = self._handed_on.get((id(replacement), number - 1))
        results, self._handed_on[key] = stage.run(replacement.calls[number], before, *map(self.read, stage.inputs))
        self._values.update((id(x), each) for x, each in zip(stage.results, results, strict=True))


def _retraced(run: Callable[..., list[Any]], closed: Any) -> Any:
    """Returns the closed jaxpr of `run`, with arguments and results as in `closed` and without dead equations."""
    before = fingerprint.opened_jaxpr(closed)
    avals = [_struct(atom.aval) for atom in before.invars]
    after = jax.make_jaxpr(run)(*avals)
    opened = fingerprint.opened_jaxpr(after)
    live, _ = partial_eval.dce_jaxpr(opened, [True] * len(opened.outvars), instantiate=True)
    kinds = [[(x.aval.shape, x.aval.dtype) for x in jaxpr.outvars] for jaxpr in (before, live)]
    assert kinds[0] == kinds[1], kinds
    if opened is after:  # constants are part of the jaxpr
        return live
    return core.ClosedJaxpr(live, after.consts)


def _struct(aval: Any) -> Any:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def _without_constants(closed: Any) -> Any:
    """Returns an open jaxpr, for parameters that hold one."""
    assert not closed.consts, "an open jaxpr cannot hold constants"
    return fingerprint.opened_jaxpr(closed)


# ------------------------------------------------------------------------------
# Compares a region with the tuned calls that replace it, on random inputs.


_checked: dict[Any, str | None] = {}


def disagreement(region: Region, calls: Sequence[TunedCall], key: Any = None) -> str | None:
    """Describes how tuned calls differ from the equations of a region by more than rounding; None if they do not.

    Both are computed once for each kind of region on this device, for standard normal inputs of the same shapes.

    Args:
      key: what else the calls depend on, such as their schedules.
    """
    inputs = tuple(x for stage in region.stages for x in stage.inputs)
    nodes = recognise.equations_between((*inputs, *region.results), region.roots)
    text = recognise.program_text(nodes, region.roots, region.results)
    problems = [stage.problem for stage in region.stages]
    found = _checked.get(at := (text, tuple(problems), key), "")
    if found == "":
        found = _checked[at] = _disagreement(region, calls, nodes, inputs, comparison.rounding(problems))
    return found


def _disagreement(
    region: Region, calls: Sequence[TunedCall], nodes: Sequence[Node], inputs: Sequence[Value], rounding: float
) -> str | None:
    roots = [id(x) for x in region.roots]

    @jax.jit
    def plain(*arrays: Any) -> list[Any]:
        return recognise.evaluate(nodes, dict(zip(roots, arrays, strict=True)), region.results)

    @jax.jit
    def tuned(*arrays: Any) -> list[Any]:
        given = recognise.evaluate(nodes, dict(zip(roots, arrays, strict=True)), inputs)
        values = iter(given)
        handed_on, results = None, list[Any]()
        for stage, call in zip(region.stages, calls, strict=True):
            found, handed_on = stage.run(call, handed_on, *(next(values) for _ in stage.inputs))
            results += found
        return results

    def compared() -> str | None:
        arrays = [
            jax.random.normal(jax.random.key(i), x.shape, jnp.float32).astype(x.dtype)
            for i, x in enumerate(region.roots)
        ]

        def sensitivity() -> Any:
            return plain(*(comparison.rounded_differently(x, i) for i, x in enumerate(arrays)))

        return comparison.disagreement(plain(*arrays), tuned(*arrays), rounding, sensitivity)

    if not isinstance(jnp.zeros(()), jax.core.Tracer):
        return compared()
    with concurrent.futures.ThreadPoolExecutor(1) as outside:  # a trace belongs to its thread
        return outside.submit(compared).result()
