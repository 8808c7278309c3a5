"""Compile processes, of this host and of others: each compiles one candidate at a time, for a chip it does not see."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import itertools
import queue
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from scheduler.core import safe_text
from scheduler.core.errors import SchedulerError, WorkerError
from scheduler.core.hardware import GIB
from scheduler.core.interrupts import WAKE_S
from scheduler.core.records import Failure
from scheduler.measure.checks import PARTS
from scheduler.measure.gpu import Gpu
from scheduler.measure.limits import Limits
from scheduler.measure.protocol import Do, Programs, Request, decode, encode
from scheduler.measure.runner import Task
from scheduler.measure.subprocess_pipe import Children, Ended, Limit
from scheduler.measure.worker_process import (
    Compiler,
    WorkerProcess,
    WorkerResult,
    cores,
    requested,
    result_of,
    stop_all,
)
from search_spaces.kernel import Target

# The order in which requests get a process. The measuring process waits for the programs that check answers, which are
# of "prepare". A search ends with the confirmation of its finalists.
URGENCY: tuple[Do, ...] = ("prepare", "confirm", "measure")
# What a compile process takes of the host's memory.
PROCESS_BYTES = GIB


def count_of(wanted: int | None) -> int:
    """How many compile processes to start: as many as wanted, by default one less than the CPU cores that this process
    may use (its affinity: `taskset`, a container's or a batch system's share), where the host has the memory.
    """
    return wanted or max(1, min(cores() - 1, Gpu.none().free_bytes // PROCESS_BYTES))


# Sends a request to another host, encoded, with the content of the files that the request names, and returns the answer
# likewise.
Transport = Callable[[bytes, dict[str, bytes]], tuple[bytes, dict[str, bytes]]]


class HelperLost(SchedulerError):
    """A compile process of another host is not there any more."""


class Helper:
    """A compile process of another host.

    Args:
      send: raises `HelperLost` where the host is lost.
      directory: of the compiled programs on this host.
    """

    def __init__(self, send: Transport, directory: Path) -> None:
        self._send, self._directory = send, directory
        self.pid: int | None = 0  # None once it is lost

    def request(self, request: Request, limit_s: Limit, ended: Ended) -> WorkerResult:
        """As `WorkerProcess.request`; the other host keeps the limits."""
        try:
            answer, files = self._send(encode(request), read_files(request.programs, self._directory))
        except HelperLost:
            self.pid = None
            raise
        write_files(files, self._directory)
        return result_of(decode(answer))


def read_files(programs: Programs | None, directory: Path) -> dict[str, bytes]:
    """The content of the files of compiled programs."""
    return {name: (directory / name).read_bytes() for name in (programs.names if programs is not None else ())}


def write_files(files: Mapping[str, bytes], directory: Path) -> None:
    """The inverse of `read_files`."""
    for name, content in files.items():
        (directory / Path(name).name).write_bytes(content)


class Compilers:
    """Compile processes, behind one blocking call. Pools of one host may share them.

    Whatever a candidate raises, prints or kills while it is compiled stays in its process. A process that is lost is
    replaced, and only the candidate that it was compiling is blamed.

    Processes start with `start`, compile once `aim` was called, and end with the last of the calls of `close`.

    Args:
      count: of processes.
      users: how many will call `close`, each once.

    Attributes:
      directory: of the compiled programs.
    """

    def __init__(self, count: int, users: int = 1) -> None:
        self.count, self._users = count, users
        self._folder = tempfile.TemporaryDirectory(prefix="tile-scheduler-", ignore_cleanup_errors=True)
        self.directory = Path(self._folder.name)
        self._children = Children()
        self._main = Compiler(self._folder.name)
        self._target: Target | None = None
        self._processes = [WorkerProcess(self._main, self._children) for _ in range(count)]
        self._free: list[WorkerProcess | Helper] = []
        # Requests that wait for a process, and where each is given one.
        self._waiting: dict[tuple[int, int], queue.SimpleQueue[WorkerProcess | Helper]] = {}
        self._numbers = itertools.count()
        self._refusals: list[WorkerError] = []
        self._started = self._closed = self._warned = False
        self._lock = threading.Lock()  # of these
        self._aimed = threading.Event()

    def start(self) -> None:
        """Starts the processes, once. Does not wait for them."""
        with self._lock:
            if self._started:
                return
            self._started = True
        atexit.register(self._stop)
        for process in self._processes:
            begin = functools.partial(self._begin, process)
            threading.Thread(target=begin, name="scheduler-start", daemon=True).start()

    @property
    def pids(self) -> set[int]:
        return {pid for process in self._processes if (pid := process.pid) is not None}

    def aim(self, target: Target) -> None:
        """Says for which chip to compile.

        Raises:
          WorkerError: another pool has said another chip.
        """
        with self._lock:
            if self._target not in (None, target):
                raise WorkerError(
                    f"{target.kind} is another chip than {self._target.kind}, for which this host compiles"
                )
            self._target = target
            self._main.aim(target)
        self._aimed.set()

    def compile(self, task: Task, do: Do, limits: Limits, programs: Programs | None = None) -> Programs | Failure:
        """The files of the programs of a candidate, or why there are none. Blocks.

        Where no process can compile for a chip that it does not see, nothing is compiled: a warning says so once, and
        the measuring process compiles.

        Raises:
          WorkerError: a defect of the program that is not the candidate's; or the processes were stopped.
          CandidateFailed: the candidate raised, and `task.raising`.
        """
        return self._answered(requested(task, do, programs=programs), task, limits)

    def prepare(self, task: Task, limits: Limits) -> None:
        """Compiles what checks the answers to the problem of a task. Does not wait, and tells of no failure."""

        def ask(part: int) -> None:
            with contextlib.suppress(SchedulerError):  # the measuring process meets it again
                self._answered(dataclasses.replace(requested(task, "prepare"), part=part), task, limits)

        for part in range(PARTS):
            threading.Thread(target=ask, args=(part,), name="scheduler-prepare", daemon=True).start()

    def add(self, helpers: Sequence[Helper]) -> None:
        """Compile processes of other hosts take part from now on."""
        with self._lock:
            self.count += len(helpers)
        for helper in helpers:
            self._release(helper)

    def _answered(self, request: Request, task: Task, limits: Limits) -> Programs | Failure:
        limit_s = limits.of(task)
        while True:
            if (process := self._take(request.do)) is None:
                return Programs()
            try:
                result = process.request(request, limit_s, limits.ended)
                break
            except HelperLost:
                continue
            finally:
                if process.pid is not None:
                    self._release(process)
                else:
                    self._refuse(WorkerError("a compile process was lost, and none starts in its place"))
        if result.outcome is None:
            assert result.programs is not None
            return result.programs
        assert isinstance(result.outcome, Failure)
        return result.outcome

    def forget(self, programs: Programs) -> None:
        """Removes the files."""
        for name in programs.names:
            (self.directory / name).unlink(missing_ok=True)

    def close(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users > 0:
                return
        self._stop()

    def _stop(self) -> None:
        atexit.unregister(self._stop)
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._aimed.set()
        stop_all(self._processes)
        self._children.shut_down()
        self._folder.cleanup()

    def _take(self, do: Do) -> WorkerProcess | Helper | None:
        """A free process that no more urgent request waits for; None where none starts."""
        request = URGENCY.index(do), next(self._numbers)
        given: queue.SimpleQueue[WorkerProcess | Helper] = queue.SimpleQueue()
        with self._lock:
            self._waiting[request] = given
            if (free := next((one for one in self._free if self._first(one) == request), None)) is not None:
                self._free.remove(free)
                self._waiting.pop(request).put(free)
        while True:
            with contextlib.suppress(queue.Empty):
                return given.get(timeout=WAKE_S)
            with self._lock:
                if not self._closed and len(self._refusals) < self.count:
                    continue
                if self._waiting.pop(request, None) is None:  # a process was given meanwhile
                    continue
                if self._closed:
                    raise WorkerError("the worker processes were stopped")
                if not self._warned:
                    self._warned = True
                    safe_text.warn(f"candidates are compiled one by one, where they are measured: {self._refusals[0]}")
                return None

    def _first(self, process: WorkerProcess | Helper) -> tuple[int, int] | None:
        """The most urgent request that this process may take. What another host prepares is of no use here."""
        away = isinstance(process, Helper)
        return min((one for one in self._waiting if not (away and URGENCY[one[0]] == "prepare")), default=None)

    def _release(self, process: WorkerProcess | Helper) -> None:
        """Gives a process to the most urgent request that waits."""
        with self._lock:
            if (request := self._first(process)) is None:
                self._free.append(process)
            else:
                self._waiting.pop(request).put(process)

    def _begin(self, process: WorkerProcess) -> None:
        """Starts a process, in a thread of its own."""
        try:
            process.spawn()
            self._aimed.wait()
            if self._closed:
                process.stop()
                raise WorkerError("the worker processes were stopped")
            refused = process.begin()
        except WorkerError as closed:
            refused = closed
        except Exception as defect:  # of a process that is ended meanwhile, too
            refused = WorkerError(f"a compile process did not start: {defect!r}")
        if refused is None:
            self._release(process)
        else:
            self._refuse(refused)

    def _refuse(self, refused: WorkerError) -> None:
        with self._lock:
            self._refusals.append(refused)
