"""Learning: a background thread measures, within a budget, the problems that calls with ``on_miss="learn"`` missed."""

from __future__ import annotations

import atexit
import collections
import contextlib
import dataclasses
import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from scheduler.core.errors import NoCandidate, SchedulerError, WorkerError
from scheduler.core.hardware import GIB, Hardware
from scheduler.core.records import L2, Key, Outcome, Point, choice_text, key_of
from scheduler.dispatch.stored import say_once, stored
from scheduler.measure.buffers import needed_buffer_bytes
from scheduler.measure.build import first_line
from scheduler.measure.fork_server import is_worker
from scheduler.measure.gpu import Gpu
from scheduler.measure.pool import open_runner
from scheduler.measure.protocol import Finding
from scheduler.measure.runner import Runner, RunnerOptions, Task
from scheduler.search import tuner
from scheduler.store.cache import Cache
from scheduler.store.lease import LeaseWatcher, leased_if_free
from search_spaces.operation import Operation
from search_spaces.problem import Problem

# The default budget in seconds, for one problem and for all of a process: the time in which worker processes start,
# compile, verify and time.
PROBLEM_S, PROCESS_S = 60.0, 300.0
# The schedules of a problem that are timed in addition to the libraries' programs: the one that the call runs, then the
# winners of similar problems and the model's next ones.
SCHEDULES = 3
# A GPU is idle if kernels ran on it for at most this share of the driver's last sampling period, in percent. Before the
# first trial of a problem it must be idle in several successive looks, so that no trial runs between two programs that
# the process compiles. After the last look, the worker processes stop, and the next look is later.
IDLE_PERCENT, IDLE_LOOKS, MOST_LOOKS, LOOK_S, LATER_S = 5, 3, 10, 1.0, 30.0
# Learning takes at most this share of the free memory, because the program may need more memory later.
MEMORY_SHARE = 0.5
EXIT_WAIT_S = 5.0

logger = logging.getLogger("scheduler")
R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class MissedCall:
    """A problem that a call missed.

    Attributes:
      selected: the schedule that the call runs.
      cache: returns the stores of calls.
      learned: called when a record is stored.
    """

    operation: Operation[Any]
    problem: Problem
    hardware: Hardware
    selected: Point
    cache: Callable[[], Cache]
    learned: Callable[[], None]

    def __str__(self) -> str:
        return f"{self.operation.name} {self.problem} on {self.hardware.kind}"

    @property
    def key(self) -> Key:
        return key_of(self.operation, self.problem, self.hardware)

    @property
    def trials(self) -> int:
        """The number of trials that learn this problem."""
        target = self.hardware.target
        baselines = [kernel for kernel in self.operation.kernels_on(target.platform) if kernel.library or kernel.vendor]
        able = [kernel for kernel in baselines if kernel.supports(self.problem, target) is None]
        return SCHEDULES + sum(len(kernel.space(self.problem, target).legal()[0]) for kernel in able)


class _Busy(SchedulerError):
    """The device is in use."""


class Learner:
    """Measures missed problems one after another in a daemon thread, which ends when none is left.

    Args:
      start: starts a runner.
      find_gpu: returns the GPU of that runner, or None if it measures on the CPU.

    Attributes:
      problem_s, process_s: the budget.
      spent_s: time spent so far.
    """

    def __init__(
        self,
        start: Callable[[RunnerOptions], Runner] = open_runner,
        find_gpu: Callable[[], Gpu | None] = Gpu.wanted,
    ) -> None:
        self.problem_s, self.process_s, self.spent_s = PROBLEM_S, PROCESS_S, 0.0
        self._start, self._find_gpu = start, find_gpu
        self._waiting: collections.deque[MissedCall] = collections.deque()
        self._left_s: dict[Key, float] = {}  # the unspent time of each problem that was queued
        self._thread: threading.Thread | None = None
        self._runner: Runner | None = None
        self._lock = threading.Lock()  # guards the four fields above
        self._gpu: Gpu | None = None
        self._ending = threading.Event()

    def add(self, call: MissedCall) -> None:
        """Queues the problem of a call, once. Returns at once."""
        with self._lock:
            if call.key in self._left_s or self._ending.is_set():
                return
            self._left_s[call.key] = self.problem_s
            self._waiting.append(call)
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="scheduler-learning", daemon=True)
                thread.start()
                self._thread = thread
        self._end_first()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until no problem is left; returns False after `timeout_s` seconds."""
        if (thread := self._thread) is not None:
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    def end(self) -> None:
        """Stops learning for good, with its processes."""
        self._ending.set()
        self._close()
        self.wait(EXIT_WAIT_S)

    def wait_until_idle(self, looks: int) -> None:
        """Waits until the GPU is idle in `looks` successive looks. A GPU that does not report its use counts as idle.

        Raises:
          _Busy: it is in use.
          WorkerError: the process is ending.
        """
        idle = 0
        for _ in range(MOST_LOOKS):
            if self._ending.is_set():
                raise WorkerError("the process is ending")
            percent = None if self._gpu is None else self._gpu.utilization()
            idle = idle + 1 if percent is None or percent <= IDLE_PERCENT else 0
            if self._gpu is None or idle == looks:
                return
            self._ending.wait(LOOK_S)
        raise _Busy

    def timed(self, key: Key, request: Callable[[], R]) -> R:
        """Runs a request of a problem and subtracts its time from the budget.

        Raises:
          WorkerError: the budget is spent.
        """
        if self._left_s[key] <= 0 or self.spent_s >= self.process_s:
            raise WorkerError(f"its {self.problem_s:g} s, or the {self.process_s:g} s of this process, are spent")
        started = time.monotonic()
        try:
            return request()
        finally:
            took_s = time.monotonic() - started
            self._left_s[key] -= took_s
            self.spent_s += took_s

    def _end_first(self) -> None:
        """Makes `end` run before all exit handlers so far, such as those of a pool."""
        atexit.unregister(self.end)
        atexit.register(self.end)

    def _work(self) -> None:
        while (call := self._next()) is not None:
            try:
                self._learn(call)
            except _Busy:
                self._close()
                self._waiting.append(call)
                self._ending.wait(LATER_S)
            except Exception as error:  # neither a failed search nor a defect may reach the program
                self._close()
                # A process that ends refuses new threads and exit handlers before it calls `end`.
                if not self._ending.is_set() and threading.main_thread().is_alive():
                    logger.warning("%s is not learned: %s", call, first_line(error))

    def _next(self) -> MissedCall | None:
        """Returns the next problem. If there is none, stops the processes and ends the thread."""
        spent = self.spent_s >= self.process_s
        if spent or not self._waiting:
            self._close()
        with self._lock:
            if spent and self._waiting:
                say_once(f"the {self.process_s:g} s of this process for learning are spent")
                self._waiting.clear()
            if self._waiting and not self._ending.is_set():
                return self._waiting.popleft()
            self._thread = None
            return None

    def _learn(self, call: MissedCall) -> None:
        cache = call.cache()
        if not isinstance(
            stored(cache, call.operation, call.problem, call.hardware, backends=None, shared_only=False), str
        ):
            return  # it was tuned or learned meanwhile, or the record has no schedule of the backends of the call
        if self._runner is None:
            self._gpu = self._find_gpu()
        self.wait_until_idle(IDLE_LOOKS)
        runner = self._runner or self._opened()
        self._require(runner, call)
        with leased_if_free(cache, call.key, LeaseWatcher()) as other:
            if other is not None:
                logger.info("%s is not learned: it is being tuned by %s", call, other)
                return
            record = tuner.search(
                call.operation,
                call.problem,
                _Bounded(self, runner, call.key),
                backends=None,
                first_error=False,
                budget=call.trials,
                seconds=None,
                seed=0,
                l2="cold",
                store=cache,
                progress=None,
                first=[call.selected],
                brief=True,
            )
        call.learned()
        fastest = choice_text(record.winner.backend, record.winner.schedule)
        logger.info("%s is learned: %s is the fastest of %d", call, fastest, record.tried)

    def _require(self, runner: Runner, call: MissedCall) -> None:
        """Raises a SchedulerError if the runner cannot measure the problem beside this process."""
        if runner.hardware.id != call.hardware.id:
            raise WorkerError(f"worker processes measure on {runner.hardware.id}")
        free_bytes = MEMORY_SHARE * (self._gpu or Gpu.none()).free_bytes
        if (needed_bytes := needed_buffer_bytes(call.problem, call.hardware)) > free_bytes:
            needed, free = (f"{size / GIB:.3g} GiB" for size in (needed_bytes, free_bytes))
            raise NoCandidate(f"measuring takes up to {needed} of memory, and learning may take {free}")

    def _opened(self) -> Runner:
        """Starts the runner."""
        runner = self._start(RunnerOptions(workers=1, compile_timeout_s=self.problem_s, run_timeout_s=self.problem_s))
        self._end_first()
        with self._lock:
            self._runner = runner
        self.wait_until_idle(1)  # raises if the process is ending, which may have been too early to stop this runner
        return runner

    def _close(self) -> None:
        with self._lock:
            runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()


class _Bounded:
    """A runner that serves one request at a time, starts trials on an idle device, and stops when the budget is spent.

    The rounds of a final comparison follow one another without a wait: their ratios cancel disturbances.
    """

    slots = searches = 1

    def __init__(self, learner: Learner, runner: Runner, key: Key) -> None:
        self.hardware, self.environment = runner.hardware, runner.environment
        self.reserve, self.others, self.close = runner.reserve, runner.others, runner.close
        self.fingerprint = runner.fingerprint
        self._learner, self._runner, self._key = learner, runner, key

    def capacity(self, operation: Operation[Any], problem: Problem, l2: L2 = "cold") -> int:
        return min(self.slots, self._runner.capacity(operation, problem, l2))

    def measure(self, task: Task, *, again: bool = False) -> Outcome:
        if not again:
            self._learner.wait_until_idle(1)
        return self._learner.timed(self._key, functools.partial(self._runner.measure, task, again=again))

    def confirm(self, task: Task) -> Finding:
        self._learner.wait_until_idle(1)
        return self._learner.timed(self._key, functools.partial(self._runner.confirm, task))


# ------------------------------------------------------------------------------
# The learner of this process.

_learner = Learner()


def learn(call: MissedCall) -> None:
    """Queues the problem of a call; does nothing in a worker process, which would start workers of its own."""
    if not is_worker():
        with contextlib.suppress(RuntimeError):  # no thread can be started: the interpreter is ending
            _learner.add(call)


def learner() -> Learner:
    """Returns the learner of this process."""
    return _learner


def _renew() -> None:
    """Replaces the learner in a forked child, which has no learning thread and must not stop its parent's processes."""
    global _learner
    atexit.unregister(_learner.end)
    before, _learner = _learner, Learner()
    _learner.problem_s, _learner.process_s = before.problem_s, before.process_s


os.register_at_fork(after_in_child=_renew)
