"""Tries one call of a function with and without tuned kernels: compiles, compares, times, and keeps one version."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from scheduler.core import hardware, text
from scheduler.core.errors import SchedulerError
from scheduler.core.hardware import CPU
from scheduler.core.plan import Plan
from scheduler.core.status_line import StatusLine
from scheduler.dispatch.dispatch import OnMiss, Options
from scheduler.rewriting import comparison, decided, interleaved, lowering, noise, selection, stored_decisions
from scheduler.rewriting.call_arguments import CallArguments
from scheduler.rewriting.decided import Decided
from scheduler.rewriting.in_place import InPlace
from scheduler.rewriting.interleaved import Seconds
from scheduler.rewriting.lowering import Lowered, Replaced
from scheduler.rewriting.rewrite import OTHER_CHANGES, Refuses
from scheduler.search.runoff import Margin
from search_spaces import lowering_compat
from search_spaces.checking import without_autotuning
from search_spaces.configuration import comparisons

# The policies for a version without some kernels. Products within a region that is left out may have no record: they
# stay with XLA, too, so nothing is searched for them, and no miss is an error.
_WITHOUT_SEARCH: Mapping[OnMiss, OnMiss] = {"tune": "model", "error": "xla"}


@dataclasses.dataclass(frozen=True)
class FunctionTrial:
    """A jitted function and the arguments to try it with.

    Attributes:
      seconds: Maximum time of each timing, of which there are up to three. None keeps the tuned version without timing
        if its results agree.
      status: Shows what the decision waits for.
    """

    function: str
    jitted: Any
    given: CallArguments
    options: Mapping[str, Options]
    seconds: float | None
    status: StatusLine = dataclasses.field(default_factory=StatusLine)

    @comparisons()
    def decide(self) -> Decided:
        """Decides which version to keep.

        Raises:
          CacheMiss: A matmul or attention call has no record and the policy is "error".
          SchedulerError: The call is part of a trace.
          Exception: Any error raised while tracing the function.
        """
        if isinstance(jnp.zeros(()), jax.core.Tracer):
            raise SchedulerError(
                "an optimized function was called while JAX traces another one: optimize the outer function"
            )
        with self.status.shown(f"optimize({self.function})"):
            return self._decide()

    def _decide(self) -> Decided:
        self.status.step("tracing")
        traced = self._traced
        if self._plan is None and jax.process_count() > 1:
            return self._decision(decided.SEVERAL_PROCESSES)
        if effects := getattr(traced.jaxpr, "effects", ()):
            kinds = ", ".join(sorted({type(effect).__name__ for effect in effects}))
            return self._decision(
                f"{decided.XLA_IS_USED}: the function has side effects ({kinds}), which would occur several times if "
                "both versions were tried"
            )
        try:
            self.status.step("selecting kernels")
            if self._plan is not None:
                return self._by_plan(self._planned(self._plan))
            named = any(each.backends is not None for each in self.options.values())
            if not named and self._devices()[0].platform == CPU.platform:  # only a record can name a kernel
                lowered = lowering.lower_with_kernels(traced, self.options)
                if not lowered.replaced:
                    left = {decided.LEFT_ON_A_CPU: sum(lowered.left.values())} if lowered.left else {}
                    return self._decision(decided.NONE_ON_A_CPU, dataclasses.replace(lowered, left=left))
            if (found := self._recalled()) is not None:
                return found
            lowered, compiled, noisy = self._compiled()
            if compiled is None:
                return self._stored(lowered, self._decision(decided.NOTHING_REPLACED, lowered))
            return self._try_both(Version(lowered, compiled, functools.partial(self._run, compiled)), noisy)
        except SchedulerError:
            raise
        except Exception as error:  # falls back to XLA's version, which raises any error of its own
            return self._fall_back(f"trying the tuned version failed: {text.error_text(error)}")

    @comparisons()
    def lower(self) -> Any:
        """Lowers the version with all kernels, or with those of the plan (`jax.stages.Lowered`)."""
        if self._plan is not None:
            return self._planned(self._plan).lowered
        return lowering.lower_with_kernels(options=self.options, **self._where).lowered

    @property
    def _plan(self) -> Plan | None:
        force = next(iter(self.options.values())).plan
        return None if force is None else force.plan

    def _planned(self, plan: Plan) -> Lowered:
        """Lowers the version with the kernels and changes of a plan, which was compared and timed when it was made."""
        unplanned = {} if plan.changes else {OTHER_CHANGES: "the plan makes none"}
        return self._lowered_without(unplanned.get)

    def _by_plan(self, lowered: Lowered) -> Decided:
        if not lowered.replaced and not lowered.changes:
            return self._decision(decided.NOT_PLANNED, lowered)
        self.status.step("compiling the version of the plan")
        return self._uses(decided.PLANNED, lowered, lowered.lowered.compile())

    @functools.cached_property
    def _traced(self) -> Any:
        return self.jitted.trace(*self.given.args, **self.given.kwargs)

    @functools.cached_property
    def _key(self) -> str:
        """The key of the stored decision."""
        return stored_decisions.key_of(
            self._traced.lower(), self.options.values(), self._devices(), self.seconds is None
        )

    @functools.cached_property
    def _where(self) -> Mapping[str, Any]:
        """What is lowered and where it runs, as arguments of `lowering.lower_with_kernels`."""
        return selection.where(self._traced, hardware.target_of(self._devices()[0]).platform)

    @functools.cached_property
    def _donated(self) -> list[bool]:
        """Whether the call donates each leaf of the arguments."""
        return [leaf.donated for leaf in jax.tree.leaves(self._traced.args_info)]

    def _devices(self) -> list[jax.Device]:
        return self.given.devices() or jax.local_devices()[:1]

    def _run(self, compiled: Any) -> Any:
        """Calls a compiled version with copies of donated arguments."""
        return self.given.copied(self._donated).call(compiled)

    def _run_plain(self) -> Any:
        given = self.given.copied(self._donated)
        return self.jitted(*given.args, **given.kwargs)

    def _recalled(self) -> Decided | None:
        """Returns the decision of an earlier process, for which only the version that is used is compiled.

        Returns None if there is no such decision, or if its version cannot be compiled in this process.
        """
        if (known := stored_decisions.find(self._key)) is None:
            return None
        self.status.step("compiling the version that is used")
        compiled = None
        try:
            if known.kept == "tuned" and known.module:
                known.load_kernels()
                compiled = lowering_compat.with_module(self._traced.lower(), known.program()).compile()
            elif known.kept == "tuned":
                compiled = self._lowered_without(known.refused.get).lowered.compile()
        except Exception:  # whatever fails is left out when the function is decided again
            return None
        reason = f"{known.reason} (decided on {known.date})"
        return self._decided(reason, compiled, **known.shown)

    def _lowered_without(self, refuses: Refuses) -> Lowered:
        """Lowers the version without what is refused. Nothing is compared or searched."""
        options = {
            name: dataclasses.replace(each, on_miss=_WITHOUT_SEARCH.get(each.on_miss, each.on_miss))
            for name, each in self.options.items()
        }
        return lowering.lower_with_kernels(options=options, **self._where, refuses=refuses)

    def _compiled(self) -> tuple[Lowered, Any, Any]:
        """Lowers and compiles the tuned version, without the kernels that disagree with their equations.

        Returns:
          The lowered and the compiled version, and the plain version with rounding noise, which takes a seed and the
          leaves of the arguments. None stands for both if nothing is replaced or changed.
        """
        traced, refused = self._traced, dict[str, str]()
        options = without_autotuning(jax.default_backend())
        lower = functools.partial(lowering.lower_with_kernels, options=self.options, **self._where)
        noisy, in_place = None, None
        # XLA compiles without the interpreter's lock, on several cores each. Some are left for what is lowered here.
        with concurrent.futures.ThreadPoolExecutor(max(2, (os.cpu_count() or 1) // 2)) as beside:
            while True:
                in_place = InPlace(lowering_compat.device_count(traced.lower()), in_place)
                observed = lower(refuses=refused.get, in_place=in_place)
                if not observed.replaced and not observed.changes:
                    return observed, None, None
                if noisy is None:
                    beside.submit(traced.lower().compile)  # JAX finds this program when the plain version is called
                    products = comparison.products_rounding(each.problem for each in observed.replaced)
                    noisy_version = jax.jit(
                        noise.with_noise(self._where["traced"].jaxpr, products), compiler_options=options
                    )
                    noisy = beside.submit(noisy_version.lower(noise.keys(0), *self.given.leaves).compile)
                    comparison.compile_errors(jax.tree.leaves(traced.out_info), beside)
                observed_version = beside.submit(observed.lowered.compile, compiler_options=options)
                failed = None
                try:
                    lowered = lower(refuses=refused.get)
                    compiled = beside.submit(lowered.lowered.compile)
                except Exception as error:  # if one kernel fails, its comparison does, too
                    failed = error
                in_place.compile(beside)
                self.status.step("comparing each kernel with its equations")
                if wrong := in_place.on_random_operands():
                    unexpected = {key: reason for key, reason in wrong.items() if in_place.is_unexpected(key, reason)}
                    self._warn_of(unexpected, observed)
                elif failed is not None:
                    raise failed
                else:
                    if in_place:
                        observed_program = observed_version.result()
                        in_place.reserve(self._devices()[0], functools.partial(decided.peak_bytes, observed_program))
                        jax.block_until_ready(self._run(observed_program))
                    wrong = in_place.refusals()
                    self._warn_of(wrong, observed)
                if not wrong:
                    self.status.step("compiling the tuned version")
                    return lowered, compiled.result(), noisy.result()
                refused |= wrong
                self.status.step("selecting kernels")

    def _try_both(self, everything: Version, noisy: Any) -> Decided:
        def with_noise(seed: int) -> Any:
            return noisy(noise.keys(seed), *self.given.leaves)

        self.status.step("comparing the results of both versions")
        lowered, compiled, traced = everything.lowered, everything.compiled, self._traced
        expected = jax.block_until_ready(self._run_plain())
        if wrong := comparison.disagreement(expected, everything.run(), with_noise):
            reason = f"the tuned version computed different results: {wrong}"
            return self._stored(lowered, self._fall_back(reason, lowered))
        del expected
        measured: dict[str, Any] = {
            "plain_bytes": decided.peak_bytes(traced.lower().compile()),
            "tuned_bytes": everything.peak_bytes,
        }
        if "partitioned" in self._where:
            measured |= {
                "plain_exchanged": decided.exchanged_bytes(traced.lower().compile()),
                "tuned_exchanged": decided.exchanged_bytes(compiled),
            }
        if self.seconds is None:
            return self._stored(lowered, self._uses(decided.UNTIMED, lowered, compiled, **measured))
        kept = self._fastest(everything, with_noise)
        lowered, compiled = kept.version.lowered, kept.version.compiled
        measured |= {"plain": kept.plain, "tuned": kept.tuned, "tuned_bytes": kept.version.peak_bytes}
        measured["groups"] = kept.groups
        speed = interleaved.speed_text(kept.tuned, kept.plain)
        if kept.is_faster:
            return self._stored(lowered, self._uses(speed, lowered, compiled, **measured))
        tried = decided.used_text(lowered.replaced, lowered.changes)
        reason = f"{decided.XLA_IS_USED}: no sure gain (the version with {tried} is {speed})"
        return self._stored(lowered, self._decision(reason, lowered, **measured))

    def _stored(self, lowered: Lowered, decision: Decided) -> Decided:
        """Stores a decision for later processes and returns it."""
        stored_decisions.put(self._key, lowered, self._traced.lower(), decision)
        return decision

    def _fastest(self, everything: Version, with_noise: Callable[[int], Any]) -> Kept:
        """Returns the fastest version with kernels: `everything`, or one without groups of its kernels.

        Groups are timed only if `everything` gains less than predicted. A group is dropped if the function is faster
        without it at 99 % confidence, or if it ties and needs no less memory. At most `MOST_GROUPS` + 1 versions are
        compiled. The results of each are compared with those of the plain function.
        """
        self.status.step("timing both versions")
        times = self._times({ALL: everything})
        tested = {f"without {group}": group for group in groups(everything.lowered)}
        if len(tested) < 2 or gains_as_predicted(times[ALL], times[PLAIN], everything.lowered.replaced):
            return Kept(everything, times[ALL], times[PLAIN])
        self.status.step("compiling without each group of kernels")
        versions, verdicts = self._usable(everything, with_noise, {label: [group] for label, group in tested.items()})
        self.status.step("timing without each group of kernels")
        versions = {ALL: everything, **versions}
        times = self._times(versions, at_least_rounds=ROUNDS)
        dropped = list[str]()
        for label in (label for label in tested if label in versions):
            margin = interleaved.margin_of(times[ALL], times[label])
            sizes = everything.peak_bytes, versions[label].peak_bytes
            verdicts[label] = f"{_without_it(margin)}{decided.share_text(*sizes, 'memory')}"
            is_tie = margin.low <= 0 <= margin.high
            if margin.high < 0 or (is_tie and decided.share_percent(*sizes) <= 0):
                dropped.append(label)
        preferred = {0: ALL, 1: "".join(dropped)}.get(len(dropped), REST)
        if 1 < len(dropped) < len(tested):
            self.status.step("compiling without the dropped groups")
            rest, _ = self._usable(everything, with_noise, {REST: [tested[label] for label in dropped]})
            if rest:
                self.status.step("timing without the dropped groups")
                best = min(versions, key=lambda label: times[label].median_s)
                versions = {best: versions[best], **rest}
                times = self._times(versions)
        chosen = _chosen(times, versions, preferred)
        kept = Kept(versions[chosen], times[chosen], times[PLAIN])
        refused = kept.version.lowered.refused
        texts = []
        for label, group in tested.items():
            used = kept.is_faster and refused.keys().isdisjoint(group.keys)
            texts.append(f"{group}: {verdicts[label]}, {'kept' if used else 'left to XLA'}")
        return dataclasses.replace(kept, groups=tuple(texts))

    def _times(self, versions: Mapping[str, Version], **how: int) -> Mapping[str, Seconds]:
        """Returns the seconds per call of the plain function and these versions, from the same rounds."""
        assert self.seconds is not None
        runs = {PLAIN: self._run_plain, **{label: version.run for label, version in versions.items()}}
        return interleaved.time_interleaved(runs, seconds=self.seconds, devices=self.given.devices(), **how)

    def _usable(
        self, everything: Version, with_noise: Callable[[int], Any], without: Mapping[str, Sequence[Group]]
    ) -> tuple[dict[str, Version], dict[str, str]]:
        """Compiles a version without these groups for each label.

        Returns:
          The versions that can be used, and the reasons why others cannot.
        """
        lowered, compiled = dict[str, Lowered](), dict[str, concurrent.futures.Future[Any]]()
        with concurrent.futures.ThreadPoolExecutor() as beside:  # XLA compiles without the interpreter's lock
            for label, left_out in without.items():
                lowered[label] = self._without(everything, left_out)
                compiled[label] = beside.submit(lowered[label].lowered.compile)
        expected = jax.block_until_ready(self._run_plain())
        versions, reasons = dict[str, Version](), dict[str, str]()
        for label, future in compiled.items():
            try:
                version = Version(lowered[label], future.result(), functools.partial(self._run, future.result()))
                why = comparison.disagreement(expected, jax.block_until_ready(version.run()), with_noise)
            except Exception as error:  # any error of a kernel, compiler or device: XLA's version already ran
                why = text.error_text(error)
            if why is None:
                versions[label] = version
            else:
                reasons[label] = f"the function cannot be used without it: {why}"
        return versions, reasons

    def _without(self, everything: Version, left_out: Iterable[Group]) -> Lowered:
        """Lowers the function without groups, and without kernels that only what they replace would make possible."""
        known = {OTHER_CHANGES, *(key for each in everything.lowered.replaced for key in each.keys)}
        refused = {**everything.lowered.refused, **{key: DROPPED for group in left_out for key in group.keys}}
        return self._lowered_without(lambda key: refused.get(key) or (None if key in known else WITHIN_DROPPED))

    def _decision(self, reason: str, lowered: Lowered | None = None, compiled: Any = None, **measured: Any) -> Decided:
        if lowered is not None:
            measured |= {name: getattr(lowered, name) for name in ("replaced", "dropped", "left", "changes")}
        return self._decided(reason, compiled, **measured)

    def _decided(self, reason: str, compiled: Any, **shown: Any) -> Decided:
        return Decided(self.function, self.given.text(), compiled, reason, device=self._devices()[0], **shown)

    def _uses(self, gain: str, lowered: Lowered, compiled: Any, **measured: Any) -> Decided:
        used = decided.used_text(lowered.replaced, lowered.changes)
        for name, what in {"bytes": "memory", "exchanged": "traffic between devices"}.items():
            gain += decided.share_text(measured.get(f"plain_{name}"), measured.get(f"tuned_{name}"), what)
        return self._decision(f"uses {used}: {gain}", lowered, compiled, **measured)

    def _fall_back(self, reason: str, lowered: Lowered | None = None) -> Decided:
        reason = f"{decided.XLA_IS_USED}: {reason}"
        self._warn(reason)
        return self._decision(reason, lowered)

    def _warn_of(self, wrong: Mapping[str, str], lowered: Lowered) -> None:
        for key, reason in wrong.items():
            kernels = " and ".join(each.name for each in lowered.replaced if key in each.keys)
            self._warn(f"a kernel is not used: {kernels}: {reason}")

    def _warn(self, message: str) -> None:
        self.status.erase()
        text.warn_safely(f"{self.function}: {message}")


# ------------------------------------------------------------------------------
# Groups of kernels: a function is also tried without each, and keeps those without which it is slower.

# Maximum number of groups, each of which costs a compilation.
MOST_GROUPS = 4
# Rounds of the comparison without each group. Many rounds keep the confidence interval of each group narrow.
ROUNDS = 12
# Groups are timed if all kernels together gain less than this share of the predicted gain.
AS_PREDICTED = 0.9
# Why replacements are not made, as reports have it.
DROPPED = "the function is not slower without it"
WITHIN_DROPPED = "it computes a part of equations that are left to XLA"
# Labels of versions in rounds of timing.
PLAIN, ALL, REST = "plain", "tuned", "rest"


@dataclasses.dataclass(frozen=True)
class Version:
    """A compiled version of a function with kernels. `run` calls it with copies of the donated arguments."""

    lowered: Lowered
    compiled: Any
    run: Callable[[], Any]

    @functools.cached_property
    def peak_bytes(self) -> int | None:
        return decided.peak_bytes(self.compiled)


@dataclasses.dataclass(frozen=True)
class Kept:
    """The fastest version.

    Attributes:
      tuned, plain: Its seconds per call and those of the plain function, from the same rounds.
      groups: What was timed without a group of kernels, as text.
    """

    version: Version
    tuned: Seconds
    plain: Seconds
    groups: tuple[str, ...] = ()

    @property
    def is_faster(self) -> bool:
        return interleaved.is_faster(self.tuned, self.plain)


@dataclasses.dataclass(frozen=True)
class Group:
    """Kernels, or the changes without a kernel, that are left out together.

    Attributes:
      keys: What leaves them out (`lowering.lower_with_kernels`).
      texts: Each of them as text.
      xla_s: Seconds per call of the function that XLA takes for what they replace, by times alone; 0 if unknown.
    """

    keys: frozenset[str]
    texts: tuple[str, ...]
    xla_s: float

    def __str__(self) -> str:
        return "; ".join(self.texts)


def predicted_gain_s(replaced: Iterable[Replaced]) -> float:
    """Returns the seconds per call of a function that its kernels save by their times alone.

    A kernel counts the time of XLA minus its own, by the record or the model that selected it, as often as it runs. A
    kernel without such times counts nothing.
    """
    return sum(each.times * (each.alone.library_s - each.alone.kernel_s) for each in replaced if each.alone)


def gains_as_predicted(tuned: Seconds, plain: Seconds, replaced: Iterable[Replaced]) -> bool:
    """Returns whether the version with these kernels is faster, by at least `AS_PREDICTED` of the predicted gain."""
    gain_s = plain.median_s - tuned.median_s
    return interleaved.is_faster(tuned, plain) and gain_s >= AS_PREDICTED * predicted_gain_s(replaced)


def groups(lowered: Lowered) -> list[Group]:
    """Returns the groups to time: those for which XLA takes longest alone, and the rest as the last one.

    A kernel with its problem and schedule is a group, wherever it runs. Kernels of one region, such as attention and
    its backward pass, are one group. All changes without a kernel are another one.
    """
    kinds = list[Group]()
    for each in lowered.replaced:
        group = Group(frozenset(each.keys), (each.name,), each.times * each.alone.library_s if each.alone else 0.0)
        shared = [kind for kind in kinds if kind.keys & group.keys]
        kinds = [kind for kind in kinds if kind not in shared] + [_union([*shared, group])]
    if lowered.changes:
        kinds.append(Group(frozenset({OTHER_CHANGES}), lowered.changes, 0.0))
    kinds.sort(key=lambda kind: -kind.xla_s)
    single, rest = kinds[: MOST_GROUPS - 1], kinds[MOST_GROUPS - 1 :]
    return single + ([_union(rest)] if rest else [])


def _union(of: Sequence[Group]) -> Group:
    keys = frozenset(key for each in of for key in each.keys)
    return Group(keys, tuple(text for each in of for text in each.texts), sum(each.xla_s for each in of))


def _without_it(margin: Margin) -> str:
    """Returns by what share the function is slower without a group of kernels, with the confidence interval."""
    direction, sign = ("slower", 1) if margin.middle > 0 else ("faster", -1)
    low, high = sorted((100 * sign * margin.low, 100 * sign * margin.high))
    share = 100 * abs(margin.middle)
    return f"the function is {share:.1f} % {direction} without it (99 % confidence: {low:.1f} to {high:.1f} %)"


def _chosen(times: Mapping[str, Seconds], versions: Iterable[str], preferred: str) -> str:
    """Returns the fastest version that is faster than the plain function, or the fastest if none is.

    The preferred one is returned if it is faster than the plain function, and no other one is faster than it.
    """
    faster = [label for label in versions if interleaved.is_faster(times[label], times[PLAIN])]
    fastest = min(faster or versions, key=lambda label: times[label].median_s)
    if preferred in faster and not interleaved.is_faster(times[fastest], times[preferred]):
        return preferred
    return fastest
