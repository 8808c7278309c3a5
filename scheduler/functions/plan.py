"""Applies a plan to the tuned calls within a context: `plan()`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from scheduler.core import checked
from scheduler.core.plan import Plan
from scheduler.dispatch import planned
from scheduler.dispatch.planned import MISSING, InForce, Missing


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
    checked.one_of("missing", missing, MISSING)
    found = which if isinstance(which, Plan) else Plan.load(which)
    with planned.plan(InForce(found, missing)):
        yield found
