"""A chip of which everything is known: its times are the model's with chosen constants, and noise."""

import contextlib
import random

from scheduler.core.hardware import find
from scheduler.core.records import Environment, Measurement
from scheduler.model.cost import Constants, CostModel
from scheduler.search.sweep import sweep
from search_spaces.matmul import MATMUL, MatmulProblem
from search_spaces.space import Columns

H200 = find("NVIDIA H200")
KERNEL = MATMUL.kernel("mosaic_gpu")
NOW = Environment("0.11.2", "0.11.2", "580.95", "2026-03-01T12:00:00Z")
TRUE = Constants(e_power=0.8, e_hbm=0.9, tma_row_s=1.3e-9, cluster_sync_s=4e-7, p=7)


class Alone:
    """What a runner has whatever it says of times: a chip, by default an H200, to itself."""

    hardware, slots, searches, environment = H200, 1, 1, NOW

    def capacity(self, operation, problem, l2="cold"):
        return 1

    def reserve(self, operation, problem, l2="cold", *, exclusive=False):
        return contextlib.nullcontext()

    def confirm(self, task):
        return None

    def others(self):
        return 0

    def close(self):
        pass


class Invented(Alone):
    """Each repetition is off by `noise`, a standard deviation as a share of the time; the draws never change.

    The second pass draws anew.
    """

    def __init__(self, hardware=H200, constants=TRUE, noise=0.01):
        self.hardware, self._model, self._noise = hardware, CostModel(hardware, constants), noise

    def measure(self, task, *, again=False):
        if task.backend == "xla":
            seconds = self._model.library_seconds(task.problem)
        else:
            points = Columns.of([KERNEL.space(task.problem, self.hardware.target).decode(task.schedule)])
            footprint = KERNEL.footprint(task.problem, points, self.hardware.target)
            seconds = float(self._model.seconds(footprint)[0])
        draw = random.Random(f"{sorted(task.schedule.items())} {again}")
        samples = tuple(seconds * max(draw.gauss(1, self._noise), 0.5) for _ in range(task.repetitions))
        return Measurement(sorted(samples)[len(samples) // 2], samples, "cupti", "cold")


def recording(path, shape, *, sample=None, again=0, **chip):
    """Sweeps the Hopper matmul of `shape` on an invented chip into the file `path`."""
    sweep(MATMUL, MatmulProblem(*shape), path, Invented(**chip), sample=sample, again=again)
    return path
