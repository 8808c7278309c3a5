"""Compares tuned calls with the equations that they replace, on the values that a function itself computes."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from scheduler.functions import comparison
from scheduler.functions.comparison import Comparison, RegionComparison, TunedCall
from search_spaces import jax_compat, lowering_compat, partitioning_compat, recognise
from search_spaces.problem import Problem
from search_spaces.recognise import Node, Region, Stage, Value

# Takes the arrays of a comparison, and has no results. `recognise.graph` does not count it among the users of an array,
# so that a function with comparisons is rewritten as one without.
observe_p = Primitive(recognise.OBSERVE)
observe_p.multiple_results = True
observe_p.def_effectful_abstract_eval(lambda *_, **__: ([], {lowering_compat.DEBUG_EFFECT}))


def _lower(ctx: Any, *args: Any, observe: Callable[..., None], devices: int) -> Any:
    def run(*own: Any) -> tuple[()]:
        _hand_out(observe, devices, own)
        return ()

    return jax_compat.lower(run, ctx, args)


def _hand_out(observe: Callable[..., None], devices: int, operands: Sequence[Any]) -> None:
    if devices > 1:  # XLA warns of operands that it has to gather on the one device that calls back
        (whole,) = partitioning_compat.shardings([("devices", devices)], [()])
        operands = [jax.lax.with_sharding_constraint(x, whole) for x in operands]
    jax.debug.callback(observe, *operands)


mlir.register_lowering(observe_p, _lower)


FAILED = "its kernels failed"
# Operands of more bytes are handed out once: JAX copies some 0.3 GB/s to the host (H200).
SMALL_BYTES = 2**26
# The key of a replacement, and what else a comparison depends on.
Kind = tuple[str, str]


class InPlace:
    """The comparisons of one version of a function, by the keys of its replacements (`rewrite.replacement_key`).

    A function that is lowered with these comparisons computes its own equations. It hands out the operands of what
    would be replaced, at the first place of each kind, and if they are small at the second, fourth, and so on. A kind
    is a key, and for single equations, whose problem does not name their layout, their parameters.
    """

    def __init__(self, devices: int, before: InPlace | None = None) -> None:
        """Creates comparisons; those that `before` has compiled are not compiled again.

        Args:
          devices: Over how many devices XLA partitions the function.
        """
        self._devices = devices
        self._known: Mapping[Kind, Comparison] = before._comparisons if before else {}
        self._comparisons: dict[Kind, Comparison] = {}
        self._failed = dict[Kind, str]()
        self._operands = collections.defaultdict[Kind, list[list[Any]]](list)
        self._places, self._runs = collections.Counter[Kind](), collections.Counter[Kind]()

    def __bool__(self) -> bool:
        return bool(self._comparisons)

    def region(self, key: str, region: Region, calls: Sequence[TunedCall]) -> Region:
        """Returns the region with stages that compute its own equations. Each reads the roots that it needs first."""
        kind = key, ""
        if kind not in self._comparisons:
            self._comparisons[kind] = self._known.get(kind) or RegionComparison(region).with_calls(calls)
        order, stages = list[Value](), list[Stage]()
        for stage in region.stages:
            nodes = recognise.equations_between(stage.results, region.roots)
            needed = {id(x) for node in nodes for x in node.inputs} | set(map(id, stage.results))
            last = stage is region.stages[-1]
            own = tuple(x for x in region.roots if (last or id(x) in needed) and not any(x is each for each in order))
            order += own
            observe = self._observer(kind, region.roots) if last else None
            run = functools.partial(_run_plain, nodes, stage.results, tuple(order), observe)
            stages.append(dataclasses.replace(stage, inputs=own, run=run))
        return dataclasses.replace(region, stages=tuple(stages))

    def product(
        self,
        key: str,
        problem: Problem,
        call: Callable[..., Sequence[Any]],
        primitive: Any,
        params: Mapping[str, Any],
        *args: Any,
    ) -> tuple[Any, ...]:
        """Returns the result of an equation, with the comparison of a call that takes its arrays."""
        structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
        kind = key, f"{params} {structs}"
        if kind not in self._comparisons:
            made = functools.partial(comparison.of_product, problem, call, primitive, params, *structs)
            self._comparisons[kind] = self._known.get(kind) or made()
        if self._is_observed(kind, structs):
            _hand_out(functools.partial(self._note, kind), self._devices, args)
        return (primitive.bind(*args, **params),)

    def compile(self, beside: concurrent.futures.Executor) -> None:
        """Lowers the programs that compare, and compiles them beside."""
        for kind, each in self._comparisons.items():
            try:
                each.compile(beside)
            except Exception as error:  # any error of a kernel costs this kernel alone
                self._failed[kind] = _failure(error)

    def on_random_operands(self) -> Mapping[str, str]:
        """Compares on random and special operands. Returns the key of each kernel that disagrees or fails -> how."""
        return self._wrong(lambda kind: self._failed.get(kind) or self._on_random_operands(kind))

    def _on_random_operands(self, kind: Kind) -> str | None:
        try:
            return comparison.checked(kind, self._comparisons[kind].disagreement)
        except Exception as error:  # any error of a kernel, compiler or device costs this kernel alone
            return _failure(error)

    def is_unexpected(self, key: str, reason: str) -> bool:
        """Returns whether a kernel failed, or disagrees with a single equation: regions may have rare equations."""
        return reason.startswith(FAILED) or (key, "") not in self._comparisons

    def refusals(self) -> Mapping[str, str]:
        """Compares on the operands handed out, and frees them. Returns the key of each kernel that disagrees -> how.

        JAX caches the lowered callbacks, and with them this object, as long as the function lives.
        """
        jax.effects_barrier()
        return self._wrong(self._on_own_operands)

    def _on_own_operands(self, kind: Kind) -> str | None:
        for operands in self._operands.pop(kind, ()):
            try:
                wrong = self._comparisons[kind].on(*operands)
            except jax.errors.JaxRuntimeError:  # beside the function's arrays, float32 may need too much memory
                return None
            if wrong:
                return f"{comparison.DISAGREE}: {wrong} (on the function's own values)"
        return None

    def _wrong(self, found: Callable[[Kind], str | None]) -> Mapping[str, str]:
        return {kind[0]: text for kind in self._comparisons if (text := found(kind))}

    def _observer(self, kind: Kind, roots: Sequence[Value]) -> Callable[[Mapping[int, Any]], None] | None:
        if not self._is_observed(kind, roots):
            return None
        note = functools.partial(self._note, kind)
        return lambda given: observe_p.bind(*(given[id(x)] for x in roots), observe=note, devices=self._devices)

    def _is_observed(self, kind: Kind, operands: Sequence[Any]) -> bool:
        self._places[kind] += 1
        size = sum(math.prod(x.shape) * x.dtype.itemsize for x in operands)
        return self._places[kind] == 1 or (size <= SMALL_BYTES and _is_power_of_two(self._places[kind]))

    def _note(self, kind: Kind, *operands: Any) -> None:
        self._runs[kind] += 1
        if _is_power_of_two(self._runs[kind]):
            self._operands[kind].append([np.asarray(x) for x in operands])


def _run_plain(
    nodes: Sequence[Node],
    results: Sequence[Value],
    order: Sequence[Value],
    observe: Callable[[Mapping[int, Any]], None] | None,
    call: Any,
    before: Sequence[Any] | None,
    *args: Any,
) -> tuple[tuple[Any, ...], list[Any]]:
    """Runs a stage by its equations, and hands on the roots."""
    roots = [*(before or ()), *args]
    given = dict(zip(map(id, order), roots, strict=True))
    if observe is not None:
        observe(given)
    return tuple(recognise.evaluate(nodes, given, results)), roots


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _failure(error: Exception) -> str:
    return f"{FAILED}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
