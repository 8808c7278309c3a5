"""A runner for an absent chip: the compiler of the chip accepts or rejects candidates and estimates their times."""

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

from scheduler.contrib.tpu import estimate
from scheduler.core.chip_table import GIB, Abilities
from scheduler.core.errors import NoCandidate, WorkerError
from scheduler.core.hardware import Hardware
from scheduler.core.records import L2, Failure, Outcome
from scheduler.measure import protocol
from scheduler.measure.conversation import Timeouts
from scheduler.measure.gpu import Gpu
from scheduler.measure.runner import RunnerOptions, Task, environment
from scheduler.measure.subprocess_pipe import Children, Limit
from scheduler.measure.worker_process import WorkerProcess, WorkerResult, cores, inherited, request_for, stop_all
from search_spaces.operation import Operation
from search_spaces.problem import Problem

# The memory that a compile process may take, measured with the largest tiles.
PROCESS_BYTES = 2 * GIB
LIBRARY_LIMIT_S = 600.0
INTERPRETER_LIMIT_S = 60.0

# A chip that is not present: its compiler estimates times.
_ESTIMATES = Abilities("static", repetitions=(1, 0))


def elsewhere(hardware: Hardware) -> Hardware:
    """Returns the description of the chip for a process that has no access to it.

    The lower bound of a problem does not apply to estimates (`extrapolated`). The compiler's estimate assumes that
    reads and writes of memory overlap, so it can be below the bound of a memory-bound program.
    """
    return dataclasses.replace(hardware, abilities=_ESTIMATES, extrapolated=True)


def unable(hardware: Hardware) -> str | None:
    """Returns why times on `hardware` cannot be estimated here; None if they can."""
    if (reason := estimate.missing_compiler(hardware)) is not None:
        return reason
    if not hardware.static_cycles:
        return (
            f"the compiler for {hardware.kind} estimates no cycles: without the chip, there is the model's prediction"
        )
    return None


class AheadOfTime:
    """Worker processes that compile for an absent chip (`runner.Runner`).

    A time is the length of the compiler's own instruction schedule, so it is deterministic. Nothing runs except
    finalists, which Pallas' interpreter runs on small problems.

    If the compiler ends a process, or a process exceeds its timeout, the process is replaced and its candidate fails.

    Args:
      hardware: the chip.
      options: the number of processes, and their compile timeout. The default number is one less than the CPU cores
        that this process may use, limited by memory.

    Raises:
      WorkerError: nothing here compiles for the chip, its compiler estimates no time, or the processes do not start.
    """

    searches = 1

    def __init__(self, hardware: Hardware, options: RunnerOptions | None = None) -> None:
        options = options or RunnerOptions()
        if (reason := unable(hardware)) is not None:
            raise WorkerError(reason)
        self.hardware = elsewhere(hardware)
        self.slots = max(1, min(options.workers or max(1, cores() - 1), Gpu.none().free_bytes // PROCESS_BYTES))
        self.environment = environment(driver=f"libtpu {importlib.metadata.version('libtpu')}")
        self._options, self._timeouts = options, Timeouts(options, self.hardware)
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

    def reserve(
        self, operation: Operation[Any], problem: Problem, l2: L2 = "cold", *, exclusive: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        self.capacity(operation, problem, l2)
        return contextlib.nullcontext()

    def measure(self, task: Task, *, again: bool = False) -> Outcome:
        outcome = self._asked(task, "measure").outcome
        assert isinstance(outcome, Outcome)
        return outcome

    def confirm(self, task: Task) -> Failure | None:
        outcome = self._asked(task, "confirm").outcome
        # A timeout or a crash of the interpreter does not show that the candidate is wrong.
        return outcome if isinstance(outcome, Failure) and outcome.stage == "verify" else None

    def fingerprint(self, task: Task) -> str:
        found = self._asked(task, "trace")
        return f"raises {found.outcome}" if found.programs is None else found.programs.fingerprint

    def others(self) -> int:
        return 0

    def close(self) -> None:
        atexit.unregister(self.close)
        stop_all(self._workers)
        self._children.shut_down()
        self._folder.cleanup()

    def _asked(self, task: Task, do: protocol.Do) -> WorkerResult:
        request = request_for(task, do)
        worker = self._free.get()
        try:
            if worker.pid is None and (refused := worker.begin()) is not None:
                raise refused
            return worker.request(request, self._limit(task, do), self._timeouts.record_compile)
        finally:
            self._free.put(worker)

    def _limit(self, task: Task, do: protocol.Do) -> Limit:
        """Returns the timeout of each step in seconds.

        Library programs get a longer timeout, because they are the baseline of all comparisons.
        """
        if do == "confirm":
            return lambda step: INTERPRETER_LIMIT_S
        patient = task.operation.kernel(task.backend).library and self._options.compile_timeout_s is None
        usual = self._timeouts.for_task(task)
        return lambda step: LIBRARY_LIMIT_S if patient and step == "compile" else usual(step)


class _Compiler:
    """The main program of its processes (`worker_process.Main`); each process has its own folder for reports."""

    module = "scheduler.contrib.tpu.estimate_process"
    forked = False

    def __init__(self, hardware: Hardware, folder: Path, number: int) -> None:
        self._hardware, self._reports = hardware, folder / f"reports-{number}"
        programs = folder / "programs"
        self._reports.mkdir()
        programs.mkdir(exist_ok=True)
        self.init = protocol.Init("", "cpu", str(programs), kind=hardware.kind)

    def environment(self) -> dict[str, str]:
        return inherited() | estimate.profile_environment(self._reports, self._hardware)
