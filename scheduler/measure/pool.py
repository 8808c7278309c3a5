"""Processes that compile, verify and time candidates beside each other and may die, behind one blocking call each."""

from __future__ import annotations

import atexit
import collections
import contextlib
import dataclasses
import fcntl
import importlib.metadata
import itertools
import math
import os
import queue
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol

from scheduler.core import hardware as chips
from scheduler.core.errors import CandidateFailed, NoCandidate, RemoteTrace, WorkerError
from scheduler.core.hardware import GIB, Hardware
from scheduler.core.identity import point_of
from scheduler.core.records import L2, Environment, Failure, Measurement, Outcome, Schedule
from scheduler.core.threads import WAKE_S, Threads
from scheduler.measure.bench import Bench, least_bytes, needed_bytes
from scheduler.measure.subprocess_pipe import Child, Children, Limit
from scheduler.model.cost import CostModel
from search_spaces import jax_compat, locate
from search_spaces.kernel import Operation, Problem

# One process holds this much of a GPU's memory before any operand: its CUDA context and its libraries.
CONTEXT_BYTES = GIB // 2
# How long a step may take, in seconds; these bound what adapts to what was seen.
START_LIMIT_S = 180.0
COMPILE_LIMITS_S = (30.0, 120.0)
# XLA tries its algorithms out while it compiles: so many runs of a problem, none faster than its lower bound.
TRIED_OUT = 500
RUN_LIMIT_S = 10.0
FIRST_RUN_LIMIT_S = 60.0  # where no candidate has a time yet
RESTART_PAUSES_S = (0.5, 5.0)
# XLA tries algorithms out while it compiles, and picks one in this process and another in the next: on an H200 its
# product of 4096^3 in bfloat16 takes 170 us or 176. A library's time is that of so many processes.
LIBRARY_COMPILATIONS = 5
# So many candidates of a problem are tried with the whole device to themselves, and fail for lack of memory there.
MOST_GREEDY = 2
# What a worker may be asked to do with a candidate.
Do = Literal["measure", "again", "confirm"]


@dataclasses.dataclass(frozen=True)
class Task:
    """One candidate to measure: everything a process needs to know about it.

    Attributes:
      l2: what operands meet, as in `Bench`.
      incumbent_s: the fastest time so far, seconds: a candidate that is clearly slower gets fewer repetitions.
      raising: as in `Bench.measure`.
    """

    operation: Operation[Any]
    problem: Problem
    backend: str
    schedule: Schedule
    repetitions: int
    l2: L2 = "cold"
    incumbent_s: float | None = None
    raising: bool = False


class Runner(Protocol):
    """Where candidates run: in this process or in others.

    Attributes:
      hardware: the chip they run on.
      environment: versions and date.
      slots: how many tasks may be under way at once, at most.
    """

    hardware: Hardware
    environment: Environment
    slots: int

    def room(self, operation: Operation[Any], problem: Problem, l2: L2 = "cold") -> int:
        """How many tasks of `problem` may be under way at once: of those whose operands and results memory holds.

        Raises:
          NoCandidate: the device cannot hold one, and how much it lacks.
        """

    def measure(self, task: Task, *, again: bool = False) -> Outcome:
        """Compiles, verifies and times one candidate; `again` only times it where it is still compiled. Blocks."""

    def confirm(self, task: Task) -> Failure | None:
        """Why a measured candidate is wrong for other inputs or on the neighbour of the problem, or None. Blocks."""

    def others(self) -> int:
        """How many other processes are on the device now, as far as can be told."""

    def close(self) -> None:
        """Ends all there is. Where `measure` blocks in another thread, it may raise a WorkerError."""


class InProcess:
    """Candidates run here, one at a time: for devices that processes cannot share, and operations only known here."""

    slots = 1

    def __init__(self) -> None:
        self.hardware = chips.detect()
        self.environment = environment(driver="")
        self._bench: tuple[Any, Bench] | None = None

    def room(self, operation: Operation[Any], problem: Problem, l2: L2 = "cold") -> int:
        _require_room(operation, problem, Gpu.none().free_bytes if self.hardware.platform == "cpu" else None)
        return 1

    def measure(self, task: Task, *, again: bool = False) -> Outcome:
        bench = self._bench_of(task)
        if again:
            return bench.again(task.backend, task.schedule, task.repetitions)
        return bench.measure(
            task.backend, task.schedule, task.repetitions, incumbent_s=task.incumbent_s, raising=task.raising
        )

    def confirm(self, task: Task) -> Failure | None:
        return self._bench_of(task).confirm(task.backend, task.schedule)

    def others(self) -> int:
        return 0  # of a CPU there is no list of users

    def _bench_of(self, task: Task) -> Bench:
        what = (task.operation, task.problem, task.l2)
        if self._bench is None or self._bench[0] != what:
            self._bench = None  # frees the operands of the one before
            self._bench = what, Bench(task.operation, task.problem, self.hardware, l2=task.l2)
        return self._bench[1]

    def close(self) -> None:
        self._bench = None


class Pool:
    """Worker processes on one GPU. They compile side by side and take turns on the device.

    A worker that dies, overruns its time or loses its device is replaced at once, and only the candidate that it was
    running is blamed; where something else may have been at fault, after a second attempt in a fresh worker.

    The device's memory is divided into equal shares, above which a worker gets nothing (XLA's own limit). A problem
    whose bench needs more is held by fewer workers with larger shares, by one at least; a candidate that finds no
    memory is tried once more with the device to itself. Processes are started anew for another division, so that
    nothing is left of what the problem before had.

    Args:
      gpu: whose turn-taking, memory and visibility the processes share.
      slots: how many processes; by default one less than the CPU cores that this one may use (its affinity: `taskset`,
        a container's or a batch system's share), fewer where the GPU's free memory is short.
      compile_timeout_s: seconds that preparing, lowering or compiling may take; None adapts to what compiling took.
      run_timeout_s: seconds that one turn on the device may take; None adapts to the fastest candidate.

    Raises:
      WorkerError: too little of the GPU's memory is free, or the processes do not start.
    """

    def __init__(
        self,
        gpu: Gpu,
        *,
        slots: int | None = None,
        compile_timeout_s: float | None = None,
        run_timeout_s: float | None = None,
    ) -> None:
        affordable = gpu.free_bytes // (2 * CONTEXT_BYTES)
        if affordable < 1:
            raise WorkerError(
                f"the GPU has {gpu.free_bytes / GIB:.1f} GiB free, a worker needs {2 * CONTEXT_BYTES / GIB:.0f}; "
                "set XLA_PYTHON_CLIENT_PREALLOCATE=false in the process that holds it, or tune before it starts"
            )
        self._gpu = gpu
        self.slots = int(min(slots or max(1, _cores() - 1), affordable))
        self._limits = _Limits(compile_timeout_s, run_timeout_s)
        self._children = Children()
        self._workers = [_Worker(gpu, self._children, self._limits) for _ in range(self.slots)]
        self._idle = threading.Condition()
        self._busy = self._division = 0  # requests under way; among how many workers the memory is divided
        self._living: set[_Worker] = set()
        self._free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._holders: dict[Any, list[_Worker]] = {}
        self._crowded: set[Any] = set()
        self._most: dict[Any, int] = {}  # problem -> workers that hold it at most
        self._greedy: collections.Counter[Any] = collections.Counter()
        atexit.register(self.close)
        try:
            self._divide(self.slots)
        except Exception:
            self.close()
            raise
        self.hardware = self._limits.hardware = chips.describe(**next(iter(self._living)).facts)
        self.environment = environment(driver=gpu.driver)

    def room(self, operation: Operation[Any], problem: Problem, l2: L2 = "cold") -> int:
        what = operation, problem, l2
        if what not in self._most:
            _require_room(operation, problem, self._share(1))
            needed = needed_bytes(problem, self.hardware, l2)
            self._most[what] = next(n for n in _fewer(self.slots) if n == 1 or needed <= self._share(n))
        return self._most[what]

    def measure(self, task: Task, *, again: bool = False) -> Outcome:
        reply = self._request(task, "again" if again else "measure")
        if "failure" in reply:
            return Failure(*reply["failure"])
        fields = reply["measurement"]
        measured = Measurement(**fields | {"samples_s": tuple(fields["samples_s"])})
        self._limits.saw(task, measured)
        return measured

    def confirm(self, task: Task) -> Failure | None:
        reply = self._request(task, "confirm")
        return Failure(*reply["failure"]) if "failure" in reply else None

    def others(self) -> int:
        return self._gpu.others({pid for worker in self._workers if (pid := worker.pid) is not None})

    def _request(self, task: Task, do: Do) -> dict[str, Any]:
        name = locate(task.operation)
        if name is None:
            raise WorkerError(f"operation {task.operation.name!r} is defined where no other process can load it")
        message = {
            "do": do,
            "operation": name,
            "problem": task.problem.canonical(),
            "backend": task.backend,
            "schedule": dict(task.schedule),
            "repetitions": task.repetitions,
            "l2": task.l2,
            "incumbent_s": task.incumbent_s,
            "raising": task.raising,
        }
        what = task.operation, task.problem, task.l2
        many = self.room(*what)
        with self._divided(many):
            reply = self._asked(task, do, message)
        if not _lacks_memory(reply) or do == "again" or many == 1 or self._greedy[what] >= MOST_GREEDY:
            return reply
        with self._divided(1):
            alone = self._asked(task, do, message)
        if _lacks_memory(alone):
            self._greedy[what] += 1
        else:  # the problem needs more than was estimated
            self._most[what] = min(self._most[what], many * 2 // 3)
        return alone

    def _asked(self, task: Task, do: Do, message: dict[str, Any]) -> dict[str, Any]:
        """The reply of a worker that has compiled the candidate, where there is one and it is asked about it again."""
        what = (task.operation, task.problem, task.l2, point_of(task.backend, task.schedule))
        limits, holders = self._limits.of(task), self._holders.get(what, [])
        if do != "measure" and holders:
            several = do == "again" and task.operation.kernel(task.backend).library
            newcomer = next((worker for worker in self._living if worker not in holders), None)
            if several and newcomer and what not in self._crowded and len(holders) < LIBRARY_COMPILATIONS:
                reply = newcomer.request(message, limits)
                if "failure" not in reply:
                    holders.append(newcomer)
                    return reply
                self._crowded.add(what)  # It may lack memory for the operands: those that have them go on.
            holders.append(holders.pop(0))  # in turns
            return holders[-1].request(message, limits)
        while True:
            worker = self._next_free()
            reply = {}
            try:
                reply = worker.request(message, limits)
            finally:
                if "gone" not in reply:
                    self._free.put(worker)
            if "gone" in reply:
                self._living.discard(worker)
                self._holders.clear()
                if reply.get("doubtful"):
                    continue
            elif "measurement" in reply:
                self._holders[what] = [worker]
            return reply

    def _next_free(self) -> _Worker:
        """Waits for it.

        Raises:
          WorkerError: all processes were lost, and none could be started in the place of the last.
        """
        while self._living:
            with contextlib.suppress(queue.Empty):
                return self._free.get(timeout=WAKE_S)
        self._division = 0  # the next request tries to start them again
        raise WorkerError("the worker processes were lost, and the device takes no new ones")

    def _share(self, count: int) -> int:
        """Bytes of the device's memory for each of `count` workers."""
        return self._gpu.free_bytes // count - CONTEXT_BYTES

    @contextlib.contextmanager
    def _divided(self, count: int) -> Iterator[None]:
        """Within it the memory is divided among `count` workers; waits for requests under way in another division."""
        with self._idle:
            while self._busy and self._division != count:
                self._idle.wait(WAKE_S)
            if self._division != count:
                self._divide(count)
            self._busy += 1
        try:
            yield
        finally:
            with self._idle:
                self._busy -= 1
                self._idle.notify_all()

    def _divide(self, count: int) -> None:
        """Starts `count` workers in place of those there are, each with its share of the memory.

        Raises:
          WorkerError: none of them starts.
        """
        self._division = 0  # unless it succeeds, the next request tries again
        self._living, self._free = set(), queue.SimpleQueue()
        self._holders.clear()
        self._crowded.clear()
        for worker in self._workers:
            worker.stop()
        refusals = []
        with Threads[_Worker, WorkerError | None](count, self.close) as starters:
            for worker, refused in starters.map(lambda worker: worker.begin(self._share(count)), self._workers[:count]):
                if refused is not None:
                    refusals.append(refused)
                else:
                    self._living.add(worker)
                    self._free.put(worker)
        if not self._living:
            raise refusals[0]
        self._division = count

    def close(self) -> None:
        atexit.unregister(self.close)
        for worker in self._workers:
            worker.abandon()
        for worker in self._workers:
            worker.stop()
        self._children.shut_down()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What NVIDIA's driver says of one GPU, asked without touching the GPU."""

    index: str
    uuid: str
    driver: str
    free_bytes: int
    total_bytes: int = 0  # where nothing limits what a process takes

    @classmethod
    def wanted(cls, device: int = 0) -> Gpu | None:
        """The GPU of this index, or None where JAX has no GPU to use and the first device is asked for: the CPU.

        Raises:
          WorkerError: there is no GPU of this index.
        """
        wanted = jax_compat.cuda_wanted()
        gpu = cls.query(device) if wanted else None
        if gpu is None and device > 0:
            count = next(i for i in itertools.count() if cls.query(i) is None) if wanted else 0
            there = "there is none" if count == 0 else f"there {'is' if count == 1 else 'are'} {count}"
            raise WorkerError(f"no GPU {device} is visible ({there})")
        return gpu

    @classmethod
    def query(cls, device: int = 0) -> Gpu | None:
        """The GPU of this index among the visible ones, or None where there is no such."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = [name.strip() for name in visible.split(",")] if visible is not None else None
        if names is not None and (device >= len(names) or names[device] in ("", "-1")):
            return None
        index = names[device] if names is not None else str(device)
        smi = shutil.which("nvidia-smi")
        if smi is None:
            return None
        asked = subprocess.run(
            [
                smi,
                f"--id={index}",
                "--query-gpu=uuid,driver_version,memory.free,memory.total",
                "--format=csv,noheader,nounits",
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        parts = [part.strip() for part in asked.stdout.strip().split(",")]
        if asked.returncode or len(parts) != 4:
            return None
        return cls(index, parts[0], parts[1], int(parts[2]) * 1024**2, int(parts[3]) * 1024**2)

    @classmethod
    def none(cls) -> Gpu:
        """Stands for no GPU: its workers run on the CPU, and take turns there as they would on a GPU."""
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return cls("", "cpu", "", memory_bytes)

    def others(self, own: Collection[int]) -> int:
        """How many processes compute on this GPU besides those with the ids `own`."""
        smi = shutil.which("nvidia-smi")
        if smi is None:
            return 0
        command = [smi, f"--id={self.uuid}", "--query-compute-apps=pid", "--format=csv,noheader"]
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
        found = {int(word) for word in asked.stdout.split() if word.isdecimal()}
        # Within a container the driver may list ids as the host knows them: then only their number tells.
        return len(found - set(own)) if found & set(own) else max(0, len(found) - len(own))

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """One process at a time holds the GPU, whoever started it."""
        path = Path(tempfile.gettempdir()) / f"tile-scheduler-{self.uuid}.lock"
        with contextlib.suppress(OSError):  # it may be another user's, which this one can read
            file_number = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                os.fchmod(file_number, 0o666)  # a umask may have kept other users out
            finally:
                os.close(file_number)
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


# Of XLA's allocator: the share of a device's memory that a process may take, by its name and by an older one. A worker
# gets its own, whatever the user's programs are to take.
_MEMORY_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def _require_room(operation: Operation[Any], problem: Problem, free_bytes: int | None) -> None:
    if free_bytes is not None and (least := least_bytes(problem)) > free_bytes:
        raise NoCandidate(
            f"{operation.name} {problem}: its operands and result take {least / GIB:.4g} GiB of memory, and the "
            f"device has {free_bytes / GIB:.3g} GiB for them"
        )


def _fewer(count: int) -> Iterator[int]:
    """`count`, two thirds of it, and so on down to 1: shares that problems of several sizes have in common."""
    while count:
        yield count
        count = count * 2 // 3


def _lacks_memory(reply: Mapping[str, Any]) -> bool:
    return "failure" in reply and reply["failure"][0] == "memory"


def _cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def environment(driver: str) -> Environment:
    return Environment(
        jax=importlib.metadata.version("jax"),
        jaxlib=importlib.metadata.version("jaxlib"),
        driver=driver,
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


class _Limits:
    """How long each step of a worker may take: as told, else by what this pool has seen."""

    def __init__(self, compile_timeout_s: float | None, run_timeout_s: float | None) -> None:
        self._compile_timeout_s, self._run_timeout_s = compile_timeout_s, run_timeout_s
        self.hardware: Hardware | None = None  # as soon as it is known
        self._compile_s: collections.deque[float] = collections.deque(maxlen=100)
        self._best_s: dict[tuple[Operation[Any], Problem], float] = {}

    def of(self, task: Task) -> Limit:
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
        if self._compile_timeout_s is not None:
            return self._compile_timeout_s
        shortest, longest = COMPILE_LIMITS_S
        seen = list(self._compile_s)
        return min(max(4 * statistics.median(seen), shortest), longest) if seen else longest

    def _library_s(self, task: Task) -> float:
        if self._compile_timeout_s is not None:
            return self._compile_timeout_s
        bound_s = CostModel(self.hardware).lower_bound(task.problem) if self.hardware is not None else 0.0
        return COMPILE_LIMITS_S[1] + TRIED_OUT * bound_s

    def _run_s(self, task: Task) -> float:
        if self._run_timeout_s is not None:
            return self._run_timeout_s
        best_s = self._best_s.get((task.operation, task.problem))
        return FIRST_RUN_LIMIT_S if best_s is None else max(RUN_LIMIT_S, 20 * best_s * task.repetitions)


class _Worker:
    """One process after the other, each in place of one that was lost. Requests block."""

    def __init__(self, gpu: Gpu, children: Children, limits: _Limits) -> None:
        self._gpu, self._children, self._limits = gpu, children, limits
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._abandoned = False
        self._share_bytes = 0
        self.facts: dict[str, Any] = {}

    def begin(self, share_bytes: int) -> WorkerError | None:
        """Starts a process that gets so much of the device's memory; or why none starts.

        Raises:
          WorkerError: the pool was closed.
        """
        self._share_bytes = share_bytes
        try:
            self.start()
        except WorkerError as refused:
            if self._abandoned:
                raise
            return refused
        return None

    def stop(self) -> None:
        """Ends the process, where there is one, and frees what it holds of the device."""
        with self._lock:
            if self._child is not None:
                self._child.close()
                self._child = None

    def request(self, message: dict[str, Any], limit_s: Limit) -> dict[str, Any]:
        """The reply to `message`; a failure where the process was lost over it.

        It is `doubtful` where something else than the candidate may be at fault, and says why no process is left
        (`gone`) where that one could not be replaced.

        Raises:
          WorkerError: the worker met a defect of the program, not of the candidate; or the pool was closed.
          CandidateFailed: of a task that is `raising`, from the worker's traceback.
        """
        with self._lock:
            reply = self._attempt(message, limit_s)
            return self._attempt(message, limit_s) if reply.get("doubtful") and "gone" not in reply else reply

    @property
    def pid(self) -> int | None:
        """Of the process now, or None where there is none."""
        return None if self._child is None else self._child.pid

    def start(self) -> None:
        """Starts a process in place of any before.

        Raises:
          WorkerError: it does not start, and what it said; or the pool was closed.
        """
        if self._child is not None:
            self._child.close()
            self._child = None
        try:
            if not self._abandoned:
                self._child = self._children.start(["-P", "-m", "scheduler.measure.worker"], self._environment())
            if self._abandoned or self._child is None:
                self.abandon()
                raise WorkerError("the worker processes were stopped")
            hello = {"uuid": self._gpu.uuid, "platform": "cuda" if self._gpu.index else "cpu"}
            reply = self._child.ask(hello, "start", lambda _: START_LIMIT_S, lambda *_: None)
        except (EOFError, TimeoutError) as error:
            raise WorkerError(f"a worker process did not start: {error}") from error
        if "unable" in reply:
            raise WorkerError(f"a worker process found no device: {reply['unable']}")
        self.facts = reply["facts"]

    def abandon(self) -> None:
        """Ends the process from any thread; requests under way raise a WorkerError, and none is replaced."""
        self._abandoned = True
        if (child := self._child) is not None:  # another thread may be ending it
            child.kill()

    def _attempt(self, message: dict[str, Any], limit_s: Limit) -> dict[str, Any]:
        if self._child is None:
            if self._abandoned:
                raise WorkerError("the worker processes were stopped")
            return {"failure": ["worker", "its process had ended"], "gone": "its process had ended", "doubtful": True}
        try:
            reply = self._child.ask(message, "prepare", limit_s, self._limits.ended)
        except TimeoutError as overrun:
            return {"failure": ["timeout", str(overrun)]} | self._replace()
        except EOFError as death:  # it may have been killed from outside
            return {"failure": ["worker", str(death)], "doubtful": True} | self._replace()
        if "raised" in reply:
            raise CandidateFailed(reply["raised"]) from RemoteTrace(reply["trace"])
        if "error" in reply:
            raise WorkerError(f"a worker failed outside of any candidate:\n{reply['error']}")
        return reply | self._replace() if "leaving" in reply else reply

    def _replace(self) -> dict[str, Any]:
        """Starts a process in place of the one that was lost; what a reply says where none starts."""
        # What a killed process held of the device may come free only after a while.
        for pause_s in (*RESTART_PAUSES_S, 0.0):
            if (refused := self.begin(self._share_bytes)) is None:
                return {}
            time.sleep(pause_s)
        return {"gone": str(refused)}

    def _environment(self) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if name not in _MEMORY_VARIABLES}
        if self._gpu.total_bytes:
            own[_MEMORY_VARIABLES[0]] = f"{self._share_bytes / self._gpu.total_bytes:.4f}"
        return own | {
            "CUDA_VISIBLE_DEVICES": self._gpu.index,
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "JAX_PLATFORMS": "cuda,cpu" if self._gpu.index else "cpu",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        }
