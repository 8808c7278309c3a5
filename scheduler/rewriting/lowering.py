"""Lowers a function with selected kernels in place of its equations, and lists the replacements."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from scheduler.core.errors import NoCandidate
from scheduler.core.records import Fields, choice_text, fields_of
from scheduler.dispatch.dispatch import Decision, Options
from scheduler.dispatch.primitive import tuned_call_p
from scheduler.dispatch.stored import Times
from scheduler.rewriting import equations
from scheduler.rewriting.in_place import InPlace, observe_p
from scheduler.rewriting.passes import Found
from scheduler.rewriting.rewrite import Refuses, replacement_key, with_tuned_calls
from scheduler.rewriting.selection import KernelSelection, Partitioned, by_tuned_call
from search_spaces import lowering_compat
from search_spaces.operation import Operation
from search_spaces.problem import Problem

# Why XLA computes an equation that it partitions, if the problems of one device are not searched for.
NOT_PARTITIONED = "it is on explicit axes of a mesh, with a shard_map inside"


@dataclasses.dataclass(frozen=True)
class Replaced:
    """A kernel that replaces equations, or that is left out.

    Attributes:
      problem: The problem of the call, or of one device's part of it.
      schedule: The fields of the schedule.
      reason: Why this schedule was selected, or why XLA computes the equations.
      line: The lines of the user's code with the equations that it replaces as regions; "" for single equations.
      times: How often one call of the function runs it.
      keys: Those of its replacements, which leave it out if they are refused (`lower_with_kernels`).
      alone: The times of this schedule and of XLA alone, per run; None if neither a record nor the model selected it.
    """

    operation: str
    problem: Problem
    backend: str
    schedule: Fields
    reason: str
    line: str = ""
    times: int = 1
    keys: tuple[str, ...] = ()
    alone: Times | None = None

    @property
    def name(self) -> str:
        """The operation, the problem and how often it runs, as text."""
        return f"{self.operation} {self.problem.brief()}" + (f", {self.times} times" if self.times > 1 else "")

    def __str__(self) -> str:
        at = f", for {self.line}" if self.line else ""
        by = f"{',' if self.times > 1 else ''} by {choice_text(self.backend, dict(self.schedule))}"
        return f"{self.name}{by} ({self.reason}){at}"


def _grouped(kernels: Mapping[Any, Sequence[Replaced]]) -> tuple[Replaced, ...]:
    """Returns each kernel once, with the lines of all regions that it replaces, and how often it runs in all."""
    groups: dict[Replaced, list[Replaced]] = {}
    for each in itertools.chain(*kernels.values()):
        groups.setdefault(dataclasses.replace(each, reason="", line="", times=1, keys=()), []).append(each)
    return tuple(
        dataclasses.replace(
            each[0],
            line=", ".join(dict.fromkeys(one.line for one in each if one.line)),
            times=sum(one.times for one in each),
            keys=tuple(dict.fromkeys(key for one in each for key in one.keys)),
        )
        for each in groups.values()
    )


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A lowered function.

    Attributes:
      lowered: The `jax.stages.Lowered`.
      replaced: The kernels in it, each once.
      dropped: Kernels that are left out, each once, with the reasons.
      left: What is left to XLA and why, as "operation: reason" -> number of kinds of such equations.
      changes: Other changes, which need no kernel, as text.
      refused: The keys of replacements that are not made, because they disagree or were refused -> the reason.
    """

    lowered: Any
    replaced: tuple[Replaced, ...]
    dropped: tuple[Replaced, ...]
    left: Mapping[str, int]
    changes: tuple[str, ...] = ()
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)


def lower_with_kernels(
    traced: Any,
    options: Mapping[str, Options],
    platforms: tuple[str, ...] | None = None,
    *,
    regions_on: str | None = None,
    partitioned: Partitioned | None = None,
    refuses: Refuses = lambda key: None,
    in_place: InPlace | None = None,
) -> Lowered:
    """Lowers the result of a `jax.jit` trace, replacing regions and equations for which a kernel is selected.

    If XLA or a vendor's library is selected for a single equation, JAX's own equation is kept unchanged, so that XLA
    fuses it as usual. A region is also replaced by a vendor's library, which JAX's equations do not reach.

    Args:
      options: Operation name -> options for selecting its kernel.
      platforms: Platforms to lower for. None uses the platform of the arguments.
      regions_on: The platform for which regions are replaced, and other changes are made. None changes nothing but
        single equations.
      partitioned: The problems of one device. None leaves everything that XLA partitions to it.
      refuses: Returns why a replacement is not made, by its key (`Replaced.keys`, `OTHER_CHANGES`), or None.
      in_place: Compares each tuned call with the equations that it would replace, which stay.

    Raises:
      CacheMiss: There is no record and the policy is "error".
    """
    selection, on_one_device = KernelSelection(options, partitioned), KernelSelection(options)
    # By what is lowered: a region, or a kind of single equations, which may be lowered several times.
    replaced, dropped = dict[Any, list[Replaced]](), dict[Any, list[Replaced]]()
    left: collections.Counter[str] = collections.Counter()
    changes: tuple[str, ...] = ()
    refused = dict[str, str]()
    if regions_on is not None:
        rewritten = with_tuned_calls(
            traced.jaxpr,
            selection,
            regions_on,
            others=True,
            refuses=refuses,
            in_place=in_place,
        )
        traced = lowering_compat.with_jaxpr(traced, rewritten.jaxpr)
        left.update(rewritten.left)
        changes = rewritten.changes
        refused |= rewritten.refused
        replaced |= {found: _kernels(found, selection, regions_on) for found in rewritten.replaced}
        dropped |= {found: _kernels(found, selection, regions_on) for found in rewritten.dropped}
    primitives = equations.operations_by_primitive().keys()
    around, times = equations.layouts_around(traced.jaxpr, primitives)

    def answer(primitive: Any, platform: str, divided: bool, avals: tuple[Any, ...], params: Mapping[str, Any]) -> Any:
        kind = equations.layout_key(primitive, avals, params)
        posed = equations.match(primitive, avals, params, around.get(kind))
        if isinstance(posed, str) or (divided and partitioned is None):
            left[f"{primitive}: {posed if isinstance(posed, str) else NOT_PARTITIONED}"] += 1
            return None
        operation, matched = posed
        problem = matched.problem
        try:
            selected = (selection if divided else on_one_device).of(operation, problem, platform)
        except NoCandidate as error:
            left[f"{operation.name}: {error}"] += 1
            return None
        if vendor := next((found for _, found in selected if found.kernel.vendor), None):
            left[f"{operation.name}: {vendor.kernel.backend} is selected: {vendor.reason}"] += 1
            return None
        key = replacement_key([(operation, *each) for each in selected])
        kernels = [_kernel(operation, *each, key, times.get(kind, 1)) for each in selected]
        if (reason := refuses(key)) is not None:
            refused[key] = reason
            left[f"{operation.name}: {problem}: {reason}"] += 1
            dropped[kind, platform, divided] = [dataclasses.replace(each, reason=reason) for each in kernels]
            return None
        replaced[kind, platform, divided] = kernels
        if in_place is None or "preferred_element_type" not in params:  # cuDNN computes nothing in float32
            return by_tuned_call(operation, matched, options[operation.name])
        placed = functools.partial(selection.placed, operation, problem)
        run = by_tuned_call(operation, matched, options[operation.name], placed)
        return functools.partial(in_place.product, key, problem, run, primitive, params)

    answers = {primitive: functools.partial(answer, primitive) for primitive in equations.operations_by_primitive()}
    lowered = lowering_compat.lower(traced, answers, untouched=(tuned_call_p, observe_p), platforms=platforms)
    return Lowered(lowered, _grouped(replaced), _grouped(dropped), dict(left), changes, refused)


def _kernels(found: Found, selection: KernelSelection, platform: str) -> list[Replaced]:
    kernels = [
        _kernel(operation, *each, found.key, found.count)
        for operation, problem in found.calls
        for each in selection.of(operation, problem, platform)
    ]
    return [dataclasses.replace(each, line=found.source, reason=found.reason or each.reason) for each in kernels]


def _kernel(operation: Operation[Any], problem: Problem, found: Decision, key: str, times: int) -> Replaced:
    schedule = fields_of(dataclasses.asdict(found.schedule))
    alone = found.times
    return Replaced(operation.name, problem, found.kernel.backend, schedule, found.reason, "", times, (key,), alone)
