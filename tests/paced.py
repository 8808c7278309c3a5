"""Operations whose schedules take a while to build, or for ever to run: a search of them is cut short in the middle."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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


class Endless(Paced):
    """Makes the file that $BEGUN names, and then runs for ever, inside of one call of XLA's program."""

    def run(self, problem: DoubleProblem, schedule: Any, target: Target, /, *args: Any, **params: Any) -> jax.Array:
        def begin(x: np.ndarray) -> np.ndarray:
            Path(os.environ["BEGUN"]).touch()
            return np.asarray(x)

        x = jax.pure_callback(begin, problem.result(), args[0])
        return jax.lax.while_loop(lambda x: jnp.isfinite(x[0]), jnp.sin, x)


PACED = Operation("paced", DoubleProblem, (Paced(), DoubleLibrary()))
ENDLESS = Operation("endless", DoubleProblem, (Endless(), DoubleLibrary()))
