"""Tries one call of a function with and without tuned kernels: compiles, compares, times, and keeps one version."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import os
from collections.abc import Mapping
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
from scheduler.rewriting.call_arguments import Arguments
from scheduler.rewriting.collectives import exchanged_bytes
from scheduler.rewriting.decided import Decided
from scheduler.rewriting.in_place import InPlace
from scheduler.rewriting.keeping import Keeping, Run, Version
from scheduler.rewriting.lowering import Lowered
from scheduler.rewriting.rewrite import OTHER_CHANGES, Refuses
from search_spaces import lowering_compat
from search_spaces.checking import without_autotuning
from search_spaces.configuration import comparisons

# The policies for a version without some kernels. Products within a region that is left out may have no record: they
# stay with XLA, too, so nothing is searched for them, and no miss is an error.
_WITHOUT_SEARCH: Mapping[OnMiss, OnMiss] = {"tune": "model", "error": "xla"}


@dataclasses.dataclass(frozen=True)
class Trial:
    """A jitted function and the arguments to try it with.

    Attributes:
      seconds: Maximum time of each timing, of which there are up to three. None keeps the tuned version without timing
        if its results agree.
      status: Shows what the decision waits for.
    """

    function: str
    jitted: Any
    given: Arguments
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
        traced = self.jitted.trace(*self.given.args, **self.given.kwargs)
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
            if self._on_a_cpu_by_default():
                lowered = lowering.lower_with_kernels(traced, self.options)
                if not lowered.replaced:
                    left = {decided.LEFT_ON_A_CPU: sum(lowered.left.values())} if lowered.left else {}
                    return self._decision(decided.NONE_ON_A_CPU, dataclasses.replace(lowered, left=left))
            key = self._key(traced)
            if (found := self._recalled(key, traced)) is not None:
                return found
            lowered, compiled, noisy = self._compiled(traced)
            if compiled is None:
                return self._stored(key, traced, lowered, self._decision(decided.NOTHING_REPLACED, lowered))
            return self._try_both(key, lowered, compiled, noisy, traced)
        except SchedulerError:
            raise
        except Exception as error:  # falls back to XLA's version, which raises any error of its own
            cause = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            return self._fall_back(f"trying the tuned version failed: {cause}")

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

    def _on_a_cpu_by_default(self) -> bool:
        """Returns whether only a record can name a kernel: on a CPU, without backends."""
        named = any(each.backends is not None for each in self.options.values())
        return not named and self._devices()[0].platform == CPU.platform

    @functools.cached_property
    def _where(self) -> Mapping[str, Any]:
        """What is lowered and where it runs, as arguments of `lowering.lower_with_kernels`."""
        traced = self.jitted.trace(*self.given.args, **self.given.kwargs)
        return selection.where(traced, hardware.target_of(self._devices()[0]).platform)

    def _devices(self) -> list[jax.Device]:
        return self.given.devices() or jax.local_devices()[:1]

    def _key(self, traced: Any) -> str:
        return stored_decisions.key_of(traced.lower(), self.options.values(), self._devices(), self.seconds is None)

    def _recalled(self, key: str, traced: Any) -> Decided | None:
        """Returns the decision of an earlier process, for which only the version that is used is compiled.

        Returns None if there is no such decision, or if its version cannot be compiled in this process.
        """
        if (known := stored_decisions.find(key)) is None:
            return None
        self.status.step("compiling the version that is used")
        compiled = None
        try:
            if known.kept == "tuned" and known.module:
                known.load_kernels()
                compiled = lowering_compat.with_module(traced.lower(), known.program()).compile()
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

    def _compiled(self, traced: Any) -> tuple[Lowered, Any, Any]:
        """Lowers and compiles the tuned version, without the kernels that disagree with their equations.

        Returns:
          The lowered and the compiled version, and the plain version with rounding noise, which takes a seed and the
          leaves of the arguments. None stands for both if nothing is replaced or changed.
        """
        refused = dict[str, str]()
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
                        jax.block_until_ready(self.given.copied(_donated(traced)).call(observed_program))
                    wrong = in_place.refusals()
                    self._warn_of(wrong, observed)
                if not wrong:
                    self.status.step("compiling the tuned version")
                    return lowered, compiled.result(), noisy.result()
                refused |= wrong
                self.status.step("selecting kernels")

    def _try_both(self, key: str, lowered: Lowered, compiled: Any, noisy: Any, traced: Any) -> Decided:
        donated = _donated(traced)

        def plain() -> Any:
            return self._plain(self.given.copied(donated))

        def calling(version: Any) -> Run:
            return lambda: self.given.copied(donated).call(version)

        def with_noise(seed: int) -> Any:
            return noisy(noise.keys(seed), *self.given.leaves)

        self.status.step("comparing the results of both versions")
        everything = Version(lowered, compiled, calling(compiled))
        expected = jax.block_until_ready(plain())
        if wrong := comparison.disagreement(expected, everything.run(), with_noise):
            reason = f"the tuned version computed different results: {wrong}"
            return self._stored(key, traced, lowered, self._fall_back(reason, lowered))
        del expected
        measured: dict[str, Any] = {
            "plain_bytes": decided.peak_bytes(traced.lower().compile()),
            "tuned_bytes": everything.peak_bytes,
        }
        if "partitioned" in self._where:
            measured |= {
                "plain_exchanged": exchanged_bytes(traced.lower().compile()),
                "tuned_exchanged": exchanged_bytes(compiled),
            }
        if self.seconds is None:
            return self._stored(key, traced, lowered, self._uses(decided.UNTIMED, lowered, compiled, **measured))
        time = functools.partial(interleaved.time_interleaved, seconds=self.seconds, devices=self.given.devices())
        kept = Keeping(plain, with_noise, self._lowered_without, calling, time, self.status.step).fastest(everything)
        lowered, compiled = kept.version.lowered, kept.version.compiled
        measured |= {"plain": kept.plain, "tuned": kept.tuned, "tuned_bytes": kept.version.peak_bytes}
        measured["groups"] = kept.groups
        speed = interleaved.speed_text(kept.tuned, kept.plain)
        if kept.is_faster:
            return self._stored(key, traced, lowered, self._uses(speed, lowered, compiled, **measured))
        tried = decided.used_text(lowered.replaced, lowered.changes)
        reason = f"{decided.XLA_IS_USED}: no sure gain (the version with {tried} is {speed})"
        return self._stored(key, traced, lowered, self._decision(reason, lowered, **measured))

    def _stored(self, key: str, traced: Any, lowered: Lowered, decision: Decided) -> Decided:
        """Stores a decision for later processes and returns it."""
        stored_decisions.put(key, lowered, traced.lower(), decision)
        return decision

    def _plain(self, given: Arguments) -> Any:
        return self.jitted(*given.args, **given.kwargs)

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


def _donated(traced: Any) -> list[bool]:
    """Returns for each leaf of the arguments whether the call donates it."""
    return [leaf.donated for leaf in jax.tree.leaves(traced.args_info)]
