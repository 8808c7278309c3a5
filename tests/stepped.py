"""An operation whose best schedule changes twice along its extent, by times that are told rather than taken."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from operations import Double, DoubleLibrary, DoubleProblem
from rehearsal import Rehearsal

from scheduler.core.errors import NoCandidate
from scheduler.core.records import Failure, Measurement, Outcome
from scheduler.measure.runner import Task
from search_spaces import Columns, Footprint, Operation, Space, Target


@dataclasses.dataclass(frozen=True)
class SteppedSchedule:
    tile: int


class Stepped(Double):
    """Without a footprint: the model knows nothing of it."""

    def space(self, problem: DoubleProblem, target: Target) -> Space[Any]:
        return Space(SteppedSchedule, {"tile": (1, 2, 4, 8)})

    def footprint(self, problem: DoubleProblem, schedules: Columns, target: Target) -> Footprint | None:
        return None

    def run(self, problem: DoubleProblem, schedule: Any, target: Target, /, *args: Any, **params: Any) -> jax.Array:
        return args[0] * 2


STEPPED = Operation("stepped", DoubleProblem, (Stepped(), DoubleLibrary()))


def seconds(n: int, backend: str, tile: int = 0) -> float:
    """Tile 1 is the best up to n = 30, tile 8 up to 462, and from there on the library."""
    return 1e-6 * {"xla": 200 + 0.1 * n, 1: float(n), 8: 15 + 0.5 * n}.get("xla" if backend == "xla" else tile, 1e3 + n)


def best_s(n: int) -> float:
    return min(seconds(n, "xla"), seconds(n, "scripted", 1), seconds(n, "scripted", 8))


class Told(Rehearsal):
    """Measures at once, and notes what; ends as a killed process does at the trial after `dies_after`.

    Args:
      largest: memory holds none that is larger.
      wrong: whether a schedule gives wrong numbers at an n.
    """

    def __init__(self, *, dies_after: float = 1e9, largest: float = 1e9, wrong: Any = lambda n, tile: False) -> None:
        super().__init__()
        self.measured: list[tuple[int, str, int]] = []
        self.dies_after, self.largest, self.wrong = dies_after, largest, wrong

    def capacity(self, operation: Any, problem: Any, l2: Any = "cold") -> int:
        if problem.n > self.largest:
            raise NoCandidate(f"the device has no room for n={problem.n}")
        return 1

    def measure(self, task: Task, *, again: bool = False) -> Outcome:
        n, tile = task.problem.n, task.schedule.get("tile", 0)  # type: ignore[attr-defined]
        if not again:
            if len(self.measured) == self.dies_after:
                raise KeyboardInterrupt
            self.measured.append((n, task.backend, int(tile)))
        if task.backend != "xla" and self.wrong(n, tile):
            return Failure("verify", f"wrong at {n}")
        time_s = seconds(n, task.backend, int(tile))
        return Measurement(time_s, (time_s,) * task.repetitions, "wall", "warm")
