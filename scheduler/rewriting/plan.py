"""The plan of an optimized function, and the context in which calls use a plan: `plan()`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

from scheduler.core import arguments
from scheduler.core import hardware as chips
from scheduler.core.errors import SchedulerError
from scheduler.core.plan import Figure, Plan, Planned
from scheduler.dispatch import planned
from scheduler.dispatch.planned import MISSING, InForce, Missing
from scheduler.measure.runner import environment
from scheduler.rewriting.decided import Decided
from scheduler.rewriting.lowering import Replaced
from search_spaces import load
from tile_scheduler import __version__


@contextlib.contextmanager
def plan(which: Plan | str | os.PathLike[str], *, missing: Missing = "xla") -> Iterator[Plan]:
    """Selects schedules from a plan only: ``with scheduler.plan("step.plan.json"): step(params, batch)``.

    No store is opened, and nothing is predicted, searched, compared or timed. All processes with the same plan select
    the same schedules. In a job of several processes, the plans are compared once. The context takes effect while a
    call is traced: functions that `jax.jit` traced outside the context are traced again inside, and vice versa. A
    nested plan replaces the outer one. The context applies to the current thread: other threads enter it themselves, or
    use the process's plan from ``TILE_SCHEDULER_PLAN``. A call's own `schedule` takes precedence.

    Args:
      which: A plan, or the path of its file.
      missing: What to do about a tuned call if the plan does not contain its problem, or its entry is no longer valid:
        "xla" (with a warning if the entry is no longer valid), or "error". `optimize` leaves all else to XLA.

    Raises:
      PlanError: The file cannot be used. The message gives the reason.
      ValueError: `missing` is not a known value.
    """
    arguments.checked_choice("missing", missing, MISSING)
    found = which if isinstance(which, Plan) else Plan.load(which)
    with planned.plan(InForce(found, missing)):
        yield found


def plan_of(function: str, decisions: Sequence[Decided]) -> Plan:
    """Returns the plan of decisions about a function. A problem about which they disagree is left to XLA.

    Raises:
      SchedulerError: There is no decision, or the decisions are for several chips.
    """
    if not decisions:
        raise SchedulerError(f"no decision yet: call {function} first, and then its plan()")
    found = {chips.detect(each.device).id for each in decisions}
    if len(found) > 1:
        raise SchedulerError(
            f"{function} has decisions for several chips ({', '.join(sorted(found))}): optimize it twice"
        )
    answers = dict[tuple[str, str], Planned]()
    for decision in decisions:
        left = "" if decision.kept == "tuned" else decision.reason
        kernels = [(each, left) for each in decision.replaced] + [(each, each.reason) for each in decision.dropped]
        for kernel, reason in kernels:
            answer = _answer(kernel, reason)
            before = answers.setdefault((answer.operation, answer.problem), answer)
            if (before.backend, before.schedule) != (answer.backend, answer.schedule):
                answers[answer.operation, answer.problem] = _answer(kernel, "decisions disagree about it")
    changed = [decision for decision in decisions if decision.changes]
    changes = dict.fromkeys(text for decision in changed for text in decision.changes)
    return Plan(
        function,
        found.pop(),
        environment(""),
        __version__,
        tuple(answers.values()),
        tuple(map(_figure, decisions)),
        tuple(changes) if all(decision.kept == "tuned" for decision in changed) else (),
    )


def _answer(kernel: Replaced, left: str) -> Planned:
    """Returns the entry of a kernel, or of XLA if there is a reason why the problem is `left` to XLA."""
    operation = load(kernel.operation)
    backend, schedule = (operation.library.backend, {}) if left else (kernel.backend, dict(kernel.schedule))
    version, reason = operation.kernel(backend).version, left or kernel.reason
    return Planned(kernel.operation, kernel.problem.canonical(), backend, version, schedule, reason)


def _figure(decision: Decided) -> Figure:
    tuned_s, plain_s = (None if each is None else each.median_s for each in (decision.tuned, decision.plain))
    return Figure(decision.arguments, decision.reason, tuned_s, plain_s)
