"""Whether a plan still holds: its kernels beside their rivals, and the whole function beside XLA's answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from scheduler.core import hardware as chips
from scheduler.core.errors import SchedulerError
from scheduler.core.hardware import CPU
from scheduler.core.interrupts import interruptible
from scheduler.core.plan import Plan, Planned
from scheduler.core.records import Clock, Entry, Key, Measurement, Record, Schedule
from scheduler.dispatch import planned
from scheduler.functions import agreement, in_turns
from scheduler.functions.in_context import Reference, Whole
from scheduler.functions.in_turns import Seconds
from scheduler.functions.problems import problems
from scheduler.search.final_comparison import Margin
from search_spaces import load_known
from search_spaces.operation import Operation


def operation_of(answer: Planned) -> Operation[Any]:
    """Whose answer it is; one of the user's own must have been loaded.

    Raises:
      SchedulerError: it has not.
    """
    try:
        return load_known(answer.operation)
    except ValueError as error:
        raise SchedulerError(f"{error}; name it: --operation file.py:NAME") from None


def records(plan: Plan) -> list[Record]:
    """The answers other than libraries' as records with the plan's times, for `search.reverify`."""
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
    """A function under its plan, beside XLA's answers, today.

    Attributes:
      plan, xla: wall time of a call.
      margin: by which share it is slower with XLA's answers.
      wrong: where results differ by more than rounding; None where they do not.
      unplanned: problems of the function that the plan does not hold.
    """

    plan: Seconds
    xla: Seconds
    margin: Margin
    wrong: str | None
    unplanned: tuple[str, ...]


@interruptible()
def time_again(plan: Plan, fn: Callable[..., Any], args: Sequence[Any]) -> TimedAgain:
    """Times ``fn(*args)`` under its plan and under XLA's answers in turns, and compares what both compute.

    Raises:
      SchedulerError: an answer of the plan does not hold here, and why; or it answers nothing that `fn` poses.
    """
    whole = Whole(fn, args)
    rows = problems(whole.call, *whole.arrays).tuned
    found = [planned.held(plan, row.operation, row.problem, chips.detect()) for row in rows]
    if stale := dict.fromkeys(each.reason for each in found if isinstance(each, planned.Stale)):
        raise SchedulerError("; ".join(stale))
    if not any(isinstance(each, Planned) for each in found):
        raise SchedulerError(
            f"the plan {plan.digest} of {plan.function} holds no problem of this function and its arrays"
        )
    runs = {"plan": whole.under(plan), "xla": whole.under(_by_library(plan))}
    rounding = agreement.rounding(row.problem for row in rows)
    reference = Reference(runs["xla"], jax.block_until_ready(runs["xla"]()), rounding)
    wrong = reference.disagreement(jax.block_until_ready(runs["plan"]()), whole)
    times = whole.time(runs)
    return TimedAgain(
        times["plan"],
        times["xla"],
        in_turns.margin(times["plan"], times["xla"]),
        wrong,
        tuple(each.reason for each in found if isinstance(each, planned.Unplanned)),
    )


def _by_library(plan: Plan) -> Plan:
    answers = (
        dataclasses.replace(a, backend=a.library, version=a.library_version, schedule=a.library_schedule)
        for a in plan.answers
    )
    return dataclasses.replace(plan, answers=tuple(answers))
