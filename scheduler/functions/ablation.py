"""Compiles, compares and times a whole function under plans, to find which kernels speed it up."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax

from scheduler.core.errors import NoCandidate
from scheduler.core.plan import Plan
from scheduler.core.records import schedule_text
from scheduler.dispatch import planned
from scheduler.dispatch.dispatch import Decision, Options
from scheduler.dispatch.primitive import tuned_call_p
from scheduler.dispatch.stored import Times
from scheduler.functions import comparison, equations, interleaved
from scheduler.functions.in_place import InPlace, observe_p
from scheduler.functions.interleaved import Seconds
from scheduler.functions.noise import with_noise
from scheduler.functions.posed_calls import by_tuned_call
from scheduler.functions.pure import pure_call
from scheduler.functions.rewrite import Refuses, replacement_key, with_tuned_calls
from scheduler.functions.rewriting import Rewritten
from scheduler.functions.selection import Partitioned, Selection
from scheduler.search.final_comparison import FEWEST_ROUNDS, Margin
from search_spaces import lowering_compat
from search_spaces.checking import without_autotuning
from search_spaces.operation import Operation
from search_spaces.problem import Problem

Run = Callable[[], Any]  # a compiled function with its arrays
T = TypeVar("T")
# Limits of the variants compiled and timed in every round: those that leave out a group, and those that add one tied
# kernel.
MOST_GROUPS, MOST_ADDED = 10, 4
# Rounds of the leave-one-out comparison. Many rounds keep the confidence interval of each kernel narrow.
ROUNDS = 12
SECONDS_OF_VARIANT = 4.0
# Why XLA computes an equation that it partitions, if the problems of one device are not searched for.
NOT_PARTITIONED = "it is on devices of several processes, or on explicit axes with a shard_map inside"


class CompiledFunction:
    """A function and its arguments, compiled under one plan after another.

    Arrays are inputs; all other arguments are compile-time constants. Modules and other state that the function updates
    stay unchanged: the updates are returned as results. Donated arguments are copied, so that the function can be
    called again.

    Attributes:
      call, arrays: The pure function and its inputs.
    """

    def __init__(self, fn: Callable[..., Any], args: Sequence[Any]) -> None:
        pure = pure_call(fn, args)
        self.call, self.arrays = pure.function, pure.arrays

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        found = {device for x in self.arrays if isinstance(x, jax.Array) for device in x.devices()}
        return tuple(sorted(found, key=lambda device: device.id))

    def under(self, plan: Plan) -> Run:
        """Compiles the function under `plan`. Raises any error of JAX, of a kernel or of the function."""

        with planned.plan(planned.InForce(plan)):
            compiled = jax.jit(self.call).lower(*self.arrays).compile()
        return functools.partial(compiled, *self.arrays)

    def noisy(self, plan: Plan, problems: Iterable[Problem]) -> Callable[[int], list[Any]]:
        """Returns a function of a seed that computes the results under `plan` with rounding noise (`with_noise`)."""
        products = comparison.products_rounding(problems)

        @functools.cache
        def compiled() -> Any:
            with planned.plan(planned.InForce(plan)):
                run = with_noise(jax.make_jaxpr(self.call)(*self.arrays), products)
                options = without_autotuning(jax.default_backend())
                return jax.jit(run, compiler_options=options).lower(0, *self.arrays).compile()

        return lambda seed: compiled()(seed, *self.arrays)

    def time(self, runs: Mapping[Any, Run], *, at_least_rounds: int = FEWEST_ROUNDS) -> dict[Any, Seconds]:
        """Times the runs in interleaved rounds on the devices of the arguments, in seconds."""
        seconds = SECONDS_OF_VARIANT * len(runs)
        return interleaved.time_interleaved(
            runs, seconds=seconds, at_least_rounds=at_least_rounds, devices=self.devices
        )


def groups(at_stake_s: Mapping[int, float], most: int, least_s: float = 0.0) -> list[tuple[int, ...]]:
    """Groups the kernels to test: each kernel alone, in descending order, and the rest as the last group.

    Args:
      at_stake_s: Seconds per call of the function that each kernel may change, from times of the kernel alone.
      most: Maximum number of groups.
      least_s: Minimum of `at_stake_s` of a kernel tested alone: timing cannot resolve less.
    """
    ordered = sorted(at_stake_s, key=lambda i: -at_stake_s[i])
    single = [i for i in ordered if at_stake_s[i] >= least_s][: most - 1]
    rest = tuple(ordered[len(single) :])
    return [(i,) for i in single] + ([rest] if rest else [])


@dataclasses.dataclass(frozen=True)
class AblationResult:
    """The relative slowdown of the whole function without a group of kernels, with its confidence interval.

    Attributes:
      added: Whether the group is one kernel that ties with XLA when timed alone. It is kept only if the whole interval
        is above zero; other groups need a positive median.
    """

    group: tuple[int, ...]
    margin: Margin
    added: bool = False

    @property
    def helps(self) -> bool:
        return (self.margin.low if self.added else self.margin.middle) > 0

    def __str__(self) -> str:
        others = f" and {len(self.group) - 1} others" if len(self.group) > 1 else ""
        direction, sign = ("slower", 1) if self.margin.middle > 0 else ("faster", -1)
        low, high = sorted((100 * sign * self.margin.low, 100 * sign * self.margin.high))
        share, interval = 100 * abs(self.margin.middle), f"{low:.1f} to {high:.1f} %"
        return f"the function is {share:.1f} % {direction} without it{others} (99 % confidence: {interval})"


def ablate(
    whole: CompiledFunction,
    everything: Run,
    xla: Run,
    of: Sequence[tuple[int, ...]],
    without: Callable[[tuple[int, ...]], Plan],
    added: Mapping[int, Run],
) -> list[AblationResult]:
    """Measures each group by leave-one-out: all kernels, against all kernels except that group, which XLA computes.

    Args:
      everything, xla: The function with all kernels, and with none.
      without: Returns the plan that leaves a group to XLA and uses all other kernels.
      added: The function with all kernels and one tied kernel, by the index of the tied kernel.
    """
    others = [xla] if len(of) == 1 else [whole.under(without(group)) for group in of]
    runs = (
        {"": everything} | {f"-{i}": run for i, run in enumerate(others)} | {f"+{i}": run for i, run in added.items()}
    )
    times = whole.time(runs, at_least_rounds=ROUNDS)
    found = [AblationResult(group, interleaved.margin_of(times[""], times[f"-{i}"])) for i, group in enumerate(of)]
    return found + [AblationResult((i,), interleaved.margin_of(times[f"+{i}"], times[""]), added=True) for i in added]


@dataclasses.dataclass(frozen=True)
class Reference:
    """The function with XLA only, and its results.

    Attributes:
      noisy: Computes the results with rounding noise, for a seed.
    """

    run: Run
    expected: Any
    noisy: Callable[[int], Any]

    def disagreement(self, actual: Any) -> str | None:
        """Describes where `actual` differs from the reference by more than rounding; None if it does not."""
        return comparison.disagreement(self.expected, actual, self.noisy)


def failure(compiled: Callable[[T], Run], variant: T, reference: Reference) -> tuple[Run | None, str]:
    """Returns ``compiled(variant)``, or None and the reason: it fails to compile or run, or its results disagree."""
    try:
        run = compiled(variant)
        actual = jax.block_until_ready(run())
    except Exception as error:  # any error of a kernel, compiler or device: XLA's version already ran
        message = str(error).partition("\n")[0]
        return None, f"{type(error).__name__}: {message}"
    wrong = reference.disagreement(actual)
    return (run, "") if wrong is None else (None, wrong)


# ------------------------------------------------------------------------------
# Lowers a function with selected kernels in place of its equations, and lists the replacements.


@dataclasses.dataclass(frozen=True)
class Replaced:
    """A kernel that replaces equations.

    Attributes:
      problem: The problem of the call, or of one device's part of it.
      reason: Why this schedule was selected.
      line: The lines of the user's code whose equations it replaces as regions; "" for single equations.
      times: How often one call of the function runs it.
      keys: Those of its replacements, which leave it out if they are refused (`lower_with_kernels`).
      alone: The times of this schedule and of XLA alone, per run; None if neither a record nor the model selected it.
    """

    operation: str
    problem: Problem
    backend: str
    schedule: str
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
        by = f"{',' if self.times > 1 else ''} by {self.backend} {self.schedule}"
        return f"{self.name}{by} ({self.reason}){at}"


def _grouped(replaced: Iterable[Replaced]) -> tuple[Replaced, ...]:
    """Returns each kernel once, with the lines of all regions that it replaces, and how often it runs in all."""
    groups: dict[Replaced, list[Replaced]] = {}
    for each in replaced:
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
      left: What is left to XLA and why, as "operation: reason" -> number of kinds of such equations.
      changes: Other changes, which need no kernel, as text.
      refused: The keys of replacements that are not made, because they disagree or were refused -> the reason.
    """

    lowered: Any
    replaced: tuple[Replaced, ...]
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
    compared: bool = True,
) -> Lowered:
    """Lowers the result of a `jax.jit` trace, replacing regions and equations for which a kernel is selected.

    If XLA or a vendor's library is selected for a single equation, JAX's own equation is kept unchanged, so that XLA
    fuses it as usual. A region is also replaced by a vendor's library, which JAX's equations do not reach.

    Args:
      options: Operation name -> options for selecting its kernel.
      platforms: Platforms to lower for. None uses the platform of the arguments.
      regions_on: The platform of this process on which regions are compared and replaced, and other changes are
        made. None changes nothing but single equations.
      partitioned: The problems of one device. None leaves everything that XLA partitions to it.
      refuses: Returns why a replacement is not made, by its key (`Replaced.keys`, `OTHER_CHANGES`), or None.
      in_place: Compares each tuned call with the equations that it would replace, which stay.
      compared: Whether regions are compared on random operands first.

    Raises:
      CacheMiss: There is no record and the policy is "error".
    """
    selection, on_one_device = Selection(options, partitioned), Selection(options)
    regions = list[Replaced]()
    products: dict[Replaced, dict[Any, int]] = collections.defaultdict(dict)
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
            compared=compared,
        )
        traced = lowering_compat.with_jaxpr(traced, rewritten.jaxpr)
        left.update(rewritten.left)
        changes = rewritten.changes
        refused |= rewritten.refused
        regions = list(_replacements(rewritten, selection, regions_on))
    primitives = equations.operations_by_primitive().keys()
    around = equations.layouts_around(traced.jaxpr, primitives)
    times = equations.counts(traced.jaxpr, primitives)

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
        if (reason := refuses(key)) is not None:
            refused[key] = reason
            left[f"{operation.name}: {problem}: {reason}"] += 1
            return None
        for local, local_found in selected:
            products[_replaced(operation, local, local_found, key)][kind] = times.get(kind, 1)
        if in_place is None or "preferred_element_type" not in params:  # cuDNN computes nothing in float32
            return by_tuned_call(operation, matched, options[operation.name])
        placed = functools.partial(selection.placed, operation, problem)
        run = by_tuned_call(operation, matched, options[operation.name], placed)
        return functools.partial(in_place.product, key, problem, run, primitive, params)

    answers = {primitive: functools.partial(answer, primitive) for primitive in equations.operations_by_primitive()}
    lowered = lowering_compat.lower(traced, answers, untouched=(tuned_call_p, observe_p), platforms=platforms)
    replaced = regions + [dataclasses.replace(x, times=sum(each.values())) for x, each in products.items()]
    return Lowered(lowered, _grouped(replaced), dict(left), changes, refused)


def _replacements(rewritten: Rewritten, selection: Selection, platform: str) -> Iterator[Replaced]:
    for each in rewritten.replaced:
        for operation, problem in each.calls:
            for local, found in selection.of(operation, problem, platform):
                replaced = _replaced(operation, local, found, each.key)
                yield dataclasses.replace(replaced, line=each.source, times=each.count)


def _replaced(operation: Operation[Any], problem: Problem, found: Decision, key: str) -> Replaced:
    schedule, backend = schedule_text(dataclasses.asdict(found.schedule)), found.kernel.backend
    return Replaced(operation.name, problem, backend, schedule, found.reason, keys=(key,), alone=found.times)
