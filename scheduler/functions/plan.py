"""plan(): calls within it are answered by a plan alone."""

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
    """Answers from a plan and nowhere else: ``with scheduler.plan("step.plan.json"): step(params, batch)``.

    No store is opened, nothing is predicted or searched, and every process that has the same plan answers alike. In a
    job of several processes their plans are compared once. It matters while a call is traced: what `jax.jit` has traced
    outside is traced again here, and the other way round. Within another plan, this one alone answers; other threads
    enter it themselves, or find the process's plan in ``TILE_SCHEDULER_PLAN``. A call's own `schedule` goes first.

    Args:
      which: a plan, or its file.
      missing: what to do about a problem that the plan does not hold, or whose answer no longer holds: "xla" (the
        latter with a warning), or "error".

    Raises:
      PlanError: the file cannot be used, and why.
      ValueError: `missing` is something else.
    """
    checked.one_of("missing", missing, MISSING)
    found = which if isinstance(which, Plan) else Plan.load(which)
    with planned.plan(InForce(found, missing)):
        yield found
