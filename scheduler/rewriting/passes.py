"""Replaces regions of a jaxpr, such as attention and norms, by tuned calls, and equations by others that are faster.

The passes, in their order:

1. Attention with its gradients (`Operation.regions`), also where a scan and the scan of its backward pass share it. The
   pattern is `search_spaces/flash_attention/pattern.py`. Together with it, equations get other forms (`formulas.py`).
2. Row programs (`Operation.regions_last`, `search_spaces/rows/pattern.py`), only if nothing transforms the result: a
   softmax of an attention that was not replaced is such a program.
3. Single equations (`Operation.equations`), such as matmuls, while JAX lowers the result (`lowering.py`).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import Sharding

from scheduler.core.errors import SchedulerError
from scheduler.core.frames import Call
from scheduler.core.text import error_text
from scheduler.rewriting import equations, formulas
from scheduler.rewriting.comparison import TunedCall
from scheduler.rewriting.evaluation import Changes, Evaluation, Replacement, Scan, retraced
from search_spaces import (
    OPERATIONS,
    derivative_rules,
    fingerprint,
    load,
    lowering_compat,
    recognise,
)
from search_spaces.operation import Operation
from search_spaces.problem import Problem
from search_spaces.recognise import Graph, Left, Node, Region, Value

# The body of such a call is not searched together with the equations around it. `jax.checkpoint` computes its body
# again on purpose; the rule of a `jax.custom_batching.custom_vmap` counts if the function is transformed later.
_CHECKPOINTS = frozenset({"checkpoint", "remat", "remat2"})
_WITH_RULES = _CHECKPOINTS | {"custom_vmap_call"}


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """A region that the rewriting replaces, or leaves alone.

    Attributes:
      calls: the operation and the problem of each tuned call of the region.
      count: how often one call of the function runs the region.
      line: the line of the user's code; None if unknown.
      reason: why the region is left alone; "" if it is replaced.
      key: that of the replacement (`Rewriter`); "" if no kernel is selected for the region.
    """

    calls: tuple[tuple[Operation[Any], Problem], ...]
    count: int
    line: Call | None
    reason: str = ""
    key: str = ""

    @property
    def source(self) -> str:
        """The line as ``file:line``; "" if unknown."""
        return "" if self.line is None else f"{self.line.file}:{self.line.line}"

    def __str__(self) -> str:
        at = f"{self.source}: " if self.source else ""
        calls = " and ".join(f"{operation.name} {problem.brief()}" for operation, problem in self.calls)
        return f"{at}left to XLA: {self.reason}" if self.reason else f"{at}{calls}"


@dataclasses.dataclass(frozen=True, eq=False)
class Rewritten:
    """A closed jaxpr with tuned calls in place of regions.

    Attributes:
      jaxpr: the same object as before if nothing is replaced.
      changes: other changes, which need no tuned call, as text with source lines, without duplicates.
      refused: the keys of replacements that were not to be made, or that disagree with their equations -> the reason.
    """

    jaxpr: Any
    found: tuple[Found, ...]
    changes: tuple[str, ...] = ()
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def replaced(self) -> tuple[Found, ...]:
        return tuple(each for each in self.found if not each.reason)

    @property
    def dropped(self) -> tuple[Found, ...]:
        """The regions that are left alone although kernels are selected for them."""
        return tuple(each for each in self.found if each.reason and each.key)

    @property
    def left(self) -> Mapping[str, int]:
        """Why regions are left alone -> number of such regions."""
        return collections.Counter(each.reason for each in self.found if each.reason)


class _Pass(NamedTuple):
    """One pass over a jaxpr.

    Attributes:
      operations: those with regions to replace.
      in_pairs: whether a region may have a part in a scan and a part in the scan of its backward pass.
      platform: for which other equations are changed, too; None leaves them as they are.
    """

    operations: Sequence[Operation[Any]]
    in_pairs: bool
    platform: str | None


class Rewriter:
    """Finds regions in jaxprs and replaces them.

    Args:
      unless: ``unless(operation, problem)`` returns why a call should not replace equations, or None.
      call: makes a tuned call: ``call(operation, problem, params, *operands)``.
      check: ``check(region, calls)`` returns why the calls should not replace the equations of a region, or None.
      platform: for which other equations are changed, too; None leaves them as they are.
      observe: returns what runs in place of a region and its calls.
      key: returns the key of the replacement of a region.
      last: whether nothing transforms the result: operations with `regions_last` are used, too, and rules of
        derivatives and batching are dropped with the equations that carry them.
    """

    def __init__(
        self,
        unless: Callable[[Operation[Any], Problem], str | None],
        call: TunedCall,
        check: Callable[[Region, Sequence[TunedCall]], str | None],
        platform: str | None = None,
        *,
        last: bool = False,
        observe: Callable[[Region], Region] | None = None,
        key: Callable[[Region], str] = lambda region: "",
    ) -> None:
        self._unless, self._call, self._check, self._observe, self._key = unless, call, check, observe, key
        operations = [operation for name in OPERATIONS if (operation := load(name)).regions is not None]
        first = [operation for operation in operations if not operation.regions_last]
        rest = [operation for operation in operations if operation.regions_last and last]
        self._passes = [_Pass(first, True, platform), *([_Pass(rest, False, None)] if rest else [])]
        self._pass, self._last = self._passes[0], last
        self._found: list[Found] = []
        self._other_changes: dict[str, None] = {}

    def rewrite(self, jaxpr: Any) -> Rewritten:
        """Returns a closed jaxpr with regions replaced by tuned calls, at any nesting."""
        self._found, self._other_changes = [], {}
        for each in self._passes:
            self._pass = each
            jaxpr = self._rewritten(jaxpr, {}, 1)
        return Rewritten(jaxpr, tuple(self._found), tuple(self._other_changes))

    def _rewritten(self, closed: Any, known: Mapping[Any, Value], count: int) -> Any:
        graph = self._graph(closed, known)
        changes = self._changes(graph, [*self._regions(graph, count)], count)
        if not changes:
            return closed
        given = _constants(closed, graph)

        def run(*args: Any) -> list[Any]:
            values = given | {id(x): each for x, each in zip(graph.inputs, args, strict=True)}
            return Evaluation(values, changes).run(graph)

        return retraced(run, closed)

    def _graph(self, closed: Any, known: Mapping[Any, Value]) -> Graph:
        jaxpr, constants = fingerprint.opened_jaxpr(closed), recognise.constants(closed)
        return recognise.graph(jaxpr, {**constants, **known}, self._keeps)

    def _keeps(self, call: Any) -> bool:
        """Returns whether a call stays one equation, so that its shardings and its rules stay."""
        placed = (*call.params.get("in_shardings", ()), *call.params.get("out_shardings", ()))
        if any(isinstance(x, Sharding) for x in placed):
            return True
        if self._last:
            return call.primitive.name in _CHECKPOINTS
        return call.primitive.name in _WITH_RULES or derivative_rules.has_own_rule(call, at_ties=True)

    def _changes(self, graph: Graph, regions: Sequence[Replacement], count: int) -> Changes:
        bodies, pairs = dict[int, Any](), dict[int, Scan]()
        for forward, backward in _pairs_of_scans(graph) if self._pass.in_pairs else ():
            pairs |= self._pair(forward, backward, graph, count)
        for node in graph.nodes:
            if id(node) not in pairs and (changed := self._with_bodies(node, count)) is not None:
                bodies[id(node)] = changed
        if (platform := self._pass.platform) is None:
            return Changes(tuple(regions), bodies, pairs)
        forms = {node: each for node in graph.nodes if (each := formulas.other_form(node, platform)) is not None}
        of_backward = formulas.backward(graph.items, equations.is_backward)
        again = {id(each.value): each for each in formulas.recomputed(graph, of_backward)}
        texts = {node: text for node, (_, text) in forms.items()}
        texts |= {each.expensive: each.text for each in again.values() if each.expensive}
        lines = equations.lines_of(graph.items) if texts else {}
        for node, text in texts.items():
            at = Found((), 1, lines[id(node)]).source
            self._other_changes[f"{text}, for {at}" if at else text] = None
        run = {id(node): each for node, (each, _) in forms.items()}
        return Changes(tuple(regions), bodies, pairs, run, again, of_backward)

    def _pair(self, forward: Node, backward: Node, outer: Graph, count: int) -> dict[int, Scan]:
        """Returns replacements of the scan of a forward pass and the scan of its backward pass.

        The backward body reads arrays that the forward body saves. Regions are therefore found in both bodies together.
        What the tuned calls of the forward pass hand on is saved instead.
        """
        of_forward, of_backward = (node.params["jaxpr"] for node in (forward, backward))
        first = self._graph(of_forward, recognise.arguments(forward, fingerprint.opened_jaxpr(of_forward)))
        opened = fingerprint.opened_jaxpr(of_backward)
        saved = dict(zip(map(id, forward.results), first.results, strict=True))
        known = {
            x: saved[id(given)] for x, given in zip(opened.invars, backward.inputs, strict=True) if id(given) in saved
        }
        second = self._graph(of_backward, recognise.arguments(backward, opened) | known)
        used_elsewhere = {id(x) for x in outer.results} | {
            id(x) for node in outer.nodes if node is not backward for x in node.inputs
        }
        _, carried = lowering_compat.scan_inputs(forward.params)
        kept = [
            x
            for i, (x, result) in enumerate(zip(first.results, forward.results, strict=True))
            if i < carried or id(result) in used_elsewhere
        ]
        both = Graph(
            first.items + second.items,
            first.inputs + second.inputs,
            kept + second.results,
            {**first.values, **second.values},
        )
        times = count * forward.params["length"]
        regions = [*self._regions(both, times)]
        own = {id(node) for node in second.nodes}
        handed = [
            each for each in regions if any(x.node is not None and id(x.node) in own for x in each.region.results)
        ]
        found = dict[int, Scan]()
        for node, graph, closed in ((forward, first, of_forward), (backward, second, of_backward)):
            changes = self._changes(graph, regions, times)
            if changes:
                found[id(node)] = Scan(graph, changes, _constants(closed, graph), tuple(handed), node is forward)
        return found if regions else {}

    def _regions(self, graph: Graph, count: int) -> Iterator[Replacement]:
        made = dict[int, tuple[Value, ...]]()  # what the results of regions are computed from, by their ``id``
        for operation in self._pass.operations:
            for each in self._candidates(operation, graph, count):
                line = equations.line_of(each.shown[0].equation if isinstance(each, Region) else each.shown.equation)
                if isinstance(each, Left):
                    self._found.append(Found((), count, line, f"{operation.name}: {each.reason}"))
                    continue
                calls = tuple((stage.operation, stage.problem) for stage in each.stages)
                tuned = [functools.partial(self._call, x.operation, x.problem, x.params) for x in each.stages]
                key = ""
                try:
                    reason = next((why for of, problem in calls if (why := self._unless(of, problem))), "")
                    key = "" if reason else self._key(each)
                    if not reason and (wrong := _circular(each, made) or self._wrong(each, tuned, graph)):
                        reason = f"{operation.name}: {wrong}"
                except SchedulerError:
                    raise
                except Exception as error:  # any error of a kernel, compiler or device costs this region alone
                    reason = f"{operation.name}: its kernels failed: {error_text(error)}"
                self._found.append(Found(calls, count, line, reason, key))
                if not reason:
                    for number, stage in enumerate(each.stages):
                        inputs = tuple(x for before in each.stages[: number + 1] for x in before.inputs)
                        made |= dict.fromkeys(map(id, stage.results), inputs)
                    yield Replacement(self._observe(each) if self._observe else each, tuned)

    def _candidates(self, operation: Operation[Any], graph: Graph, count: int) -> Sequence[Region | Left]:
        assert operation.regions is not None
        try:
            return [_of_operation(each, operation) for each in operation.regions(graph)]
        except Exception as error:  # equations of any kind: those of one operation are left, others are replaced
            self._found.append(Found((), count, None, f"{operation.name}: {error_text(error)}"))
            return ()

    def _wrong(self, region: Region, calls: Sequence[TunedCall], graph: Graph) -> str | None:
        """Returns why calls should not replace a region, or do not have its derivative; None if they may."""
        if not self._last and derivative_rules.held_arrays(
            derivative_rules.nodes_between(graph.nodes, region.results, region.inputs), region.results
        ):
            return "a stop_gradient within it changes its gradients"
        return self._check(region, calls)

    def _with_bodies(self, node: Node, count: int) -> Any:
        """Returns the equation of a node with rewritten bodies; None if none changes."""
        if node.name == "shard_map":  # its equations are traced with the axes of its mesh
            return None
        changed: dict[int, Any] = {}
        for closed, times in equations.held(node.equation):
            opened = fingerprint.opened_jaxpr(closed)
            new = self._rewritten(closed, recognise.arguments(node, opened), count * times)
            if new is not closed:
                changed[id(closed)] = new if closed is not opened else _without_constants(new)
        if not changed:
            return None
        return equations.with_inside(node.equation, lambda body: changed.get(id(body), body))


def _of_operation(found: Region | Left, operation: Operation[Any]) -> Region | Left:
    """Returns a region; all its stages name their operations."""
    if isinstance(found, Left):
        return found
    stages = [dataclasses.replace(stage, operation=stage.operation or operation) for stage in found.stages]
    return dataclasses.replace(found, stages=tuple(stages))


def _circular(region: Region, made: Mapping[int, Sequence[Value]]) -> str | None:
    """Returns why a region cannot run if an input of a stage depends on what this stage or a later one computes.

    Args:
      made: what the results of other regions are computed from, by their ``id``.
    """
    for number, stage in enumerate(region.stages):
        own = {id(x) for each in region.stages[number:] for x in each.results}
        left, seen = list(stage.inputs), set[int]()
        while left:
            value = left.pop()
            if id(value) in own:
                return "an operand is computed from its result"
            if id(value) not in seen:
                seen.add(id(value))
                left += made.get(id(value), () if value.node is None else value.node.inputs)
    return None


def _constants(closed: Any, graph: Graph) -> dict[int, Any]:
    """Returns the constants of a closed jaxpr, by the ``id`` of their values."""
    held = zip(fingerprint.opened_jaxpr(closed).constvars, getattr(closed, "consts", ()), strict=False)
    return {id(graph.values[atom]): x for atom, x in held if atom in graph.values}


def _pairs_of_scans(graph: Graph) -> Iterator[tuple[Node, Node]]:
    """Yields scans with the scan that reads what they save: a forward pass and its backward pass."""
    for node in graph.nodes:
        if node.name != "scan":
            continue
        _, carried = lowering_compat.scan_inputs(node.params)
        saved = {id(x) for x in node.results[carried:]}
        readers = [
            user
            for user in dict.fromkeys(node.users)
            if user.name == "scan"
            and user.params["length"] == node.params["length"]
            and user.params["reverse"] != node.params["reverse"]
            and any(id(x) in saved for x in user.inputs[sum(lowering_compat.scan_inputs(user.params)) :])
        ]
        if len(readers) == 1:
            yield node, readers[0]


def _without_constants(closed: Any) -> Any:
    """Returns an open jaxpr, for parameters that hold one."""
    assert not closed.consts, "an open jaxpr cannot hold constants"
    return fingerprint.opened_jaxpr(closed)
