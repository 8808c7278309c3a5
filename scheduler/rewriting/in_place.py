"""Compares tuned calls with the equations that they replace, on the values that a function itself computes."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.buffer_callback import buffer_callback
from jax.extend.core import Primitive
from jax.interpreters import mlir

from scheduler.core import cuda_driver
from scheduler.core.text import error_text
from scheduler.rewriting import comparison
from scheduler.rewriting.comparison import Comparison, RegionComparison, TunedCall
from search_spaces import jax_compat, lowering_compat, partitioning_compat, recognise
from search_spaces.problem import Problem
from search_spaces.recognise import Node, Region, RegionStage, Value

# Takes the arrays of a comparison, and has no results. `recognise.graph` does not count it among the users of an array,
# so that a function with comparisons is rewritten as one without.
observe_p = Primitive(recognise.OBSERVE)
observe_p.multiple_results = True
observe_p.def_effectful_abstract_eval(lambda *_, **__: ([], {lowering_compat.DEBUG_EFFECT}))


def _lower(ctx: Any, *args: Any, copy: Copy, devices: int) -> Any:
    def run(*own: Any) -> tuple[()]:
        _hand_out(copy, devices, own)
        return ()

    return jax_compat.lower(run, ctx, args)


def _hand_out(copy: Copy, devices: int, operands: Sequence[Any]) -> None:
    if devices > 1:  # XLA warns of operands that it has to gather on the one device that calls back
        (whole,) = partitioning_compat.shardings([("devices", devices)], [()])
        operands = [jax.lax.with_sharding_constraint(x, whole) for x in operands]
    if devices > 1 or jax.default_backend() != "gpu":
        jax.debug.callback(copy.to_host, *operands)
    else:
        buffer_callback(copy.on_device, (), has_side_effect=True)(*map(_numeric, operands))


def _numeric(x: jax.Array) -> jax.Array:
    """Returns the bits of a dtype that NumPy does not have as unsigned integers: buffers have NumPy's dtypes."""
    return x if np.dtype(x.dtype).kind in "biufc" else jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")


mlir.register_lowering(observe_p, _lower)


class Copy:
    """A copy of the operands at one place of a program. The runs 1, 2, 4, and so on of that place overwrite it.

    On one GPU the copy stays there: JAX copies some 0.3 GB/s to the host (H200).
    """

    def __init__(self, operands: Sequence[Any]) -> None:
        self._structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
        self._runs = 0
        self.operands: list[Any] = []
        self.filled = False

    @property
    def bytes(self) -> int:
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in self._structs)

    def reserve(self, device: jax.Device) -> None:
        """Allocates memory of the device for the copy."""
        self.operands = jax.block_until_ready([jnp.zeros(x.shape, x.dtype, device=device) for x in self._structs])

    def to_host(self, *operands: Any) -> None:
        if self._is_due():
            self.operands, self.filled = [np.asarray(x) for x in operands], True

    def on_device(self, context: Any, _: Any, *operands: Any) -> None:
        if not self.operands or not self._is_due():
            return
        for own, x in zip(self.operands, operands, strict=True):
            cuda_driver.copy(
                own.unsafe_buffer_pointer(), x.__cuda_array_interface__["data"][0], own.nbytes, context.stream
            )
        self.filled = True

    def _is_due(self) -> bool:
        self._runs += 1
        return _is_power_of_two(self._runs)


FAILED = "its kernels failed"
# Operands of more bytes are copied at one place.
SMALL_BYTES = 2**26
# The key of a replacement, and what else a comparison depends on.
Kind = tuple[str, str]


class InPlace:
    """The comparisons of one version of a function, by the keys of its replacements (`rewrite.replacement_key`).

    A function that is lowered with these comparisons computes its own equations. It hands out the operands of what
    would be replaced, at the first place of each kind, and if they are small at the second, fourth, and so on. A kind
    is a key, and for single equations also their parameters, because their problem does not name the layout.
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
        self._copies = collections.defaultdict[Kind, list[Copy]](list)
        self._places = collections.Counter[Kind]()

    def __bool__(self) -> bool:
        return bool(self._comparisons)

    def region(self, key: str, region: Region, calls: Sequence[TunedCall], libraries: Sequence[TunedCall]) -> Region:
        """Returns the region with stages that compute its own equations. Each reads the roots that it needs first.

        Args:
          libraries: The calls by the libraries of their operations.
        """
        kind = key, ""
        if kind not in self._comparisons:
            self._comparisons[kind] = self._known.get(kind) or RegionComparison(region).with_calls(calls, libraries)
        order, stages = list[Value](), list[RegionStage]()
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
        if (copy := self._copy(kind, structs)) is not None:
            _hand_out(copy, self._devices, args)
        return (primitive.bind(*args, **params),)

    def compile(self, beside: concurrent.futures.Executor) -> None:
        """Lowers the programs that compare, and compiles them beside."""
        for kind, each in self._comparisons.items():
            try:
                each.compile(beside)
            except Exception as error:  # any error of a kernel costs this kernel alone
                self._failed[kind] = f"{FAILED}: {error_text(error)}"

    def on_random_operands(self) -> Mapping[str, str]:
        """Compares on random and special operands. Returns the key of each kernel that disagrees or fails -> how."""
        return self._wrong(lambda kind: self._failed.get(kind) or self._on_random_operands(kind))

    def _on_random_operands(self, kind: Kind) -> str | None:
        try:
            return comparison.checked(kind, self._comparisons[kind].disagreement)
        except Exception as error:  # any error of a kernel, compiler or device costs this kernel alone
            return f"{FAILED}: {error_text(error)}"

    def is_unexpected(self, key: str, reason: str) -> bool:
        """Returns whether a kernel failed, or disagrees with a single equation: regions may have rare equations."""
        return reason.startswith(FAILED) or (key, "") not in self._comparisons

    def reserve(self, device: jax.Device, needed: Callable[[], int | None]) -> None:
        """Allocates memory of a GPU for the operands, as far as it suffices besides the bytes that a program needs."""
        if device.platform != "gpu" or self._devices > 1:
            return
        stats = device.memory_stats() or {}  # not every allocator has a limit
        left = stats.get("bytes_limit", math.inf) - stats.get("bytes_in_use", 0) - (needed() or 0)
        for copy in sorted(itertools.chain(*self._copies.values()), key=lambda copy: copy.bytes):
            left -= copy.bytes
            if left < 0:
                return
            copy.reserve(device)

    def refusals(self) -> Mapping[str, str]:
        """Compares on the operands handed out, and frees them. Returns the key of each kernel that disagrees -> how.

        JAX caches the lowered callbacks, and with them this object, as long as the function lives.
        """
        jax.effects_barrier()
        return self._wrong(self._on_own_operands)

    def _on_own_operands(self, kind: Kind) -> str | None:
        for copy in self._copies.pop(kind, ()):
            operands, copy.operands = copy.operands, []
            try:
                wrong = self._comparisons[kind].on(*operands) if copy.filled else None
            except jax.errors.JaxRuntimeError:  # beside the function's arrays, float32 may need too much memory
                return None
            if wrong:
                return f"{comparison.DISAGREE}: {wrong} (on the function's own values)"
        return None

    def _wrong(self, found: Callable[[Kind], str | None]) -> Mapping[str, str]:
        return {kind[0]: text for kind in self._comparisons if (text := found(kind))}

    def _observer(self, kind: Kind, roots: Sequence[Value]) -> Callable[[Mapping[int, Any]], None] | None:
        if (copy := self._copy(kind, roots)) is None:
            return None
        return lambda given: observe_p.bind(*(given[id(x)] for x in roots), copy=copy, devices=self._devices)

    def _copy(self, kind: Kind, operands: Sequence[Any]) -> Copy | None:
        """Returns a copy of the operands at one more place of this kind; None if they are not copied there."""
        self._places[kind] += 1
        copy = Copy(operands)
        if self._places[kind] > 1 and (copy.bytes > SMALL_BYTES or not _is_power_of_two(self._places[kind])):
            return None
        self._copies[kind].append(copy)
        return copy


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
