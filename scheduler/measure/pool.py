"""Processes that compile, verify and time candidates beside each other and may die, behind one blocking call each."""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import tempfile
import threading
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

from scheduler.core import hardware as chips
from scheduler.core import safe_text
from scheduler.core.errors import SchedulerError, WorkerError
from scheduler.core.hardware import GIB, Hardware
from scheduler.core.identity import point_of
from scheduler.core.records import L2, Failure, Measurement, Outcome
from scheduler.core.threads import Threads
from scheduler.measure import turns
from scheduler.measure.ahead_of_time import AheadOfTime
from scheduler.measure.division import Division, Shares, What
from scheduler.measure.gpu import Gpu
from scheduler.measure.limits import Limits
from scheduler.measure.protocol import Do, Held
from scheduler.measure.runner import InProcess, Runner, RunnerOptions, Task, environment
from scheduler.measure.subprocess_pipe import Children
from scheduler.measure.worker_process import (
    CONTEXT_BYTES,
    OnDevice,
    WorkerProcess,
    WorkerResult,
    cores,
    name_of,
    out_of_reach,
    requested,
    stop_all,
)
from search_spaces import locate
from search_spaces.operation import Operation
from search_spaces.problem import Problem

# XLA tries algorithms out while it compiles, and picks one in this process and another in the next: on an H200 its
# product of 4096^3 in bfloat16 takes 170 us or 176. A library's time is that of so many processes, or of the first
# three where these agree, on one program or on its time, as closely as two measurements tell: they are the majority,
# whatever the others do.
LIBRARY_COMPILATIONS, AGREEING_COMPILATIONS = 5, 3
AGREEING = 0.02
# But no other algorithm of XLA's makes up so many times the fastest candidate's time: one compilation tells that. On 60
# products, each compiled in five processes, the slowest took 1.02 times as long as the fastest in the median, 1.17 and
# 1.46 in the two worst (`benchmarks/results/matmul-nvidia-h200.json`).
BEYOND_REACH = 1.2
# Problems at once, each on its part of the workers: a worker that comes to one makes a bench first, which takes as long
# as a candidate or two. And while few workers time one problem's finalists, or all wait for its library, or for the
# programs that check its answers, they compile the others' candidates.
SEARCHES = 5


def start_runner(operation: Operation[Any], options: RunnerOptions | None = None) -> Runner:
    """Worker processes where the device is a GPU that they can share and load `operation`, else this process.

    Of a chip that is asked for and not here, processes that compile for it.

    Raises:
      WorkerError: there is no GPU of this index, its workers cannot start, or they are asked for by number and cannot
        load `operation`; or the chip that is asked for is not here, and nothing here compiles for it.
      UnknownChip: the table of chips tells nothing of it.
    """
    options = options or RunnerOptions()
    if (away := _not_here(options)) is not None:
        name_of(operation)  # or no process can load it
        return AheadOfTime(away, options)
    if locate(operation) is None and (options.workers is not None or Gpu.wanted(options.device) is not None):
        if options.workers is not None:
            raise WorkerError(out_of_reach(operation))
        safe_text.warn(
            f"{out_of_reach(operation)}. Its candidates run in this process, which ends with one that crashes and "
            "waits for one that hangs"
        )
        return InProcess()
    return open_runner(options)


def open_runner(options: RunnerOptions) -> Runner:
    """A runner of any operation that another process can load; raises as `start_runner` does."""
    if (away := _not_here(options)) is not None:
        return AheadOfTime(away, options)
    gpu = Gpu.wanted(options.device)
    if gpu is None and options.workers is None:
        return InProcess()
    return Pool(gpu or Gpu.none(), options)


def _not_here(options: RunnerOptions) -> Hardware | None:
    """The chip that is asked for, where that is not the one that is here."""
    if not options.hardware:
        return None
    try:
        asked = chips.find(options.hardware)
    except ValueError as error:
        raise WorkerError(str(error)) from error
    here = ""
    if Gpu.wanted(options.device) is not None:  # which its workers hold, and not this process
        here = Gpu.chips().get(options.device, "")
    else:
        with contextlib.suppress(SchedulerError):
            here = chips.detect().kind
    return None if asked.kind == here else asked


class Pool:
    """Worker processes on one GPU. They compile side by side and take turns on the device.

    A worker that dies, overruns its time or loses its device is replaced at once, and only the candidate that it was
    running is blamed; where something else may have been at fault, after a second attempt in a fresh worker.

    The device's memory is divided into equal shares, above which a worker gets nothing (XLA's own limit). A problem
    whose bench needs more is held by fewer workers with larger shares, by one at least; a candidate that finds no
    memory, or a library whose compilation ran out of time over it, is tried once more with the device to itself.
    Processes are started anew for another division, so that nothing is left of what the problem before had. Of several
    problems at once those are held together that fit one division (`Division`).

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
        self.slots = int(min(options.workers or max(1, cores() - 1), affordable))
        self._children = Children()
        self._programs = tempfile.TemporaryDirectory(prefix="tile-scheduler-", ignore_cleanup_errors=True)
        main = OnDevice(gpu, self._programs.name)
        self._workers = [WorkerProcess(main, self._children) for _ in range(self.slots)]
        self._compiled = _Compiled()
        self._shares = Shares(gpu.free_bytes, self.slots)
        self._division = Division(
            self._workers,
            self._shares,
            lambda what: self._shares.holders(what, self.hardware),
            self._compiled.clear,
            self.close,
        )
        atexit.register(self.close)
        try:
            self._division.start(self.slots)
            target = next(iter(self._division.living)).target
            assert target is not None
            self.hardware = chips.describe(target)
        except Exception:
            self.close()
            raise
        own_clock = self.hardware.abilities.clock != "wall"
        self.searches = options.searches or (min(SEARCHES, self.slots) if own_clock else 1)
        self._limits = Limits(options, self.hardware)
        self.environment = environment(driver=gpu.driver)

    def capacity(self, operation: Operation[Any], problem: Problem, l2: L2 = "cold") -> int:
        return self._shares.holders((operation, problem, l2), self.hardware)

    def joins(self, operation: Operation[Any], problem: Problem, l2: L2 = "cold") -> bool:
        self.capacity(operation, problem, l2)
        return self._division.joins((operation, problem, l2))

    @contextlib.contextmanager
    def holding(
        self, operation: Operation[Any], problem: Problem, l2: L2 = "cold", *, to_itself: bool = False
    ) -> Iterator[None]:
        self.capacity(operation, problem, l2)
        what = operation, problem, l2
        with Threads[What, None](1, self.close) as threads:  # which Ctrl-C need not wait for
            threads.call(functools.partial(self._division.hold, to_itself=to_itself), what)
        try:
            yield
        finally:
            self._division.release(what)

    def measure(self, task: Task, *, again: bool = False) -> Outcome:
        if again:
            with self._compiled.further(task, self._division.preferred(_what(task))) as worker:
                outcome = self._request(task, "again", on=worker, claims=True)
        else:
            outcome = self._request(task, "measure")
        assert outcome is not None
        if isinstance(outcome, Measurement):
            self._limits.saw(task, outcome)
        return outcome

    def confirm(self, task: Task) -> Failure | None:
        outcome = self._request(task, "confirm")
        if isinstance(outcome, Failure):
            return outcome
        # Other candidates are confirmed meanwhile; in the run-off everybody would wait for these compilations.
        if self._compiled.want_more(task):
            at_once = AGREEING_COMPILATIONS - 1  # beside the one that has measured it
            with Threads[int, None](at_once, self.close) as threads:
                collections.deque(threads.map(lambda _: self._compile_further(task), range(at_once)), maxlen=0)
        return None

    def others(self) -> int:
        return self._gpu.others({pid for worker in self._workers if (pid := worker.pid) is not None})

    def close(self) -> None:
        atexit.unregister(self.close)
        stop_all(self._workers)
        self._children.shut_down()
        self._programs.cleanup()

    def _compile_further(self, task: Task) -> None:
        """Has workers compile a library, one after the other, as its time is that of several compilations."""
        while True:
            with self._compiled.further(task, self._division.preferred(_what(task))) as worker:
                if worker is None or not isinstance(self._request(task, "again", on=worker), Measurement):
                    return

    def _request(self, task: Task, do: Do, *, claims: bool = False, on: WorkerProcess | None = None) -> Outcome | None:
        what = _what(task)
        self.capacity(*what)
        self._division.hold(what)
        try:
            if claims:
                self._division.claim(what, self._compiled.holders(task))
            result, among = self._asked(task, do, on)
            if do == "again" or not _may_lack_memory(task, result) or not self._shares.worth_trying_alone(what, among):
                return result.outcome
            alone, _ = self._asked(task, do, alone=True)
            self._shares.tried_alone(what, among, lacking=_may_lack_memory(task, alone))
            return alone.outcome
        finally:
            self._division.release(what)

    def _asked(
        self, task: Task, do: Do, on: WorkerProcess | None = None, *, alone: bool = False
    ) -> tuple[WorkerResult, int]:
        """The answer of a worker, `on` if it lives; of one that has compiled the candidate where that is asked about
        again; and among how many.
        """
        while True:
            certain = functools.partial(self._holder, task, do, on)
            with self._division.worker(_what(task), certain=certain, alone=alone) as taken:
                worker, among = taken
                result = self._asked_of(worker, task, do)
                if result.lost:
                    self._division.lose(worker)
            match result.outcome:
                case _ if result.lost:
                    if result.retryable:
                        continue
                case Measurement(median_s=median_s):
                    self._compiled.ran(task, worker, median_s, result.program)
                case Failure() if do == "again" and self._compiled.others(task, worker):
                    self._compiled.fill(task)  # it may lack memory for the operands: those that have them go on
                    on = None
                    continue
            return result, among

    def _holder(self, task: Task, do: Do, on: WorkerProcess | None) -> WorkerProcess | None:
        """Who is to be asked: `on`; about a candidate again, the next of those that have compiled it. None for whoever
        is free.
        """
        if do == "measure":
            return None
        workers = self._division.preferred(_what(task))
        if on in workers:
            return on
        return next((worker for worker in self._compiled.holders(task) if worker in workers), None)

    def _asked_of(self, worker: WorkerProcess, task: Task, do: Do) -> WorkerResult:
        beside = tuple(
            Held(named, problem.canonical(), l2)
            for operation, problem, l2 in self._division.held()
            if (named := locate(operation)) is not None
        )
        request = requested(task, do, beside)
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
        self._first: dict[Any, list[tuple[float, str]]] = {}  # times and programs of each one's first measurement
        self._full: set[Any] = set()
        self._at_it: set[tuple[Any, WorkerProcess]] = set()  # what is compiled further, and by whom
        self._lock = threading.Lock()

    def clear(self) -> None:
        self._holders.clear()
        self._first.clear()
        self._full.clear()

    def holders(self, task: Task) -> list[WorkerProcess]:
        return [*self._holders.get(_candidate(task), ())]

    def others(self, task: Task, worker: WorkerProcess) -> bool:
        """Whether others have compiled it, and `worker` has not."""
        holders = self.holders(task)
        return bool(holders) and worker not in holders

    def ran(self, task: Task, worker: WorkerProcess, seconds: float, program: str) -> None:
        """Told that a worker has it, as which program, and measured so much: others are asked before it is again."""
        holders = self._holders.setdefault(_candidate(task), [])
        if worker in holders:
            holders.remove(worker)
        else:
            self._first.setdefault(_candidate(task), []).append((seconds, program))
        holders.append(worker)

    def fill(self, task: Task) -> None:
        """No further worker is to compile it."""
        self._full.add(_candidate(task))

    @contextlib.contextmanager
    def further(self, task: Task, workers: Sequence[WorkerProcess]) -> Iterator[WorkerProcess | None]:
        """Within it the first of `workers` that has not compiled a library compiles it, too; None where none is to."""
        candidate = _candidate(task)
        with self._lock:
            at_it = [worker for what, worker in self._at_it if what == candidate]
            those = (worker for worker in workers if worker not in at_it and worker not in self.holders(task))
            found = next(those, None) if self.want_more(task, len(at_it)) else None
            if found is not None:
                self._at_it.add((candidate, found))
        try:
            yield found
        finally:
            with self._lock:
                if found is not None:
                    self._at_it.remove((candidate, found))

    def want_more(self, task: Task, at_it: int = 0) -> bool:
        """Whether another worker can compile it, a library, beside so many that are at it, and may find what wins, or
        what is slower.
        """
        if not task.operation.kernel(task.backend).library:
            return False
        candidate = _candidate(task)
        first = self._first.get(candidate, [])
        if not first or candidate in self._full or len(first) >= LIBRARY_COMPILATIONS:
            return False
        if at_it and len(first) + at_it >= AGREEING_COMPILATIONS:  # these may agree
            return False
        times_s, programs = [seconds for seconds, _ in first], {program for _, program in first}
        if task.library_s is not None and abs(times_s[0] / task.library_s - 1) <= AGREEING:
            return False
        agree = (len(programs) == 1 and programs != {""}) or max(times_s) <= (1 + AGREEING) * min(times_s)
        if len(first) >= AGREEING_COMPILATIONS and agree:
            return False
        return task.incumbent_s is None or times_s[0] <= BEYOND_REACH * task.incumbent_s


def _what(task: Task) -> What:
    return task.operation, task.problem, task.l2


def _candidate(task: Task) -> Any:
    return *_what(task), point_of(task.backend, task.schedule)


def _may_lack_memory(task: Task, result: WorkerResult) -> bool:
    """Whether it says so, or was a library's compilation that ran out of time, as XLA's autotuner tries on: for each
    algorithm that finds no memory its allocator waits `limits.ALLOCATOR_RETRY_S`.
    """
    autotuned = result.overrun == "compile" and task.operation.kernel(task.backend).library
    return autotuned or (isinstance(result.outcome, Failure) and result.outcome.stage == "memory")
