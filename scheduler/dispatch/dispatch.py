"""Selects the schedule for a call: explicit, cached, stored, predicted or tuned now."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import typing
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax

from scheduler.core import arguments, hints
from scheduler.core import hardware as chips
from scheduler.core.arguments import named_backends
from scheduler.core.errors import (
    CacheMiss,
    IllegalSchedule,
    NoCandidate,
    SchedulerError,
    TakesHours,
    UnknownChip,
    WorkerError,
)
from scheduler.core.fingerprints import Changed
from scheduler.core.hardware import Hardware
from scheduler.core.interrupts import in_fresh_thread
from scheduler.core.records import Key, Schedule, key_of, schedule_text
from scheduler.core.text import log, log_once, warn_once
from scheduler.dispatch import planned
from scheduler.dispatch.planned import InForce
from scheduler.dispatch.several_processes import require_one_code
from scheduler.dispatch.stored import Times, evidence, note_miss, stored, times_in
from scheduler.model import constants
from scheduler.model.pruning import has_fields, illegal
from scheduler.prediction.transfer import recheck
from scheduler.store.cache import Cache
from search_spaces import stop_script_import
from search_spaces.kernel import Kernel, Library
from search_spaces.operation import Operation
from search_spaces.problem import Problem
from search_spaces.space import Choice, as_choice
from search_spaces.target import Target

OnMiss = Literal["model", "tune", "xla", "error"]
ON_MISS: tuple[OnMiss, ...] = typing.get_args(OnMiss)
ENVIRONMENT = "TILE_SCHEDULER_ON_MISS"
MOST_DECISIONS = 4096
# Why no kernel can be selected on a mesh if the call is not divided into one part per device.
ON_A_MESH = "it is sharded over the devices of a mesh (kernels are selected inside `jax.shard_map`)"


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a call.

    Attributes:
      on_miss: the policy for a cache miss.
      backends: the allowed backends; None allows all.
      schedule: field -> value of a schedule that overrides the stores, or None.
      target: the driver's name of the chip to select for; "" means the chip that runs the call.
      plan: the plan that replaces stores and model, or None.
      generation: incremented when decisions are dropped, so that JAX traces and lowers again.
      loss_per_gain: maximum ratio of expected loss to expected gain for the model to select a kernel; None means the
        model's default.
      divided: whether the call is one device's shard, lowered while XLA compiles. Nothing can be measured then.
      excluded: the backends that the rules of an operation without kernels may not call; None follows `backends`.
    """

    on_miss: OnMiss = "model"
    backends: frozenset[str] | None = None
    schedule: tuple[tuple[str, Choice], ...] | None = None
    target: str = ""
    plan: InForce | None = None
    generation: int = 0
    loss_per_gain: float | None = None
    divided: bool = False
    excluded: frozenset[str] | None = None


@dataclasses.dataclass(frozen=True)
class Decision:
    """The selected kernel and schedule, with the reason.

    Attributes:
      missed: the key of the cache miss; None if there was none.
      times: by the record or the model; None if neither selected the kernel.
    """

    kernel: Kernel[Any, Any]
    schedule: Any
    target: Target
    reason: str
    missed: Key | None = None
    times: Times | None = None


def options(
    operation: Operation[Any],
    *,
    on_miss: str | None = None,
    backends: str | Sequence[str] | None = None,
    schedule: Any = None,
    target: str = "",
    plan: InForce | None = None,
    loss_per_gain: float | None = None,
) -> Options:
    """Returns the checked options of a call.

    Args:
      schedule: a mapping, its items, or an instance of a kernel's schedule type.

    Raises:
      ValueError: the policy or a backend is unknown, or `on_miss` is "xla" and `backends` excludes the library. For an
        unknown name, the message lists the valid ones.
      TypeError: `schedule` has another type.
    """
    if dataclasses.is_dataclass(schedule) and not isinstance(schedule, type):
        schedule = dataclasses.asdict(schedule)
    try:
        given = {} if schedule is None else {name: as_choice(value) for name, value in dict(schedule).items()}
        items = None if schedule is None else tuple(sorted(given.items()))
    except (TypeError, ValueError):
        raise TypeError(f"schedule must be a dict of fields or a schedule, found {schedule!r}") from None
    policy, allowed = _policy(on_miss), named_backends(operation, backends)
    library = operation.library.backend
    if policy == "xla" and allowed is not None and library not in allowed:
        raise ValueError(f"on_miss='xla' needs the backend {library!r}, but found {backends=}: add {library!r}")
    return Options(
        on_miss=policy,
        backends=allowed,
        schedule=items,
        target=target,
        plan=plan,
        generation=_decisions.generation + _edits.get(operation, 0),
        loss_per_gain=loss_per_gain,
    )


def _policy(on_miss: str | None) -> OnMiss:
    if on_miss is not None:
        found, name = on_miss, "on_miss"
    else:
        found, name = os.environ.get(ENVIRONMENT) or "model", ENVIRONMENT
    return arguments.checked_choice(name, found, ON_MISS)


def decide(operation: Operation[Any], problem: Problem, platform: str, options: Options) -> Decision:
    """Returns the decision for `problem` on `platform`, cached for later calls.

    Raises:
      IllegalSchedule: `options.schedule` cannot run; the message has the reason.
      CacheMiss: no valid schedule is stored and the policy is "error".
      NoCandidate: the library is excluded and no other kernel can run; the message has the reason.
      SchedulerError: the policy is "tune" in a job of several processes.
    """
    return _decisions.decide(operation, problem, platform, options)


def leave_to_library(operation: Operation[Any], options: Options, reason: str) -> None:
    """Logs that a call falls back to the library because no kernel can be selected, with the `reason`.

    Raises:
      NoCandidate: the library is not among the allowed backends.
      IllegalSchedule: the options have a schedule, which cannot run.
    """
    library = operation.library.backend
    if options.backends is not None and library not in options.backends:
        allowed = ", ".join(sorted(options.backends))
        raise NoCandidate(
            f"no kernel of {operation.name} can be selected: {reason}; only {library} can run, but the call allows "
            f"{allowed}"
        )
    if options.schedule:
        words = schedule_text(dict(options.schedule))
        raise IllegalSchedule(f"{operation.name} cannot run the schedule {words}: {reason}")
    log.debug("%s: %s is used, and no kernel is selected: %s", operation.name, library, reason)


def reload() -> None:
    """Drops all decisions, so that later calls read the stores again.

    Functions compiled with the user's own `jax.jit` keep the schedules they were compiled with.
    """
    global _decisions, _changes
    constants.forget()
    planned.forget()
    with _replacing:
        old, _decisions = _decisions, _Decisions(_decisions.generation + 1)
        _changes += 1
    old.cache.close()


def forget(operation: Operation[Any]) -> None:
    """Drops the decisions for one operation, so that later calls read the stores again."""
    global _changes
    with _replacing:
        _edits[operation] = _edits.get(operation, 0) + 1
        _changes += 1


def changes() -> int:
    """Returns how often decisions were dropped: `options` may return others for equal arguments after each change.

    Environment variables are read again after a change only. Targets and plans of a context are a part of JAX's key of
    a call.
    """
    return _changes


def user_cache() -> Cache:
    """Returns the stores that calls read since the last `reload`."""
    return _decisions.cache


class _Decisions:
    """Decisions since the last `reload`, with one lock per problem that is being decided."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.cache = Cache()
        self.decisions: dict[Any, Decision] = {}
        self.locks: dict[Any, threading.Lock] = {}
        self.guard = threading.Lock()

    def decide(self, operation: Operation[Any], problem: Problem, platform: str, options: Options) -> Decision:
        decision = self._decision(operation, problem, platform, options)
        if decision.missed is not None:
            note_miss(self.cache, operation, decision.missed)
        return decision

    def _decision(self, operation: Operation[Any], problem: Problem, platform: str, options: Options) -> Decision:
        key = (operation, problem, platform, options)
        if (known := self.decisions.get(key)) is not None:
            return known
        with self._lock((operation, problem, platform, options.target)):
            if (known := self.decisions.get(key)) is not None:
                return known
            decision = _ScheduleSelection(operation, problem, platform, options, self.cache).decide()
            chip, backend = decision.target.kind, decision.kernel.backend
            log.debug("%s %s on %s: %s is selected: %s", operation.name, problem, chip, backend, decision.reason)
            if len(self.decisions) >= MOST_DECISIONS:
                self.decisions.clear()
            self.decisions[key] = decision
            return decision

    @contextlib.contextmanager
    def _lock(self, key: Any) -> Iterator[None]:
        with self.guard:
            lock = self.locks.setdefault(key, threading.Lock())
        with lock:
            try:
                yield
            finally:  # waiting threads keep a reference to the lock, and find the decision when they acquire it
                with self.guard:
                    self.locks.pop(key, None)


@dataclasses.dataclass
class _ScheduleSelection:
    """The selection of a schedule for one call."""

    operation: Operation[Any]
    problem: Problem
    platform: str
    options: Options
    cache: Cache

    def decide(self) -> Decision:
        try:
            hardware = hardware_for(self.platform, self.options.target)
        except UnknownChip as unknown:
            reason = str(unknown)
            leave_to_library(self.operation, self.options, reason)
            log_once(f"{self.operation.name} {self.problem}: {reason}; XLA is used", logging.INFO)
            target = Target(self.platform, self.platform, "", 1)
            return Decision(self.operation.library, Library(), target, reason)
        if self.options.schedule is not None:
            return self._explicit(hardware, dict(self.options.schedule))
        if self.options.backends == frozenset({self.operation.library.backend}):
            return self._decision(hardware, self.operation.library.backend, {}, "no other backend is allowed")
        if self.options.plan is not None:
            strict, among = self.options.on_miss == "error", self.options.backends
            return self._decision(
                hardware, *planned.answer(self.options.plan, self.operation, self.problem, hardware, among, strict)
            )
        found = self._stored(hardware)
        return found if isinstance(found, Decision) else self._missed(hardware, found)

    def _explicit(self, hardware: Hardware, schedule: Schedule) -> Decision:
        allowed = [k for k in self.operation.kernels if k.backend in (self.options.backends or self.operation.backends)]
        fitting = [k for k in allowed if has_fields(k, self.problem, hardware.target, schedule)] or allowed
        reasons = {kernel: illegal(kernel, self.problem, hardware, schedule) for kernel in fitting}
        legal = [kernel for kernel in fitting if reasons[kernel] is None]
        if len(legal) == 1:
            return self._decision(hardware, legal[0].backend, schedule, "the caller's schedule")
        text = schedule_text(schedule)
        if legal:
            names = ", ".join(kernel.backend for kernel in legal)
            raise IllegalSchedule(
                f"the schedule {text} is valid for several backends ({names}): choose one with backends="
            )
        why = "; ".join(f"{kernel.backend}: {reason}" for kernel, reason in reasons.items())
        raise IllegalSchedule(f"{self._call_text(hardware)} cannot run the schedule {text}: {why}")

    def _stored(self, hardware: Hardware) -> Decision | str:
        """Returns the stored decision, or why the stored records cannot be used; "" if nothing is stored."""
        several = jax.process_count() > 1
        if several:
            require_one_code()
        among = self.options.backends
        measures = self.options.on_miss == "tune" and not (self.options.target or self.options.divided or several)
        found = stored(
            self.cache,
            self.operation,
            self.problem,
            hardware,
            backends=among,
            shared_only=several,
            estimates=not measures,
        )
        return found if isinstance(found, str) else self._decision(hardware, *found)

    def _missed(self, hardware: Hardware, invalid_reason: str) -> Decision:
        policy, key = self.options.on_miss, key_of(self.operation, self.problem, hardware)
        if policy == "error":
            note_miss(self.cache, self.operation, key)
            stop_script_import()  # the suggested command imports the script that made this call
            why = f" ({invalid_reason})" if invalid_reason else ""
            command = hints.tune(self.operation, self.problem, hardware)
            raise CacheMiss(f"no schedule for {self._call_text(hardware)}{why}; run: {command}")
        for kernel in self.operation.kernels_on(self.platform):
            kernel.require_results(self.problem, hardware.target)
        if isinstance(invalid_reason, Changed) and (policy != "tune" or self.options.target):
            command = hints.tune(self.operation, self.problem, hardware)
            warn_once(f"{self._call_text(hardware)}: {invalid_reason}; to measure it again, run: {command}")
        if policy == "xla":
            log_once(f"{self._call_text(hardware)}: no schedule is stored; XLA is used", logging.INFO)
            library, reason = self.operation.library.backend, "nothing stored, and on_miss='xla'"
            return self._decision(hardware, library, {}, reason, missed=key)
        if policy == "tune" and not self.options.target:  # the chip of an explicit target may be absent
            return self._tuned(hardware)
        return self._predicted(hardware)

    def _predicted(self, hardware: Hardware) -> Decision:
        from scheduler.prediction.predict import predict  # imported only on a cache miss

        several = jax.process_count() > 1
        found = predict(
            self.operation,
            self.problem,
            hardware,
            backends=self.options.backends,
            records=evidence(self.cache, self.operation, self.problem, hardware, shared_only=several),
            shared_only=several,
            loss_per_gain=self.options.loss_per_gain,
        )
        log_once(
            f"{self._call_text(hardware)}: no schedule is stored; the model selects {found.backend}: {found.reason}",
            logging.INFO,
        )
        key = key_of(self.operation, self.problem, hardware)
        times = Times(found.predicted_s, found.library_s)
        return self._decision(hardware, found.backend, found.schedule, found.reason, times, missed=key)

    def _tuned(self, hardware: Hardware) -> Decision:
        from scheduler.search import tuner

        if jax.process_count() > 1:
            command = hints.tune(self.operation, self.problem, hardware)
            raise SchedulerError(
                f"on_miss='tune' in a job of {jax.process_count()} processes, which could select different schedules; "
                f"tune beforehand ({command}) and ship the record, or use on_miss='model'"
            )
        if self.options.divided:
            reason = "it is one device's shard of a call, which is known only when XLA compiles"
            command = hints.tune(self.operation, self.problem, hardware)
            warn_once(f"{self._call_text(hardware)} is not tuned: {reason} (the model selects instead); run: {command}")
            return self._predicted(hardware)
        stop_script_import()
        log_once(f"{self._call_text(hardware)}: no schedule is stored; tuning now", logging.INFO)
        backends = self.options.backends and self.options.backends | {self.operation.library.backend}
        try:
            record = in_fresh_thread(
                lambda: tuner.tune(self.operation, self.problem, backends=backends, store=self.cache, force=True)
            )
        except (TakesHours, WorkerError) as error:  # most often because this process holds the GPU's memory
            reason = str(error).splitlines()[0]
            warn_once(f"{self._call_text(hardware)} is not tuned: {reason} (the model selects instead)")
            return self._predicted(hardware)
        for lost in record.failed:
            warn_once(f"{self._call_text(hardware)}: {lost}")
        found = recheck(self.operation, self.problem, hardware, record, backends=self.options.backends)
        if isinstance(found, str):
            raise SchedulerError(f"{self._call_text(hardware)}: tuned, but no schedule can be used: {found}")
        return self._decision(hardware, found.backend, found.schedule, "measured now", times_in(record, found))

    def _decision(
        self,
        hardware: Hardware,
        backend: str,
        schedule: Schedule,
        reason: str,
        times: Times | None = None,
        *,
        missed: Key | None = None,
    ) -> Decision:
        kernel = self.operation.kernel(backend)
        space = kernel.space(self.problem, hardware.target)
        return Decision(kernel, space.decode(schedule), hardware.target, reason, missed, times)

    def _call_text(self, hardware: Hardware) -> str:
        return f"{self.operation.name} {self.problem} on {hardware.kind}"


def hardware_for(platform: str, target: str) -> Hardware:
    """Returns the chip of a lowering for `platform`.

    Raises:
      UnknownChip: the chip cannot be determined; the message has the reason.
    """
    if target and (named := chips.find(target)).platform == platform:
        return named
    try:
        return chips.detect(jax.local_devices(backend=platform)[0])
    except RuntimeError as error:  # raised by JAX if the platform has no device here
        raise UnknownChip(
            f"this host has no {platform} device, and scheduler.target() sets no {platform} chip"
        ) from error


_replacing = threading.Lock()
# Operation -> the number of `forget` calls.
_edits: weakref.WeakKeyDictionary[Operation[Any], int] = weakref.WeakKeyDictionary()
_changes = 0  # the number of calls of `reload` and `forget`
_decisions = _Decisions(0)
