"""A runner without a device: every candidate is right, and its time follows from its schedule."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from scheduler.core.fingerprints import of_schedule
from scheduler.core.hardware import CPU
from scheduler.core.records import Failure, Measurement, Outcome
from scheduler.measure.runner import Task, environment


class Rehearsal:
    hardware = CPU
    slots = searches = 1

    def __init__(self) -> None:
        self.environment = environment(driver="")

    def capacity(self, operation: Any, problem: Any, l2: Any = "cold") -> int:
        return 1

    def reserve(
        self, operation: Any, problem: Any, l2: Any = "cold", *, exclusive: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def measure(self, task: Task, *, again: bool = False) -> Outcome:
        time.sleep(0.002)
        time_s = 1e-3 * task.schedule.get("tile", 3)
        return Measurement(time_s, (time_s,) * task.repetitions, "wall", "warm")

    def confirm(self, task: Task) -> Failure | None:
        return None

    def fingerprint(self, task: Task) -> str:
        return of_schedule(task.operation.kernel(task.backend), task.problem, task.schedule, self.hardware.target)

    def others(self) -> int:
        return 0

    def close(self) -> None:
        pass
