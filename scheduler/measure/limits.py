"""The timeout of each step of a process."""

from __future__ import annotations

import collections
import math
import statistics
from typing import Any

from scheduler.core.hardware import Hardware
from scheduler.core.records import Measurement
from scheduler.measure.runner import RunnerOptions, Task
from scheduler.measure.subprocess_pipe import Limit
from scheduler.model.cost import CostModel
from search_spaces.operation import Operation
from search_spaces.problem import Problem

# In seconds. The other values bound the timeouts that adapt to measured durations.
START_LIMIT_S = 180.0
COMPILE_LIMITS_S = (30.0, 120.0)
# XLA autotunes while it compiles, with about 500 runs of a problem. No run is faster than the lower bound, and most are
# many times slower if tensor cores do not accept the layout of the operands. `AUTOTUNED_LIMIT_S` caps the total.
AUTOTUNED_RUNS, AUTOTUNED_LIMIT_S = 10_000, 600.0
# XLA's allocator waits this long for free memory before it reports an error (BFCAllocator::AllocateRaw in
# xla/tsl/framework/bfc_allocator.cc, kMaxMillisToWait). A step that may allocate needs a longer timeout, or it would be
# taken for one that hangs.
ALLOCATOR_RETRY_S = 10.0
RUN_LIMIT_S = 10.0
FIRST_RUN_LIMIT_S = 60.0  # while no candidate has been timed


class Limits:
    """The timeout of each step: as set in `options`, else adapted to this pool's earlier candidates.

    Args:
      options: the timeouts; None adapts.
      hardware: the chip, used for the lower bound of a problem.
    """

    def __init__(self, options: RunnerOptions, hardware: Hardware) -> None:
        self._options, self._hardware = options, hardware
        self._compile_s: collections.deque[float] = collections.deque(maxlen=100)
        self._best_s: dict[tuple[Operation[Any], Problem], float] = {}

    def of(self, task: Task) -> Limit:
        """Returns a function from a step of this task to its timeout in seconds; None means no limit."""

        def limit_s(step: str) -> float | None:
            match step:
                case "wait":  # another holder's own timeout ends a hang
                    return None
                case "run":
                    return self._run_s(task)
                case "compile" if task.operation.kernel(task.backend).library:
                    return self._library_s(task)
                case _:
                    return self._build_s()

        return limit_s

    def saw(self, task: Task, measured: Measurement) -> None:
        what = task.operation, task.problem
        self._best_s[what] = min(measured.median_s, self._best_s.get(what, math.inf))

    def ended(self, step: str, seconds: float) -> None:
        if step == "compile":
            self._compile_s.append(seconds)

    def _build_s(self) -> float:
        if self._options.compile_timeout_s is not None:
            return self._options.compile_timeout_s
        shortest, longest = COMPILE_LIMITS_S
        seen = list(self._compile_s)
        return min(max(4 * statistics.median(seen), shortest), longest) if seen else longest

    def _library_s(self, task: Task) -> float:
        if self._options.compile_timeout_s is not None:
            return self._options.compile_timeout_s
        autotuned_s = AUTOTUNED_RUNS * CostModel(self._hardware).lower_bound(task.problem)
        return COMPILE_LIMITS_S[1] + min(autotuned_s, AUTOTUNED_LIMIT_S)

    def _run_s(self, task: Task) -> float:
        if self._options.run_timeout_s is not None:
            return self._options.run_timeout_s
        best_s = self._best_s.get((task.operation, task.problem))
        if best_s is None:
            return FIRST_RUN_LIMIT_S
        return ALLOCATOR_RETRY_S + max(RUN_LIMIT_S, 20 * best_s * task.repetitions)
