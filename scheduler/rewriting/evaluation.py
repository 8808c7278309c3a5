"""Evaluates a jaxpr with tuned calls in place of regions, and with other equations changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import jax
from jax import lax
from jax.extend import core
from jax.interpreters import partial_eval

from scheduler.rewriting.comparison import TunedCall
from scheduler.rewriting.formulas import Recomputed
from search_spaces import fingerprint, lowering_compat, recognise
from search_spaces.recognise import Graph, Inlined, Node, Region, Value


@dataclasses.dataclass(frozen=True, eq=False)
class Replacement:
    region: Region
    calls: Sequence[TunedCall]


@dataclasses.dataclass(frozen=True, eq=False)
class Changes:
    """What changes in a graph.

    Attributes:
      bodies: equations with rewritten bodies, by the ``id`` of their nodes.
      scans: replaced scans, by the ``id`` of their nodes.
      formulas: functions that compute equations otherwise, by the ``id`` of their nodes.
      recomputed: arrays that the backward pass computes again, by the ``id`` of their values.
      of_backward: the ``id`` of each equation and call of the backward pass.
    """

    regions: tuple[Replacement, ...]
    bodies: Mapping[int, Any]
    scans: Mapping[int, Scan]
    formulas: Mapping[int, Callable[..., list[Any]]] = dataclasses.field(default_factory=dict)
    recomputed: Mapping[int, Recomputed] = dataclasses.field(default_factory=dict)
    of_backward: Set[int] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.regions or self.bodies or self.scans or self.formulas or self.recomputed)


@dataclasses.dataclass(frozen=True, eq=False)
class Scan:
    """A scan with a body that is part of a pair.

    Attributes:
      handed: the regions that the forward body begins and the backward body ends.
      first: whether this is the scan of the forward pass.
    """

    graph: Graph
    changes: Changes
    constants: Mapping[int, Any]
    handed: tuple[Replacement, ...]
    first: bool


class Evaluation:
    """Evaluates a graph with changes.

    Args:
      given: the arguments and constants, by the ``id`` of their values.
      handed_on: what stages that ran elsewhere hand on, by their regions.
    """

    def __init__(
        self, given: Mapping[int, Any], changes: Changes, handed_on: Mapping[tuple[int, int], Any] | None = None
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
        waiting = list(self._opened(graph.items))
        while waiting:  # a region waits for the last of its inputs, and others for its results
            later = [item for item in waiting if not self._run_item(item)]
            waiting = later if len(later) < len(waiting) else self._unlocked(later)
        return [self._read(x) for x in graph.results]

    def _read(self, x: Value) -> Any:
        return self._values.get(id(x), x.literal)

    def _read_again(self, x: Value) -> Any:
        """Returns an array for the backward pass: a root behind a barrier, and what is computed again from it."""
        if id(x) in self._copies or id(x) not in self._again:
            return self._copies.get(id(x), self._read(x))
        if (again := self._changes.recomputed.get(id(x))) is None:  # without a barrier, XLA would merge equal equations
            found = lax.optimization_barrier(self._read(x))
        else:
            given = {id(each): self._read(each) for each in again.small} | {
                id(again.root): self._read_again(again.root)
            }
            (found,) = recognise.evaluate(again.nodes, given, [x])
        self._copies[id(x)] = found
        return found

    def _unlocked(self, items: Sequence[Node | Inlined]) -> list[Node | Inlined]:
        """Returns the items that wait for each other, without what can be computed otherwise.

        A call may have results that do not need all of its inputs. If a region is not replaced, its equations may need
        a result of another region that needs a result of the first; the equations of the second compute it, too.
        """
        if any(isinstance(item, Inlined) and item.items for item in items):
            return [each for item in items for each in (isinstance(item, Inlined) and item.items) or [item]]
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
            if not all(map(self._is_known, self._inputs(replacement, number))):
                return False
            self.run_stage(replacement, number)
        elif not all(map(self._is_known, item.inputs)):
            return False
        else:
            self._evaluate(item)
        return True

    def _inputs(self, replacement: Replacement, number: int) -> Iterator[Value]:
        """Yields what a stage reads, and what the stages before it read that have not run."""
        for i, stage in enumerate(replacement.region.stages[: number + 1]):
            if (id(replacement), i) not in self._handed_on:
                yield from stage.inputs

    def _evaluate(self, item: Node | Inlined) -> None:
        with item.equation.ctx.manager:  # the mesh of its types
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
            with lowering_compat.source_of(item.equation):
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

    def run_stage(self, replacement: Replacement, number: int) -> Any:
        """Computes the results of a stage, after those of the stages before; returns what the stage hands on."""
        key = id(replacement), number
        if key not in self._handed_on:
            before = self.run_stage(replacement, number - 1) if number else None
            stage = replacement.region.stages[number]
            shown = replacement.region.shown[0].equation
            with lowering_compat.source_of(shown), shown.ctx.manager:
                results, self._handed_on[key] = stage.run(
                    replacement.calls[number], before, *map(self._read, stage.inputs)
                )
            self._values.update((id(x), each) for x, each in zip(stage.results, results, strict=True))
        return self._handed_on[key]

    def _scanned(self, node: Node, scan: Scan, inputs: Sequence[Any]) -> list[Any]:
        params = node.params
        constants, carried = lowering_compat.scan_inputs(params)
        held = inputs[:constants]
        xs = tuple(inputs[constants + carried :])
        saved = () if scan.first else tuple(self._saved[id(each)] for each in scan.handed)

        def body(carry: Sequence[Any], sliced: Any) -> tuple[list[Any], Any]:
            own, handed = sliced
            given = dict(zip(map(id, scan.graph.inputs), (*held, *carry, *own), strict=True)) | dict(scan.constants)
            keys = [(id(each), 0) for each in scan.handed]
            evaluation = Evaluation(given, scan.changes, dict(zip(keys, handed, strict=False)))
            results = evaluation.run(scan.graph)
            handed_on = [evaluation.run_stage(each, 0) for each in scan.handed] if scan.first else []
            return results[:carried], (results[carried:], handed_on)

        how = {"length": params["length"], "reverse": params["reverse"], "unroll": params["unroll"]}
        carry, (ys, handed_on) = lax.scan(body, inputs[constants : constants + carried], (xs, saved), **how)
        if scan.first:
            self._saved |= {id(each): x for each, x in zip(scan.handed, handed_on, strict=True)}
        return [*carry, *ys]


def retraced(run: Callable[..., list[Any]], closed: Any) -> Any:
    """Returns the closed jaxpr of `run`, with arguments and results as in `closed` and without dead equations."""
    before = fingerprint.opened_jaxpr(closed)
    avals = [_struct(atom.aval) for atom in before.invars]

    def typed(*args: Any) -> list[Any]:
        return [_typed(x, _struct(atom.aval)) for x, atom in zip(run(*args), before.outvars, strict=True)]

    after = jax.make_jaxpr(typed)(*avals)
    opened = fingerprint.opened_jaxpr(after)
    live, _ = partial_eval.dce_jaxpr(opened, [True] * len(opened.outvars), instantiate=True)
    kinds = [[_struct(x.aval) for x in jaxpr.outvars] for jaxpr in (before, live)]
    assert kinds[0] == kinds[1], kinds
    return core.ClosedJaxpr(live, after.consts)


def _typed(x: Any, like: jax.ShapeDtypeStruct) -> Any:
    """Returns an array with the weak type of `like`: the number that an equation of constants computes has none."""
    if _struct(jax.typeof(x)).weak_type == like.weak_type:
        return x
    return lax.convert_element_type_p.bind(x, new_dtype=like.dtype, weak_type=like.weak_type, sharding=None)


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))
