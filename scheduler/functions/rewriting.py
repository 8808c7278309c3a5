"""Replaces regions of a jaxpr, such as attention and norms, by tuned calls, and equations by others that are faster."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax
from jax.extend import core
from jax.interpreters import partial_eval

from scheduler.core.frames import Call
from scheduler.functions import equations
from scheduler.functions.comparison import TunedCall
from search_spaces import OPERATIONS, aligned, fingerprint, load, lowering_compat, recognise, remat, scatters
from search_spaces.operation import Operation
from search_spaces.problem import Problem
from search_spaces.recognise import CALLS, Graph, Inlined, Left, Node, Region, Stage, Value
from search_spaces.remat import Recomputed

# Calls whose bodies are searched together with the equations around them. Not `jax.checkpoint`: its body is computed
# again on purpose.
_INLINED = CALLS - {"checkpoint", "remat", "remat2"}


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
    """

    jaxpr: Any
    found: tuple[Found, ...]
    changes: tuple[str, ...] = ()

    @property
    def replaced(self) -> tuple[Found, ...]:
        return tuple(each for each in self.found if not each.reason)

    @property
    def left(self) -> Mapping[str, int]:
        """Why regions are left alone -> number of such regions."""
        return collections.Counter(each.reason for each in self.found if each.reason)


class _Pass(NamedTuple):
    """One pass over a jaxpr.

    Attributes:
      operations: those whose regions are replaced.
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
      check: ``check(region, calls)`` returns how the calls disagree with the equations of a region, or None.
      platform: for which other equations are changed, too; None leaves them as they are.
      last: whether regions of operations with `regions_last` are replaced, too.
    """

    def __init__(
        self,
        unless: Callable[[Operation[Any], Problem], str | None],
        call: TunedCall,
        check: Callable[[Region, Sequence[TunedCall]], str | None],
        platform: str | None = None,
        *,
        last: bool = False,
    ) -> None:
        self._unless, self._call, self._check = unless, call, check
        operations = [operation for name in OPERATIONS if (operation := load(name)).regions is not None]
        first = [operation for operation in operations if not operation.regions_last]
        rest = [operation for operation in operations if operation.regions_last and last]
        self._passes = [_Pass(first, True, platform), *([_Pass(rest, False, None)] if rest else [])]
        self._pass = self._passes[0]
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
        graph = _graph(closed, known)
        changes = self._changes(graph, [*self._regions(graph, count)], count)
        if not changes:
            return closed
        given = _constants(closed, graph)

        def run(*args: Any) -> list[Any]:
            values = given | {id(x): each for x, each in zip(graph.inputs, args, strict=True)}
            return _Evaluation(values, changes).run(graph)

        return _retraced(run, closed)

    def _changes(self, graph: Graph, regions: Sequence[_Replacement], count: int) -> _Changes:
        bodies, pairs = dict[int, Any](), dict[int, _Scan]()
        for forward, backward in _pairs_of_scans(graph) if self._pass.in_pairs else ():
            pairs |= self._pair(forward, backward, graph, count)
        for node in graph.nodes:
            if id(node) not in pairs and (changed := self._with_bodies(node, count)) is not None:
                bodies[id(node)] = changed
        if self._pass.platform is None:
            return _Changes(tuple(regions), bodies, pairs)
        formulas = {node: each for node in graph.nodes if (each := self._formula(node)) is not None}
        of_backward = remat.backward(graph.items, equations.is_backward)
        again = {id(each.value): each for each in remat.recomputed(graph, of_backward)}
        texts = {node: text for node, (_, text) in formulas.items()}
        texts |= {each.expensive: remat.text_of(each.expensive) for each in again.values() if each.expensive}
        lines = equations.lines_of(graph.items) if texts else {}
        for node, text in texts.items():
            at = Found((), 1, lines[id(node)]).source
            self._other_changes[f"{text}, for {at}" if at else text] = None
        run = {id(node): each for node, (each, _) in formulas.items()}
        return _Changes(tuple(regions), bodies, pairs, run, again, of_backward)

    def _formula(self, node: Node) -> tuple[Callable[..., list[Any]], str] | None:
        """Returns a faster way to compute an equation, and its description; None if there is none."""
        if (found := scatters.as_selection(node)) is not None:
            return found, scatters.text_of(node)
        if self._pass.platform in aligned.PLATFORMS and (found := aligned.as_padded(node)) is not None:
            return found, aligned.text_of(node)
        return None

    def _pair(self, forward: Node, backward: Node, outer: Graph, count: int) -> dict[int, _Scan]:
        """Returns replacements of the scan of a forward pass and the scan of its backward pass.

        The backward body reads arrays that the forward body saves. Regions are therefore found in both bodies together.
        What the tuned calls of the forward pass hand on is saved instead.
        """
        of_forward, of_backward = (node.params["jaxpr"] for node in (forward, backward))
        first = _graph(of_forward, recognise.arguments(forward, fingerprint.opened_jaxpr(of_forward)))
        opened = fingerprint.opened_jaxpr(of_backward)
        saved = dict(zip(map(id, forward.results), first.results, strict=True))
        known = {
            x: saved[id(given)] for x, given in zip(opened.invars, backward.inputs, strict=True) if id(given) in saved
        }
        second = _graph(of_backward, recognise.arguments(backward, opened) | known)
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
        found = dict[int, _Scan]()
        for node, graph, closed in ((forward, first, of_forward), (backward, second, of_backward)):
            changes = self._changes(graph, regions, times)
            if changes:
                found[id(node)] = _Scan(graph, changes, _constants(closed, graph), tuple(handed), node is forward)
        return found if regions else {}

    def _regions(self, graph: Graph, count: int) -> Iterator[_Replacement]:
        for operation in self._pass.operations:
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

    def _with_bodies(self, node: Node, count: int) -> Any:
        """Returns the equation of a node with rewritten bodies; None if none changes."""
        changed: dict[int, Any] = {}
        for closed, times in equations.held(node.equation):
            opened = fingerprint.opened_jaxpr(closed)
            new = self._rewritten(closed, recognise.arguments(node, opened), count * times)
            if new is not closed:
                changed[id(closed)] = new if closed is not opened else _without_constants(new)
        if not changed:
            return None
        return equations.with_inside(node.equation, lambda body: changed.get(id(body), body))


def _graph(closed: Any, known: Mapping[Any, Value]) -> Graph:
    return recognise.graph(fingerprint.opened_jaxpr(closed), {**recognise.constants(closed), **known}, _INLINED)


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


@dataclasses.dataclass(frozen=True, eq=False)
class _Replacement:
    region: Region
    calls: Sequence[TunedCall]


@dataclasses.dataclass(frozen=True, eq=False)
class _Changes:
    """What changes in a graph.

    Attributes:
      bodies: equations with rewritten bodies, by the ``id`` of their nodes.
      scans: replaced scans, by the ``id`` of their nodes.
      formulas: functions that compute equations otherwise, by the ``id`` of their nodes.
      recomputed: arrays that the backward pass computes again, by the ``id`` of their values.
      of_backward: the ``id`` of each equation and call of the backward pass.
    """

    regions: tuple[_Replacement, ...]
    bodies: Mapping[int, Any]
    scans: Mapping[int, _Scan]
    formulas: Mapping[int, Callable[..., list[Any]]] = dataclasses.field(default_factory=dict)
    recomputed: Mapping[int, Recomputed] = dataclasses.field(default_factory=dict)
    of_backward: Set[int] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.regions or self.bodies or self.scans or self.formulas or self.recomputed)


@dataclasses.dataclass(frozen=True, eq=False)
class _Scan:
    """A scan whose body is part of a pair.

    Attributes:
      handed: the regions that the forward body begins and the backward body ends.
      first: whether this is the scan of the forward pass.
    """

    graph: Graph
    changes: _Changes
    constants: Mapping[int, Any]
    handed: tuple[_Replacement, ...]
    first: bool


class _Evaluation:
    """Evaluates a graph with changes.

    Args:
      given: the arguments and constants, by the ``id`` of their values.
      handed_on: what stages that ran elsewhere hand on, by their regions.
    """

    def __init__(
        self, given: Mapping[int, Any], changes: _Changes, handed_on: Mapping[tuple[int, int], Any] | None = None
    ) -> None:
        self._values, self._changes = dict(given), changes
        self._stage_of = {
            id(x): (each, i)
            for each in changes.regions
            for i, stage in enumerate(each.region.stages)
            for x in stage.results
        }
        self._handed_on = dict(handed_on or {})
        # Between the two scans of a pair: what the forward scan saves, by its regions.
        self._saved: dict[int, Any] = {}
        # Calls are opened only where a part of their bodies is needed.
        self._needed = {id(x) for each in changes.regions for x in each.region.results}
        self._needed |= {id(x) for each in changes.regions for stage in each.region.stages for x in stage.inputs}
        self._needed |= {id(x) for each in changes.recomputed.values() for x in (each.root, *each.small)}
        # What the backward pass computes again, the roots, and their copies, by the ``id`` of their values.
        self._again = {id(x) for each in changes.recomputed.values() for x in (each.value, each.root)}
        self._copies: dict[int, Any] = {}

    def run(self, graph: Graph) -> list[Any]:
        """Returns the results of the graph."""
        self._run(graph.items)
        return [self._read(x) for x in graph.results]

    def _read(self, x: Value) -> Any:
        return self._values.get(id(x), x.literal)

    def _read_again(self, x: Value) -> Any:
        """Returns an array for the backward pass: a root behind a barrier, and what is computed again from it."""
        if id(x) in self._copies or id(x) not in self._again:
            return self._copies.get(id(x), self._read(x))
        if (again := self._changes.recomputed.get(id(x))) is None:  # without a barrier, XLA would merge equal equations
            found = jax.lax.optimization_barrier(self._read(x))
        else:
            given = {id(each): self._read(each) for each in again.small} | {
                id(again.root): self._read_again(again.root)
            }
            (found,) = recognise.evaluate(again.nodes, given, [x])
        self._copies[id(x)] = found
        return found

    def _run(self, items: Sequence[Node | Inlined]) -> None:
        waiting = list(self._opened(items))
        while waiting:  # a region waits for the last of its inputs, and others for its results
            later = [item for item in waiting if not self._run_item(item)]
            waiting = later if len(later) < len(waiting) else self._unlocked(later)

    def _unlocked(self, items: Sequence[Node | Inlined]) -> list[Node | Inlined]:
        """Returns the items that wait for each other, without what can be computed otherwise.

        A call may have results that do not need all of its inputs. If a region is not replaced, its equations may need
        a result of another region that needs a result of the first; the equations of the second compute it, too.
        """
        if any(isinstance(item, Inlined) for item in items):
            return [each for item in items for each in (item.items if isinstance(item, Inlined) else (item,))]
        ready = next(item for item in items if all(map(self._is_known, item.inputs)))
        self._evaluate(ready)
        return [item for item in items if item is not ready]

    def _opened(self, items: Sequence[Node | Inlined]) -> Iterator[Node | Inlined]:
        for item in items:
            if isinstance(item, Inlined) and self._is_opened(item):
                yield from self._opened(item.items)
            else:
                yield item

    def _run_item(self, item: Node | Inlined) -> bool:
        """Computes the results of an item; returns False if not all of its inputs are known yet."""
        if isinstance(item, Node) and any(id(x) in self._stage_of for x in item.results):
            (result,) = item.results
            replacement, number = self._stage_of[id(result)]
            if not all(map(self._is_known, replacement.region.stages[number].inputs)):
                return False
            self.run_stage(replacement, number)
        elif not all(map(self._is_known, item.inputs)):
            return False
        else:
            self._evaluate(item)
        return True

    def _evaluate(self, item: Node | Inlined) -> None:
        found = self._evaluated(item)
        self._values.update((id(x), each) for x, each in zip(item.results, found, strict=True))

    def _is_known(self, x: Value) -> bool:
        return id(x) in self._values or x.literal is not None

    def _evaluated(self, item: Node | Inlined) -> list[Any]:
        read = self._read_again if id(item) in self._changes.of_backward else self._read
        inputs = [read(x) for x in item.inputs]
        if (scan := self._changes.scans.get(id(item))) is not None and isinstance(item, Node):
            return self._scanned(item, scan, inputs)
        if formula := self._changes.formulas.get(id(item)):
            with lowering_compat.source_of(item.equation), item.equation.ctx.manager:
                return formula(*inputs)
        return lowering_compat.evaluate_equation(self._changes.bodies.get(id(item), item.equation), *inputs)

    def _is_opened(self, item: Inlined) -> bool:
        return any(
            self._is_opened(each)
            if isinstance(each, Inlined)
            else id(each) in self._changes.bodies
            or id(each) in self._changes.scans
            or id(each) in self._changes.formulas
            or any(id(x) in self._needed for x in each.results)
            for each in item.items
        )

    def run_stage(self, replacement: _Replacement, number: int) -> Any:
        """Computes the results of a stage, after those of the stages before; returns what the stage hands on."""
        key = id(replacement), number
        if key not in self._handed_on:
            before = self.run_stage(replacement, number - 1) if number else None
            stage = replacement.region.stages[number]
            with lowering_compat.source_of(replacement.region.shown[0].equation):
                results, self._handed_on[key] = stage.run(
                    replacement.calls[number], before, *map(self._read, stage.inputs)
                )
            self._values.update((id(x), each) for x, each in zip(stage.results, results, strict=True))
        return self._handed_on[key]

    def _scanned(self, node: Node, scan: _Scan, inputs: Sequence[Any]) -> list[Any]:
        params = node.params
        constants, carried = lowering_compat.scan_inputs(params)
        held = inputs[:constants]
        xs = tuple(inputs[constants + carried :])
        saved = () if scan.first else tuple(self._saved[id(each)] for each in scan.handed)

        def body(carry: Sequence[Any], sliced: Any) -> tuple[list[Any], Any]:
            own, handed = sliced
            given = dict(zip(map(id, scan.graph.inputs), (*held, *carry, *own), strict=True)) | dict(scan.constants)
            keys = [(id(each), 0) for each in scan.handed]
            evaluation = _Evaluation(given, scan.changes, dict(zip(keys, handed, strict=False)))
            results = evaluation.run(scan.graph)
            handed_on = [evaluation.run_stage(each, 0) for each in scan.handed] if scan.first else []
            return results[:carried], (results[carried:], handed_on)

        how = {"length": params["length"], "reverse": params["reverse"], "unroll": params["unroll"]}
        carry, (ys, handed_on) = jax.lax.scan(body, inputs[constants : constants + carried], (xs, saved), **how)
        if scan.first:
            self._saved |= {id(each): x for each, x in zip(scan.handed, handed_on, strict=True)}
        return [*carry, *ys]


def _retraced(run: Callable[..., list[Any]], closed: Any) -> Any:
    """Returns the closed jaxpr of `run`, with arguments and results as in `closed` and without dead equations."""
    before = fingerprint.opened_jaxpr(closed)
    avals = [_struct(atom.aval) for atom in before.invars]
    after = jax.make_jaxpr(run)(*avals)
    opened = fingerprint.opened_jaxpr(after)
    live, _ = partial_eval.dce_jaxpr(opened, [True] * len(opened.outvars), instantiate=True)
    kinds = [[(_struct(x.aval).shape, _struct(x.aval).dtype) for x in jaxpr.outvars] for jaxpr in (before, live)]
    assert kinds[0] == kinds[1], kinds
    return core.ClosedJaxpr(live, after.consts)


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def _without_constants(closed: Any) -> Any:
    """Returns an open jaxpr, for parameters that hold one."""
    assert not closed.consts, "an open jaxpr cannot hold constants"
    return fingerprint.opened_jaxpr(closed)
