"""An operation whose kernels leave a line for each time that a process builds them, and for each bench."""

from __future__ import annotations

import collections
import dataclasses
import os
import time
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
from operations import Double, DoubleLibrary, DoubleProblem

from search_spaces import Operation, Space, Target


@dataclasses.dataclass(frozen=True)
class LoggedProblem(DoubleProblem):
    """Processes write into the file `log`."""

    log: str = ""

    def write(self, *words: object) -> None:
        with open(self.log, "a") as file:
            file.write(" ".join(map(str, (self.n, os.getpid(), *words))) + "\n")

    def reference(self, *args: jax.Array) -> jax.Array:
        self.write("reference")
        return super().reference(*args)


def told(log: Path) -> list[tuple[int, int, str]]:
    """The lines so far: the problem's size, the process, and what it built."""
    lines = (line.split() for line in log.read_text().splitlines())
    return [(int(n), int(pid), what) for n, pid, what in lines]


def builds(log: Path) -> collections.Counter[tuple[int, str]]:
    """How often each candidate was built, by its problem's size and its name."""
    return collections.Counter((n, what) for n, _, what in told(log) if what != "reference")


@dataclasses.dataclass(frozen=True)
class LoggedSchedule:
    tile: int


class Logged(Double):
    def space(self, problem: DoubleProblem, target: Target) -> Space[Any]:
        return Space(LoggedSchedule, {"tile": (1, 2, 4, 8)})

    def run(self, problem: Any, schedule: Any, target: Target, /, *args: Any, **params: Any) -> jax.Array:
        problem.write(schedule.tile)

        def wait(x: np.ndarray) -> np.ndarray:
            time.sleep(5e-4 * schedule.tile)  # far apart, so that the run-off is short
            return np.asarray(x)

        return jax.pure_callback(wait, problem.result(), args[0] * 2)


class LoggedLibrary(DoubleLibrary):
    seconds: ClassVar = 2.5e-4

    def run(self, problem: Any, schedule: Any, target: Target, /, *args: Any, **params: Any) -> jax.Array:
        problem.write("library")

        def wait(x: np.ndarray) -> np.ndarray:
            time.sleep(self.seconds)
            return np.asarray(x)

        return jax.pure_callback(wait, problem.result(), args[0] + args[0])


LOGGED = Operation("logged", LoggedProblem, (Logged(), LoggedLibrary()))
