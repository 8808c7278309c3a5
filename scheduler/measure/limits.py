"""How long each step of a process may take."""

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

# All in seconds; the others bound what adapts to what was seen.
START_LIMIT_S = 180.0
COMPILE_LIMITS_S = (30.0, 120.0)
# XLA tries its algorithms out while it compiles: some 500 runs of a problem, none faster than its bound, and where
# tensor cores do not take operands as they lie, most of them many times slower. Not for longer than this, in any case.
AUTOTUNED_RUNS, AUTOTUNED_LIMIT_S = 10_000, 600.0
# XLA's allocator waits so long for memory to come free before it says that there is none (BFCAllocator::AllocateRaw in
# xla/tsl/framework/bfc_allocator.cc, kMaxMillisToWait): a step that may allocate and has no more time than that would
# be taken for one that hangs.
ALLOCATOR_RETRY_S = 10.0
RUN_LIMIT_S = 10.0
FIRST_RUN_LIMIT_S = 60.0  # where no candidate has a time yet


class Limits:
    """The limit of each step: as told, else by what was seen of this pool's candidates.

    Args:
      options: its timeouts; None adapts.
      hardware: the chip, from which a problem's lower bound follows.
    """

    def __init__(self, options: RunnerOptions, hardware: Hardware) -> None:
        self._options, self._hardware = options, hardware
        self._compile_s: collections.deque[float] = collections.deque(maxlen=100)
        self._best_s: dict[tuple[Operation[Any], Problem], float] = {}

    def of(self, task: Task) -> Limit:
        """Seconds that a step of this task may take; None sets no limit."""

        def limit_s(step: str) -> float | None:
            match step:
                case "wait":  # a neighbour that hangs holds the turn until its own limit; a dead one holds nothing
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
