"""Applies a plan to the tuned calls within a context (`plan()`), and checks whether a plan is still valid."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from scheduler.core import arguments
from scheduler.core import hardware as chips
from scheduler.core.errors import SchedulerError
from scheduler.core.hardware import CPU
from scheduler.core.interrupts import interruptible
from scheduler.core.plan import Plan, Planned
from scheduler.core.records import Clock, Entry, Key, Measurement, Record, Schedule
from scheduler.dispatch import planned
from scheduler.dispatch.planned import MISSING, InForce, Missing
from scheduler.functions import interleaved
from scheduler.functions.ablation import CompiledFunction, Reference
from scheduler.functions.interleaved import Seconds
from scheduler.functions.problems import problems
from scheduler.search.final_comparison import Margin
from search_spaces import load_known
from search_spaces.configuration import comparisons
from search_spaces.operation import Operation


@contextlib.contextmanager
def plan(which: Plan | str | os.PathLike[str], *, missing: Missing = "xla") -> Iterator[Plan]:
    """Selects schedules from a plan only: ``with scheduler.plan("step.plan.json"): step(params, batch)``.

    No store is opened, and nothing is predicted or searched. All processes with the same plan select the same
    schedules. In a job of several processes, the plans are compared once. The context takes effect while a call is
    traced: functions that `jax.jit` traced outside the context are traced again inside, and vice versa. A nested plan
    replaces the outer one. The context applies to the current thread: other threads enter it themselves, or use the
    process's plan from ``TILE_SCHEDULER_PLAN``. A call's own `schedule` takes precedence.

    Args:
      which: A plan, or the path of its file.
      missing: What to do about a problem that the plan does not contain, or whose entry is no longer valid: "xla" (with
        a warning if the entry is no longer valid), or "error".

    Raises:
      PlanError: The file cannot be used. The message gives the reason.
      ValueError: `missing` is not a known value.
    """
    arguments.checked_choice("missing", missing, MISSING)
    found = which if isinstance(which, Plan) else Plan.load(which)
    with planned.plan(InForce(found, missing)):
        yield found


# ------------------------------------------------------------------------------
# Checks whether a plan is still valid: re-times its kernels, and the whole function against XLA.


def operation_of(answer: Planned) -> Operation[Any]:
    """Returns the operation of a plan's entry. A user's own operation must be loaded already.

    Raises:
      SchedulerError: The operation is not loaded.
    """
    try:
        return load_known(answer.operation)
    except ValueError as error:
        raise SchedulerError(f"{error}; give --operation file.py:NAME") from None


def plan_records(plan: Plan) -> list[Record]:
    """Returns the entries that are not a library's as records with the plan's times, for `search.reverify`."""
    return [_record(plan, answer, operation_of(answer)) for answer in plan.answers if answer.backend != answer.library]


def _record(plan: Plan, answer: Planned, operation: Operation[Any]) -> Record:
    clock: Clock = "wall" if plan.kind == CPU.kind else "cupti"

    def entry(backend: str, version: int, schedule: Schedule, seconds: float | None, fingerprint: str = "") -> Entry:
        then_s = seconds or 0.0
        measured = Measurement(then_s, (then_s,), clock, "cold")
        return Entry(backend, version, dict(schedule), measured, then_s, fingerprint)

    return Record(
        key=Key(answer.operation, plan.hardware, answer.problem),
        entries=(
            entry(answer.backend, answer.version, answer.schedule, answer.alone_s, answer.fingerprint),
            entry(answer.library, answer.library_version, answer.library_schedule, answer.library_s),
        ),
        versions={each.backend: each.version for each in operation.kernels} | {answer.backend: answer.version},
        environment=plan.environment,
        budget=1,
        tried=1,
        space=1,
        library=operation.library.backend,
        reference=answer.reference,
    )


@dataclasses.dataclass(frozen=True)
class TimedAgain:
    """A new comparison of a function under its plan and under XLA.

    Attributes:
      plan, xla: Wall time of a call.
      margin: By what share the function is slower under XLA.
      wrong: Where results differ by more than rounding; None if they agree.
      unplanned: Problems of the function that the plan does not contain.
    """

    plan: Seconds
    xla: Seconds
    margin: Margin
    wrong: str | None
    unplanned: tuple[str, ...]


@interruptible()
@comparisons()
def remeasure_plan(plan: Plan, fn: Callable[..., Any], args: Sequence[Any]) -> TimedAgain:
    """Times ``fn(*args)`` under its plan and under XLA in interleaved rounds, and compares the results.

    Raises:
      SchedulerError: An entry of the plan is no longer valid here (the message gives the reason), or the plan contains
        no problem of `fn`.
    """
    function = CompiledFunction(fn, args)
    rows = problems(function.call, *function.arrays).tuned
    found = [planned.planned_entry(plan, row.operation, row.problem, chips.detect()) for row in rows]
    if stale := dict.fromkeys(each.reason for each in found if isinstance(each, planned.Stale)):
        raise SchedulerError("; ".join(stale))
    if not any(isinstance(each, Planned) for each in found):
        raise SchedulerError(
            f"the plan {plan.digest} of {plan.function} has no problem of this function and its arrays"
        )
    by_library = _by_library(plan)
    runs = {"plan": function.under(plan), "xla": function.under(by_library)}
    noisy = function.noisy(by_library, (row.problem for row in rows))
    reference = Reference(runs["xla"], jax.block_until_ready(runs["xla"]()), noisy)
    wrong = reference.disagreement(jax.block_until_ready(runs["plan"]()))
    times = function.time(runs)
    return TimedAgain(
        times["plan"],
        times["xla"],
        interleaved.margin_of(times["plan"], times["xla"]),
        wrong,
        tuple(each.reason for each in found if isinstance(each, planned.Unplanned)),
    )


def _by_library(plan: Plan) -> Plan:
    answers = (
        dataclasses.replace(a, backend=a.library, version=a.library_version, schedule=a.library_schedule)
        for a in plan.answers
    )
    return dataclasses.replace(plan, answers=tuple(answers))
