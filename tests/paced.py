"""An operation whose schedules take a while to build, so that a search of it can be cut short in the middle."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax
from operations import Double, DoubleLibrary, DoubleProblem

from search_spaces import Operation, Space, Target

BUILD_S = 0.1


@dataclasses.dataclass(frozen=True)
class PacedSchedule:
    tile: int
    copy: int


class Paced(Double):
    def space(self, problem: DoubleProblem, target: Target) -> Space[Any]:
        return Space(PacedSchedule, {"tile": (1, 2, 4, 8), "copy": (0, 1, 2, 3, 4)})

    def run(self, problem: DoubleProblem, schedule: Any, target: Target, /, *args: Any, **params: Any) -> jax.Array:
        time.sleep(BUILD_S)
        return args[0] * 2


PACED = Operation("paced", DoubleProblem, (Paced(), DoubleLibrary()))
