"""An operation whose candidates wait until somebody opens their gate: a search of it is met in the middle."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import jax
from operations import DoubleLibrary, DoubleProblem

from search_spaces import LibraryKernel, Operation, Target


@dataclasses.dataclass(frozen=True)
class GatedProblem(DoubleProblem):
    """Each process that waits at the `gate`, a directory, leaves a file of its number; the file "open" opens it."""

    n: int = 8
    gate: str = ""

    def wait(self) -> None:
        Path(self.gate, str(os.getpid())).touch()
        while not Path(self.gate, "open").exists():
            time.sleep(0.05)


class Gated(LibraryKernel[GatedProblem]):
    """Has one schedule, as a library kernel has, but is not one."""

    backend = "scripted"
    library = False

    def run(self, problem: GatedProblem, schedule: Any, target: Target, /, *args: Any, **params: Any) -> jax.Array:
        problem.wait()
        return args[0] * 2


GATED = Operation("gated", GatedProblem, (Gated(), DoubleLibrary()))


def waiting(gate: Path) -> int:
    """The process that waits at a gate. Waits for one; the test's own limit is the only one."""
    while True:
        if numbers := [int(file.name) for file in gate.iterdir() if file.name.isdecimal()]:
            return numbers[-1]
        time.sleep(0.05)
