"""Measures XLA on a few products, which give the constants of the library on a chip without records."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable

from scheduler.core.errors import SchedulerError
from scheduler.core.records import Calibration, Measurement, Outcome, Trial
from scheduler.measure.runner import Runner, Task
from scheduler.model.calibration import calibrate
from scheduler.model.constants import calibrations, model_of, sibling_of
from search_spaces import load
from search_spaces.problem import Problem

# Seconds after which no further product is begun: with the one in progress and the start of the runner, some 60.
SECONDS = 45.0
REPETITIONS = 10
# Extents (m, n, k) of products in bfloat16: with aligned rows, and with rows of the operands and of the result at
# multiples of 2, 4 and 8 bytes. They take turns, so that an early end leaves some of each.
_ALIGNED = (
    (2048, 2048, 2048),
    (1024, 1024, 1024),
    (16, 4096, 4096),
    (2048, 1024, 512),
    (512, 4096, 2048),
    (256, 2048, 8192),
    (4096, 4096, 1024),
    (128, 1024, 1024),
)
_UNALIGNED = (
    (2048, 2049, 2048),
    (2048, 2048, 2047),
    (2047, 2047, 2047),
    (2048, 2052, 2048),
    (1024, 2048, 1022),
    (512, 4097, 2048),
    (1024, 1025, 4096),
    (16, 4097, 4096),
    (2048, 1024, 1028),
)
Progress = Callable[[Problem, Outcome], None]


def measured(
    runner: Runner, progress: Progress, *, seconds: float = SECONDS, clock: Callable[[], float] = time.monotonic
) -> tuple[Calibration, dict[str, tuple[float, float]]]:
    """Times XLA's products on the chip of `runner`.

    Args:
      progress: receives each problem with its outcome.
      seconds: begin no further product after so many.
      clock: returns seconds.

    Returns:
      The calibration of XLA's products, and each constant of the model that it changes: name -> (before, after).

    Raises:
      SchedulerError: more products of this chip are known already, or none was timed by the device's own clock.
    """
    operation, hardware, deadline = load("matmul"), runner.hardware, clock() + seconds
    library = operation.library
    found = calibrations(operation.name, hardware)
    known = found.get(library.backend)
    if known is not None and not sibling_of(known, hardware) and known.problems > len(_ALIGNED) + len(_UNALIGNED):
        raise SchedulerError(f"{hardware.kind} has constants from {known.problems} products: nothing to measure")
    trials: dict[Problem, list[Trial]] = {}
    turns = itertools.chain.from_iterable(itertools.zip_longest(_ALIGNED, _UNALIGNED))
    for m, n, k in filter(None, turns):
        if clock() > deadline:
            break
        problem = operation.problem(m=m, n=n, k=k)
        outcome = runner.measure(Task(operation, problem, library.backend, {}, REPETITIONS))
        progress(problem, outcome)
        trials[problem] = [Trial(0, library.backend, library.version, {}, outcome, math.nan)]
        if isinstance(outcome, Measurement) and outcome.clock != "cupti":
            break
    (made,) = calibrate(operation, hardware, trials, [runner.environment])
    models = (model_of(operation, library, hardware, found=each).in_force for each in (found, {made.backend: made}))
    before, after = map(vars, models)
    return made, {name: (before[name], x) for name, x in after.items() if x != before[name]}
