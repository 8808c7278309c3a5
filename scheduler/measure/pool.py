"""A pool of parallel compile processes and one measuring process, behind blocking calls."""

from __future__ import annotations

import atexit
import contextlib
import functools
import heapq
import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import Any

from scheduler.core import hardware as chips
from scheduler.core import text
from scheduler.core.errors import DeviceLost, SchedulerError, WorkerError
from scheduler.core.hardware import Hardware
from scheduler.core.interrupts import WAKE_S, Threads, in_thread
from scheduler.core.records import L2, Failure, Measurement, Outcome, point_of
from scheduler.measure.buffers import PARTS, needed_buffer_bytes
from scheduler.measure.compilers import Compilers, Processes
from scheduler.measure.conversation import Timeouts
from scheduler.measure.gpu import Gpu
from scheduler.measure.protocol import Do, Finding, Programs, ReservedProblem
from scheduler.measure.runner import InProcess, Runner, RunnerOptions, Task, environment, require_memory
from scheduler.measure.worker_process import (
    CONTEXT_BYTES,
    WorkerResult,
    name_of,
    request_for,
    unloadable_reason,
)
from search_spaces import locate, value_of
from search_spaces.operation import Operation
from search_spaces.problem import Problem
from search_spaces.target import Target

# The number of concurrent problems: candidates of the next problem compile while the finalists of one are timed.
SEARCHES = 3
# The maximum number of concurrent requests beyond those that compile. Their compiled programs wait for the measuring
# process, so that it is never idle; and compilation goes on while the measuring process compiles a library program.
READY = 10
# The runner of an absent chip; few import it.
ABSENT = "scheduler.contrib.tpu.ahead_of_time:AheadOfTime"

BenchKey = tuple[Operation[Any], Problem, L2]


def start_runner(
    operation: Operation[Any],
    options: RunnerOptions | None = None,
    compilers: Compilers | None = None,
    processes: Processes | None = None,
) -> Runner:
    """Starts a runner for `operation`.

    The runner is a `Pool` if the device is a GPU and other processes can load `operation`, else this process. If
    `options` names a chip that is absent, the runner estimates times with the compiler of that chip.

    Args:
      compilers: as in `Processes`.
      processes: as in `Pool`; processes that no pool takes are stopped.

    Raises:
      WorkerError: there is no GPU of this index; its processes cannot start; `workers` is given, or the chip is absent,
        and no process can load `operation`; or nothing here compiles for the absent chip.
      UnknownChip: the chip is not in the table of chips.
    """
    options = options or RunnerOptions()
    if (absent := _absent_chip(options)) is not None:
        name_of(operation)  # raises if no process can load it
        return value_of(ABSENT)(absent, options)
    if locate(operation) is None and (
        processes is not None or options.workers is not None or Gpu.wanted(options.device) is not None
    ):
        if processes is not None:
            processes.close()
        if options.workers is not None:
            raise WorkerError(unloadable_reason(operation))
        text.warn_safely(
            f"{unloadable_reason(operation)}. Its candidates run in this process: a crash ends the process, and a hang "
            "blocks it"
        )
        return InProcess()
    return open_runner(options, compilers, processes)


def open_runner(
    options: RunnerOptions, compilers: Compilers | None = None, processes: Processes | None = None
) -> Runner:
    """Starts a runner for any operation that another process can load; raises as `start_runner` does."""
    if (absent := _absent_chip(options)) is not None:
        return value_of(ABSENT)(absent, options)
    if processes is None:
        gpu = Gpu.wanted(options.device)
        if gpu is None and options.workers is None:
            return InProcess()
        processes = Processes(gpu or Gpu.none(), options.workers, options.keep_programs, compilers)
    return Pool(processes.gpu, options, processes)


def _absent_chip(options: RunnerOptions) -> Hardware | None:
    """Returns the requested chip if it is not the chip of this host, else None."""
    if not options.hardware:
        return None
    try:
        requested = chips.find(options.hardware)
    except ValueError as error:
        raise WorkerError(str(error)) from error
    here = ""
    if Gpu.wanted(options.device) is not None:  # the pool's processes use it, so this process must not
        here = Gpu.chips().get(options.device, "")
    else:
        with contextlib.suppress(SchedulerError):
            here = chips.detect().kind
    return None if requested.kind == here else requested


class Pool:
    """Compile processes, and one measuring process on one device.

    A compile process has no context on the device. It returns a compiled program, or the reason why a candidate does
    not compile. The measuring process loads programs, verifies them and times them. It also compiles the programs that
    cannot be moved between processes: library programs, which XLA autotunes on the device, and programs that call
    Python.

    A process that dies, exceeds its timeout or loses its device is replaced at once. Only the candidate that it was
    running fails. If the cause may lie elsewhere, the candidate is first retried in a fresh process.

    Args:
      gpu: the device.
      options: the number of compile processes, and the timeouts.
      processes: the processes of the pool, which stops them. By default the pool starts its own.

    Raises:
      WorkerError: too little GPU memory is free; or the measuring process does not start and the chip cannot be
        identified in another way.
      UnknownChip: the chip is not in the table of chips.
    """

    def __init__(self, gpu: Gpu, options: RunnerOptions | None = None, processes: Processes | None = None) -> None:
        options = options or RunnerOptions()
        self._processes = processes or Processes(gpu, options.workers, options.keep_programs)
        self._gpu, self._memory_bytes = gpu, gpu.free_bytes - CONTEXT_BYTES
        self._compilers, self._measuring = self._processes.compilers, self._processes.measuring
        # While another pool times its finalists, this pool compiles on more than its share of the processes.
        compiling = min(self._compilers.count, 2 * self._processes.share)
        self.slots = compiling + min(compiling + 1, READY)
        # The programs of each candidate, or why it cannot be traced.
        self._compiled: dict[BenchKey, dict[Any, Programs | Failure]] = {}
        self._to_confirm: dict[BenchKey, dict[Any, Future[Programs | Failure]]] = {}
        self._reserved: dict[BenchKey, int] = {}  # searches per problem, oldest problem first
        self._exclusive = False  # whether the reserved problem excludes others
        self._waiting: list[object] = []  # searches that wait, in order of arrival
        self._requests: list[tuple[int, int]] = []  # heap of requests that wait for the measuring process
        self._numbers = itertools.count()
        self._busy = self._closed = self._warned = False
        self._changed = threading.Condition()  # guards the fields above
        atexit.register(self.close)
        try:
            # The driver identifies the chip at once. The measuring process takes seconds to start.
            self._target = gpu.target() or self._detected_target()
            self.hardware = chips.describe(self._target)
            self._compilers.set_target(self._target)
        except BaseException:
            self.close()
            raise
        own_clock = self.hardware.abilities.clock != "wall"
        self.searches = options.searches or (SEARCHES if own_clock else 1)
        self._timeouts = Timeouts(options, self.hardware)
        self.environment = environment(driver=gpu.driver)

    def capacity(self, operation: Operation[Any], problem: Problem, l2: L2 = "cold") -> int:
        require_memory(operation, problem, self._memory_bytes)
        return self.slots

    @contextlib.contextmanager
    def reserve(
        self, operation: Operation[Any], problem: Problem, l2: L2 = "cold", *, exclusive: bool = False
    ) -> Iterator[None]:
        self.capacity(operation, problem, l2)
        key = operation, problem, l2
        with Threads[BenchKey, None](1, self.close) as threads:  # so that Ctrl-C interrupts the wait
            threads.call(functools.partial(self._wait_until_reserved, exclusive=exclusive), key)
        try:
            yield
        finally:
            self._release(key)

    def measure(self, task: Task, *, again: bool = False) -> Outcome:
        programs = self._known(task)
        kernel = task.operation.kernel(task.backend)
        if isinstance(programs, Failure):
            return programs
        if programs is None and not kernel.library and not kernel.vendor:
            found = self._compilers.compile(task, "measure", self._timeouts)
            if isinstance(found, Failure):
                return found
            programs = self._compiled.setdefault(_bench_key(task), {})[_candidate(task)] = found
        outcome = self._ask(task, "again" if again else "measure", programs)
        assert isinstance(outcome, Outcome)
        if isinstance(outcome, Measurement):
            self._timeouts.record_run(task, outcome)
        return outcome

    def confirm(self, task: Task) -> Finding:
        self.compile_ahead(task)
        programs = self._known(task)
        if (compiling := self._to_confirm.get(_bench_key(task), {}).get(_candidate(task))) is not None:
            programs = compiling.result()
        if isinstance(programs, Failure):
            return programs
        outcome = self._ask(task, "confirm", programs)
        assert not isinstance(outcome, Measurement)
        return outcome

    def compile_ahead(self, task: Task) -> None:
        """Starts compiling the programs that `confirm` of this task runs, once per candidate. Does not block."""
        programs, key = self._known(task), _bench_key(task)
        if not isinstance(programs, Programs) or not programs.candidate:
            return
        with self._changed:
            known = self._to_confirm.setdefault(key, {})
            if (candidate := _candidate(task)) in known:
                return
            compile_programs = functools.partial(self._compilers.compile, task, "confirm", self._timeouts, programs)
            known[candidate] = in_thread(compile_programs, "scheduler-ahead")

    def fingerprint(self, task: Task) -> str:
        with Threads[Task, Programs | Failure](1, self.close) as threads:  # so that Ctrl-C interrupts the wait
            found = threads.call(lambda task: self._compilers.compile(task, "trace", self._timeouts), task)
        if found == Programs():  # there is no compile process
            found = self._request(task, "trace", None).programs or found
        if isinstance(found, Programs):
            return found.fingerprint
        if (key := _bench_key(task)) in self._reserved:
            self._compiled.setdefault(key, {})[_candidate(task)] = found
        return f"raises {found}"

    def others(self) -> int:
        return self._gpu.others({pid for pid in (self._measuring.pid,) if pid is not None})

    def close(self) -> None:
        atexit.unregister(self.close)
        with self._changed:
            if self._closed:
                return
            self._closed = True
        self._processes.close()

    def _ask(self, task: Task, do: Do, programs: Programs | None) -> Outcome | Finding:
        return self._request(task, do, programs).outcome

    def _request(self, task: Task, do: Do, programs: Programs | None) -> WorkerResult:
        """Sends a request to the measuring process and returns its result."""
        key = _bench_key(task)
        with self._device(key) as reserved:
            if not self._closed:
                self._require_process()
            others = tuple(
                ReservedProblem(name, problem.canonical(), l2)
                for operation, problem, l2 in reserved
                if (name := locate(operation)) is not None
            )
            request = request_for(task, do, others, programs)
            result = self._measuring.request(request, self._timeouts.for_task(task), self._timeouts.record_compile)
        if result.refused and not self._warned:
            self._warned = True
            text.warn_safely(f"the measuring process compiles candidates again: {result.refused}")
        if result.lost and result.retryable:
            raise DeviceLost(f"no measuring process starts on the device: {result.lost}")
        return result

    def _detected_target(self) -> Target:
        """Returns the chip that the measuring process has found. Blocks until the process has started.

        Raises:
          WorkerError: the process does not start, or the pool was closed meanwhile.
        """
        if (refused := self._processes.began.result()) is not None:
            raise refused
        assert self._measuring.target is not None
        return self._measuring.target

    def _require_process(self) -> None:
        """Waits until the measuring process has started; starts a new process if the old one is gone."""
        try:
            self._detected_target()
            refused = self._measuring.begin() if self._measuring.pid is None else None
        except WorkerError as never_started:
            refused = never_started
        if refused is not None:
            raise DeviceLost(f"no measuring process starts on the device: {refused}")
        if self._detected_target() != self._target:
            raise WorkerError(f"the driver reports the chip {self._target}, but JAX reports {self._detected_target()}")

    @contextlib.contextmanager
    def _device(self, key: BenchKey) -> Iterator[tuple[BenchKey, ...]]:
        """Gives the calling thread exclusive use of the measuring process; yields the problems that are held.

        Requests of the problem that has been held longest are served first.
        """
        with self._changed:
            reserved = tuple(self._reserved)
            request = reserved.index(key) if key in reserved else len(reserved), next(self._numbers)
            heapq.heappush(self._requests, request)
            try:
                while self._busy or self._requests[0] != request:
                    self._changed.wait(WAKE_S)
            finally:
                self._requests.remove(request)
                heapq.heapify(self._requests)
            self._busy = True
            reserved = tuple(self._reserved)
        try:
            yield reserved
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _wait_until_reserved(self, key: BenchKey, *, exclusive: bool) -> None:
        """Waits until `key` can be held, with other problems or exclusively. The caller must call `_release` later."""
        with self._changed:
            ticket = object()
            self._waiting.append(ticket)
            try:
                while key not in self._reserved and (
                    self._waiting[0] is not ticket or not self._can_reserve(key, exclusive)
                ):
                    self._changed.wait(WAKE_S)
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()
            if not self._reserved:
                self._exclusive = exclusive
            self._reserved[key] = self._reserved.get(key, 0) + 1
            first = self._reserved[key] == 1
        if first:
            self._prepare(key)

    def _prepare(self, key: BenchKey) -> None:
        """Starts compiling the programs that check the results of a problem and of its neighbour."""
        operation, problem, l2 = key
        for each, parts in ((problem, PARTS), (problem.neighbour(), PARTS - 1)):
            if each is not None:
                task = Task(operation, each, operation.library.backend, {}, 1, l2)
                self._compilers.prepare(task, parts, self._timeouts)

    def _release(self, key: BenchKey) -> None:
        with self._changed:
            self._reserved[key] -= 1
            if not self._reserved[key]:
                del self._reserved[key]
                self._forget(key)
            self._changed.notify_all()

    def _can_reserve(self, key: BenchKey, exclusive: bool) -> bool:
        """Returns whether a problem can be held together with those already held."""
        if not self._reserved or exclusive or self._exclusive:
            return not self._reserved
        needed = sum(needed_buffer_bytes(problem, self.hardware, l2) for _, problem, l2 in (*self._reserved, key))
        return needed <= self._memory_bytes

    def _known(self, task: Task) -> Programs | Failure | None:
        return self._compiled.get(_bench_key(task), {}).get(_candidate(task))

    def _forget(self, key: BenchKey) -> None:
        for programs in self._compiled.pop(key, {}).values():
            if isinstance(programs, Programs):
                self._compilers.forget(programs)
        for compiling in self._to_confirm.pop(key, {}).values():
            compiling.add_done_callback(self._forget_unused)

    def _forget_unused(self, compiled: Future[Programs | Failure]) -> None:
        if compiled.exception() is None and isinstance(programs := compiled.result(), Programs):
            self._compilers.forget(programs)

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _bench_key(task: Task) -> BenchKey:
    return task.operation, task.problem, task.l2


def _candidate(task: Task) -> Any:
    return point_of(task.backend, task.schedule)
