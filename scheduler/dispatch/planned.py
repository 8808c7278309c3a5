"""Selection of schedules from a plan alone, identical in all processes. No store is opened."""

from __future__ import annotations

import dataclasses
import functools
import os
import typing
from typing import Any, Literal

import jax

from scheduler.core.errors import CacheMiss, NoCandidate, PlanError
from scheduler.core.hardware import Hardware
from scheduler.core.plan import Plan, Planned
from scheduler.core.records import Schedule
from scheduler.core.text import log, warn_once
from scheduler.dispatch.several_processes import require_one_code
from scheduler.model.pruning import illegal
from search_spaces.operation import Operation
from search_spaces.problem import Problem

Missing = Literal["xla", "error"]
MISSING: tuple[Missing, ...] = typing.get_args(Missing)
# The path of a plan for calls outside of any plan context.
ENVIRONMENT = "TILE_SCHEDULER_PLAN"


@dataclasses.dataclass(frozen=True)
class InForce:
    """An active plan, with the policy for problems that the plan does not contain."""

    plan: Plan
    missing: Missing = "xla"

    def __repr__(self) -> str:  # printed in jaxprs, with each call
        return f"plan {self.plan.digest}"


# The innermost plan of this thread. JAX traces and compiles again when the value changes, in functions that a user has
# jitted, too.
plan: Any = jax.make_user_context(None)


def in_force() -> InForce | None:
    """Returns the active plan for calls traced in this context; None if stores and the cost model select.

    Raises:
      PlanError: the file that `TILE_SCHEDULER_PLAN` names is not a usable plan.
    """
    here: InForce | None = plan.value
    if here is not None:
        return here
    path = os.environ.get(ENVIRONMENT)
    return _of_process(path) if path else None


@functools.cache
def _of_process(path: str) -> InForce:
    try:
        return InForce(Plan.load(path))
    except PlanError as error:
        raise PlanError(f"{ENVIRONMENT}: {error}") from None


def forget() -> None:
    """Clears the cached plan of the process, so that the next call reads the file again."""
    _of_process.cache_clear()


def answer(
    force: InForce,
    operation: Operation[Any],
    problem: Problem,
    hardware: Hardware,
    backends: frozenset[str] | None,
    strict: bool,
) -> tuple[str, Schedule, str]:
    """Returns the backend and schedule in a plan, with the reason. Falls back to the library.

    Args:
      backends: the backends that the call allows; None allows all.
      strict: whether a missing entry is an error for this call, regardless of the plan's own policy.

    Raises:
      CacheMiss: the plan has no valid entry, and the policy is an error.
      NoCandidate: the plan has no valid entry, and the call excludes the library.
      SchedulerError: process 0 of this job has another plan or other code.
    """
    plan, library = force.plan, operation.library.backend
    if jax.process_count() > 1:
        require_one_code(plan.digest)
    found = plan.answer(operation.name, problem.canonical())
    stale = _stale(plan, found, operation, problem, hardware)
    if stale:
        reason = stale
    elif found is None:
        reason = f"the plan {plan.digest} has no entry for {operation.name} {problem}"
    elif backends is None or found.backend in backends:
        return found.backend, found.schedule, f"the plan {plan.digest}: {found.reason}"
    else:
        reason = (
            f"the plan {plan.digest} uses {found.backend} for {operation.name} {problem}, which the call does not allow"
        )
    if strict or force.missing == "error":
        raise CacheMiss(f'{reason}; missing="xla" leaves it to {library}')
    if backends is not None and library not in backends:
        raise NoCandidate(f"{reason}; only {library} can run, which the call does not allow")
    if stale:
        warn_once(f"{reason}; {library} is used")
    else:
        log.info("%s; %s is used", reason, library)
    return library, {}, reason


def _stale(
    plan: Plan, found: Planned | None, operation: Operation[Any], problem: Problem, hardware: Hardware
) -> str | None:
    """Returns why a plan, or its entry for a problem, is not valid here; None if it is, or if there is no entry."""
    if plan.hardware != hardware.id:
        return f"the plan {plan.digest} is for {plan.hardware}, and this is {hardware.id}"
    if found is None:
        return None
    which = f"the plan {plan.digest} for {operation.name} {problem}"
    if found.backend not in operation.backends:
        here = ", ".join(operation.backends)
        return f"{which} uses {found.backend}, which no longer exists (available: {here}): make the plan again"
    kernel = operation.kernel(found.backend)
    if kernel.version != found.version:
        return (
            f"{which} uses version {found.version} of the {found.backend} kernel, now version {kernel.version}: "
            "make the plan again"
        )
    if reason := illegal(kernel, problem, hardware, found.schedule):
        return f"{which} has a schedule that cannot run: {reason}"
    return None
