"""Processes that compile, verify and time candidates beside each other and may die, behind one blocking call each."""

from __future__ import annotations

import atexit
import os
import tempfile
import warnings
from types import TracebackType
from typing import Any

from scheduler.core import hardware as chips
from scheduler.core.errors import WorkerError
from scheduler.core.hardware import GIB
from scheduler.core.identity import point_of
from scheduler.core.records import L2, Failure, Measurement, Outcome
from scheduler.measure import turns
from scheduler.measure.division import Division, Shares
from scheduler.measure.gpu import Gpu
from scheduler.measure.limits import Limits
from scheduler.measure.protocol import Do, Request
from scheduler.measure.runner import InProcess, Runner, RunnerOptions, Task, environment
from scheduler.measure.subprocess_pipe import Children
from scheduler.measure.worker_process import CONTEXT_BYTES, Result, WorkerProcess
from search_spaces import locate
from search_spaces.operation import Operation
from search_spaces.problem import Problem

# XLA tries algorithms out while it compiles, and picks one in this process and another in the next: on an H200 its
# product of 4096^3 in bfloat16 takes 170 us or 176. A library's time is that of so many processes.
LIBRARY_COMPILATIONS = 5
# But no other algorithm of XLA's makes up so many times the fastest candidate's time: one compilation tells that.
BEYOND_REACH = 1.5


def start_runner(operation: Operation[Any], options: RunnerOptions | None = None) -> Runner:
    """Worker processes where the device is a GPU that they can share and load `operation`, else this process.

    Raises:
      WorkerError: there is no GPU of this index, its workers cannot start, or they are asked for by number and cannot
        load `operation`.
      UnknownChip: the table of chips tells nothing of it.
    """
    options = options or RunnerOptions()
    gpu = Gpu.wanted(options.device)
    if (gpu is not None or options.workers is not None) and locate(operation) is None:
        if options.workers is not None:
            raise WorkerError(_out_of_reach(operation))
        warnings.warn(
            f"{_out_of_reach(operation)}. Its candidates run in this process, which ends with one that crashes and "
            "waits for one that hangs",
            RuntimeWarning,
            stacklevel=2,
        )
        gpu = None
    if gpu is None and options.workers is None:
        return InProcess()
    return Pool(gpu or Gpu.none(), options)


def _out_of_reach(operation: Operation[Any]) -> str:
    """Why no worker process can load `operation`, and what to do."""
    return (
        f"no worker process can load {operation.name}, which no module or script holds under a name (it was defined in "
        "a notebook, in a console or within a function): define it at the top level of a file"
    )


class Pool:
    """Worker processes on one GPU. They compile side by side and take turns on the device.

    A worker that dies, overruns its time or loses its device is replaced at once, and only the candidate that it was
    running is blamed; where something else may have been at fault, after a second attempt in a fresh worker.

    The device's memory is divided into equal shares, above which a worker gets nothing (XLA's own limit). A problem
    whose bench needs more is held by fewer workers with larger shares, by one at least; a candidate that finds no
    memory, or a library whose compilation ran out of time over it, is tried once more with the device to itself.
    Processes are started anew for another division, so that nothing is left of what the problem before had.

    Args:
      gpu: whose turn-taking, memory and visibility the processes share.
      options: how many processes, and their timeouts; by default one less than the CPU cores that this one may use (its
        affinity: `taskset`, a container's or a batch system's share), fewer where the GPU's free memory is short.

    Raises:
      WorkerError: too little of the GPU's memory is free, the processes do not start, or there is no place for the lock
        by which they take turns.
      UnknownChip: the table of chips tells nothing of this one.
    """

    def __init__(self, gpu: Gpu, options: RunnerOptions | None = None) -> None:
        options = options or RunnerOptions()
        turns.require(gpu.uuid)
        affordable = gpu.free_bytes // (2 * CONTEXT_BYTES)
        if affordable < 1:
            raise WorkerError(
                f"the GPU has {gpu.free_bytes / GIB:.1f} GiB free, a worker needs {2 * CONTEXT_BYTES / GIB:.0f}; "
                "set XLA_PYTHON_CLIENT_PREALLOCATE=false in the process that holds it, or tune before it starts"
            )
        self._gpu = gpu
        self.slots = int(min(options.workers or max(1, _cores() - 1), affordable))
        self._children = Children()
        self._programs = tempfile.TemporaryDirectory(prefix="tile-scheduler-", ignore_cleanup_errors=True)
        self._workers = [WorkerProcess(gpu, self._children, self._programs.name) for _ in range(self.slots)]
        self._compiled = _Compiled()
        self._shares = Shares(gpu.free_bytes, self.slots)
        self._division = Division(self._workers, self._shares, self._compiled.clear, self.close)
        atexit.register(self.close)
        try:
            with self._division.among(self.slots):
                target = next(iter(self._division.living)).target
            assert target is not None
            self.hardware = chips.describe(target)
        except Exception:
            self.close()
            raise
        self._limits = Limits(options, self.hardware)
        self.environment = environment(driver=gpu.driver)

    def capacity(self, operation: Operation[Any], problem: Problem, l2: L2 = "cold") -> int:
        return self._shares.holders((operation, problem, l2), self.hardware)

    def measure(self, task: Task, *, again: bool = False) -> Outcome:
        outcome = self._request(task, "again" if again else "measure")
        assert outcome is not None
        if isinstance(outcome, Measurement):
            self._limits.saw(task, outcome)
        return outcome

    def confirm(self, task: Task) -> Failure | None:
        outcome = self._request(task, "confirm")
        return outcome if isinstance(outcome, Failure) else None

    def others(self) -> int:
        return self._gpu.others({pid for worker in self._workers if (pid := worker.pid) is not None})

    def close(self) -> None:
        atexit.unregister(self.close)
        for worker in self._workers:
            worker.abandon()
        for worker in self._workers:
            worker.stop()
        self._children.shut_down()
        self._programs.cleanup()

    def _request(self, task: Task, do: Do) -> Outcome | None:
        what = task.operation, task.problem, task.l2
        many = self.capacity(*what)
        with self._division.among(many):
            result = self._asked(task, do)
        if do == "again" or not _may_lack_memory(task, result) or not self._shares.worth_trying_alone(what, many):
            return result.outcome
        with self._division.among(1):
            alone = self._asked(task, do)
        self._shares.tried_alone(what, many, lacking=_may_lack_memory(task, alone))
        return alone.outcome

    def _asked(self, task: Task, do: Do) -> Result:
        """The answer of a worker that has compiled the candidate, where there is one and it is asked about it again."""
        if do != "measure" and (holders := self._compiled.holders(task)):
            return self._asked_again(task, do, holders)
        while True:
            worker, lost = self._division.take(), ""
            try:
                result = self._asked_of(worker, task, do)
                lost = result.lost
            finally:
                if not lost:
                    self._division.put_back(worker)
            if lost:
                self._division.lose(worker)
                if result.retryable:
                    continue
            elif isinstance(result.outcome, Measurement):
                self._compiled.start(task, worker, result.outcome.median_s)
            return result

    def _asked_again(self, task: Task, do: Do, holders: list[WorkerProcess]) -> Result:
        """The answer of the next of `holders` in turn, or, of a library, of one that has not compiled it yet."""
        if do == "again" and task.operation.kernel(task.backend).library:
            newcomer = next((worker for worker in self._division.living if worker not in holders), None)
            if newcomer and len(holders) < LIBRARY_COMPILATIONS and self._compiled.want_more(task):
                result = self._asked_of(newcomer, task, do)
                if not isinstance(result.outcome, Failure):
                    holders.append(newcomer)
                    return result
                self._compiled.fill(task)  # It may lack memory for the operands: those that have them go on.
        holders.append(holders.pop(0))
        return self._asked_of(holders[-1], task, do)

    def _asked_of(self, worker: WorkerProcess, task: Task, do: Do) -> Result:
        name = locate(task.operation)
        if name is None:
            raise WorkerError(_out_of_reach(task.operation))
        request = Request(
            do=do,
            operation=name,
            problem=task.problem.canonical(),
            backend=task.backend,
            schedule=dict(task.schedule),
            repetitions=task.repetitions,
            l2=task.l2,
            incumbent_s=task.incumbent_s,
            raising=task.raising,
        )
        return worker.request(request, self._limits.of(task), self._limits.ended)

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Compiled:
    """Which workers have compiled a candidate, in the order in which they are asked about it again."""

    def __init__(self) -> None:
        self._holders: dict[Any, list[WorkerProcess]] = {}
        self._first_s: dict[Any, float] = {}
        self._full: set[Any] = set()

    def clear(self) -> None:
        self._holders.clear()
        self._first_s.clear()
        self._full.clear()

    def holders(self, task: Task) -> list[WorkerProcess]:
        """To be changed by who asks them; no longer known here once they are cleared."""
        return self._holders.get(_candidate(task), [])

    def start(self, task: Task, worker: WorkerProcess, seconds: float) -> None:
        """Its first holder, and what it measured."""
        self._holders[_candidate(task)] = [worker]
        self._first_s[_candidate(task)] = seconds

    def fill(self, task: Task) -> None:
        """No further worker is to compile it."""
        self._full.add(_candidate(task))

    def want_more(self, task: Task) -> bool:
        """Whether another worker can compile it, and may find what wins."""
        candidate = _candidate(task)
        if candidate in self._full:
            return False
        return task.incumbent_s is None or self._first_s[candidate] <= BEYOND_REACH * task.incumbent_s


def _candidate(task: Task) -> Any:
    return task.operation, task.problem, task.l2, point_of(task.backend, task.schedule)


def _may_lack_memory(task: Task, result: Result) -> bool:
    """Whether it says so, or was a library's compilation that ran out of time, as XLA's autotuner tries on: for each
    algorithm that finds no memory its allocator waits `limits.ALLOCATOR_RETRY_S`.
    """
    autotuned = result.overrun == "compile" and task.operation.kernel(task.backend).library
    return autotuned or (isinstance(result.outcome, Failure) and result.outcome.stage == "memory")


def _cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
