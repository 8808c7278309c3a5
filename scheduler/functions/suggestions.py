"""Finds calls of plain JAX that could be tuned: single equations, and patterns that operations recognise."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scheduler.core.errors import SchedulerError
from scheduler.core.frames import Call
from scheduler.core.hardware import CPU, Hardware
from scheduler.dispatch import dispatch
from scheduler.dispatch.stored import evidence
from scheduler.functions import equations
from scheduler.functions.equations import ProblemCount, ProblemCounter, inside, is_backward, line_of
from scheduler.prediction.predict import predict
from search_spaces import OPERATIONS, jax_compat, load, recognise
from search_spaces.operation import Operation
from search_spaces.recognise import Recognised

# Smaller expected gains are not reported.
WORTH_TELLING = 1.01


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """A computation in plain JAX that a tuned function could replace.

    Attributes:
      row: The problem, and the lines that compute it now.
      call: The tuned function.
      gain: XLA's time over the tuned call's time, by a record or the model; None if no gain is expected.
    """

    row: ProblemCount
    call: str
    gain: float | None


@dataclasses.dataclass(frozen=True, eq=False)
class _Scope:
    """Equations that all run equally often, and the patterns recognised in them."""

    nodes: list[recognise.Node]
    count: int
    backward: bool
    patterns: list[tuple[Operation[Any], Recognised]]


def suggestions(jaxpr: Any, chip: Hardware) -> tuple[Suggestion, ...]:
    """Returns the computations in a function that could be tuned, the most expensive first.

    If one pattern is part of another, only the larger one is listed. It includes the computations of its backward pass.
    """
    operations = [load(name) for name in OPERATIONS]
    scopes, tally = list(_scopes(operations, jaxpr, {}, 1, False)), ProblemCounter(chip)
    covered = {
        line
        for scope in scopes
        for _, pattern in scope.patterns
        for line in _lines(pattern)
        if len(pattern.shown) > 1 and not scope.backward
    }
    stored = equations.layouts_around(jaxpr, equations.operations_by_primitive().keys())
    for scope in scopes:
        replaced = set[int]()
        for operation, pattern in scope.patterns:
            if not (scope.backward and covered.issuperset(_lines(pattern)) and len(pattern.shown) == 1):
                tally.add(operation, pattern.problem, scope.count, _lines(pattern))
            replaced |= set(map(id, pattern.nodes))
        for node in scope.nodes:
            backward = scope.backward or is_backward(node.equation)
            if id(node) in replaced or (backward and line_of(node.equation) in covered):
                continue
            if node.equation.primitive in jax_compat.CUDNN_EQUATIONS:  # only its own record can show a gain over cuDNN
                continue
            if (matched := equations.match_equation(node.equation, stored)) is not None:
                tally.add(*matched, scope.count, [line_of(node.equation)])
    calls = {operation.name: operation.call or f"tuned_{operation.name}" for operation in operations}
    calls |= {operation.name: found.call for scope in scopes for operation, found in scope.patterns if found.call}
    return tuple(Suggestion(row, calls[row.operation.name], _gain(row, chip)) for row in tally.rows())


def _scopes(
    operations: Sequence[Operation[Any]], jaxpr: Any, known: Mapping[Any, recognise.Value], count: int, backward: bool
) -> Iterator[_Scope]:
    nodes = recognise.nodes(jaxpr, known)
    yield _Scope(nodes, count, backward, _patterns(operations, nodes))
    for node in nodes:
        within = backward or is_backward(node.equation)
        for held, times in inside(node.equation):
            yield from _scopes(operations, held, recognise.arguments(node, held), count * times, within)


def _lines(pattern: Recognised) -> set[Call | None]:
    return {line_of(node.equation) for node in pattern.shown}


def _patterns(
    operations: Sequence[Operation[Any]], nodes: Sequence[recognise.Node]
) -> list[tuple[Operation[Any], Recognised]]:
    found = [
        (operation, pattern)
        for operation in operations
        if operation.recognise is not None
        for node in nodes
        if (pattern := operation.recognise(node)) is not None
    ]
    found.sort(key=lambda each: -len(each[1].nodes))
    kept, replaced = [], set[int]()
    for operation, pattern in found:
        if not any(id(node) in replaced for node in pattern.shown):
            kept.append((operation, pattern))
            replaced |= set(map(id, pattern.nodes))
    return kept


def _gain(row: ProblemCount, chip: Hardware) -> float | None:
    if chip.platform == CPU.platform:
        return None
    try:
        stored = evidence(dispatch.user_cache(), row.operation, row.problem, chip)
        found = predict(row.operation, row.problem, chip, records=stored)
    except SchedulerError:
        return None
    gain = found.library_s / found.predicted_s
    return gain if found.backend != row.operation.library.backend and gain >= WORTH_TELLING else None
