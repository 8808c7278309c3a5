"""A chip that is not here as a place where candidates run: its compiler says which of them it takes, and how long."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import importlib.metadata
import itertools
import queue
import tempfile
from pathlib import Path
from typing import Any

from scheduler.core.chip import GIB, NOT_HERE
from scheduler.core.errors import NoCandidate, WorkerError
from scheduler.core.hardware import Hardware
from scheduler.core.records import L2, Failure, Outcome
from scheduler.measure import protocol, static_profile
from scheduler.measure.gpu import Gpu
from scheduler.measure.limits import Limits
from scheduler.measure.runner import RunnerOptions, Task, environment
from scheduler.measure.subprocess_pipe import Children, Limit
from scheduler.measure.worker_process import WorkerProcess, cores, inherited, requested, stop_all
from search_spaces.operation import Operation
from search_spaces.problem import Problem

# What a process that compiles may come to hold, by experience with the largest tiles.
PROCESS_BYTES = 2 * GIB
LIBRARY_LIMIT_S = 600.0
INTERPRETER_LIMIT_S = 60.0


def elsewhere(hardware: Hardware) -> Hardware:
    """The same chip for who is not where it is.

    Its figures bound nothing there: the compiler's estimate has what a program reads and what it writes pass each other
    on their way to memory, and so comes to less than the bound of what only moves bytes.
    """
    return dataclasses.replace(hardware, abilities=NOT_HERE, borrowed=True)


def unable(hardware: Hardware) -> str | None:
    """Why no time on `hardware` can be estimated here, in words; None where it can."""
    if (reason := static_profile.missing(hardware)) is not None:
        return reason
    if not hardware.static_cycles:
        return (
            f"the compiler for {hardware.kind} estimates no cycles: without the chip, there is the model's prediction"
        )
    return None


class AheadOfTime:
    """Worker processes that compile for a chip that is not here (`runner.Runner`).

    A time is what the compiler's own schedule of instructions comes to, the same whenever it is asked. Nothing runs but
    finalists, which Pallas' interpreter is asked about, on small problems.

    A process that the compiler ends, or that overruns its time, is replaced, and its candidate has failed.

    Args:
      hardware: the chip.
      options: how many processes, by default one less than the CPU cores that this one may use, fewer where the memory
        is short; and how long they may compile.

    Raises:
      WorkerError: nothing here compiles for that chip, or its compiler estimates no time; or processes do not start.
    """

    searches = 1

    def __init__(self, hardware: Hardware, options: RunnerOptions | None = None) -> None:
        options = options or RunnerOptions()
        if (reason := unable(hardware)) is not None:
            raise WorkerError(reason)
        self.hardware = elsewhere(hardware)
        self.slots = max(1, min(options.workers or max(1, cores() - 1), Gpu.none().free_bytes // PROCESS_BYTES))
        self.environment = environment(driver=f"libtpu {importlib.metadata.version('libtpu')}")
        self._options, self._limits = options, Limits(options, self.hardware)
        self._children = Children()
        self._folder = tempfile.TemporaryDirectory(prefix="tile-scheduler-", ignore_cleanup_errors=True)
        self._numbers = itertools.count()
        self._workers = [
            WorkerProcess(_Compiler(hardware, Path(self._folder.name), number), self._children)
            for number in range(self.slots)
        ]
        self._free: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        for worker in self._workers:
            self._free.put(worker)
        atexit.register(self.close)

    def capacity(self, operation: Operation[Any], problem: Problem, l2: L2 = "cold") -> int:
        if l2 != "cold":
            raise NoCandidate(
                f"{self.hardware.kind} is not here, and an estimate has operands come from its memory: no time is {l2}"
            )
        return self.slots

    def holding(
        self, operation: Operation[Any], problem: Problem, l2: L2 = "cold", *, to_itself: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        self.capacity(operation, problem, l2)
        return contextlib.nullcontext()

    def measure(self, task: Task, *, again: bool = False) -> Outcome:
        outcome = self._asked(task, "measure")
        assert outcome is not None
        return outcome

    def confirm(self, task: Task) -> Failure | None:
        outcome = self._asked(task, "confirm")
        # One that the interpreter does not come to the end of, or that ends its process, is not found wrong by that.
        return outcome if isinstance(outcome, Failure) and outcome.stage == "verify" else None

    def others(self) -> int:
        return 0

    def close(self) -> None:
        atexit.unregister(self.close)
        stop_all(self._workers)
        self._children.shut_down()
        self._folder.cleanup()

    def _asked(self, task: Task, do: protocol.Do) -> Outcome | None:
        request = requested(task, do)
        worker = self._free.get()
        try:
            if worker.pid is None and (refused := worker.begin()) is not None:
                raise refused
            return worker.request(request, self._limit(task, do), self._limits.ended).outcome
        finally:
            self._free.put(worker)

    def _limit(self, task: Task, do: protocol.Do) -> Limit:
        """Seconds that a step may take: more for the library's programs, with which all others are compared."""
        if do == "confirm":
            return lambda step: INTERPRETER_LIMIT_S
        patient = task.operation.kernel(task.backend).library and self._options.compile_timeout_s is None
        usual = self._limits.of(task)
        return lambda step: LIBRARY_LIMIT_S if patient and step == "compile" else usual(step)


class _Compiler:
    """As what its processes are started (`worker_process.Main`): each has a folder to itself for what it is told."""

    module = "scheduler.measure.estimate_process"

    def __init__(self, hardware: Hardware, folder: Path, number: int) -> None:
        self._hardware, self._reports = hardware, folder / f"reports-{number}"
        programs = folder / "programs"
        self._reports.mkdir()
        programs.mkdir(exist_ok=True)
        self.hello = protocol.Hello("", "cpu", str(programs), kind=hardware.kind)

    def environment(self) -> dict[str, str]:
        return inherited() | static_profile.environment(self._reports, self._hardware)
