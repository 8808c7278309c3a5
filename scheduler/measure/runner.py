"""The interface of runners, which compile, verify and time candidates; and a runner that uses this process."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
from datetime import UTC, datetime
from typing import Any, Protocol, runtime_checkable

from scheduler.core import arguments, fingerprints
from scheduler.core import hardware as chips
from scheduler.core.errors import NoCandidate
from scheduler.core.hardware import GIB, Hardware
from scheduler.core.records import L2, Environment, Outcome, Schedule
from scheduler.measure.bench import Bench
from scheduler.measure.bench_cache import BenchCache
from scheduler.measure.buffers import least_buffer_bytes
from scheduler.measure.gpu import Gpu
from scheduler.measure.protocol import Finding
from search_spaces.operation import Operation
from search_spaces.problem import Problem


@dataclasses.dataclass(frozen=True)
class RunnerOptions:
    """Selects the runner that `pool.start_runner` starts, and sets its timeouts.

    Attributes:
      device: the index of the GPU among the visible ones.
      workers: the number of compile processes, on a CPU too; None selects the default of `Pool` on a GPU, and no
        processes on a CPU.
      compile_timeout_s: seconds that preparing, lowering or compiling may take; None adapts to the compile times so
        far.
      run_timeout_s: seconds that one run on the device may take; None adapts to the fastest candidate. With a value
        below `conversation.ALLOCATOR_RETRY_S`, a kernel that runs out of memory is reported as one that hangs.
      searches: the number of problems that a pool searches at once; None selects three if the device has its own clock,
        which times kernels independently of concurrent compilation, and one otherwise.
      hardware: the chip, by a name that `hardware.find` accepts. If that chip is absent, its compiler estimates the
        times of candidates (`ahead_of_time.AheadOfTime`). "" selects the chip of this host.
      keep_programs: whether the measuring process of a GPU stores the programs that it compiles (library programs) in
        JAX's persistent compilation cache.
    """

    device: int = 0
    workers: int | None = None
    compile_timeout_s: float | None = None
    run_timeout_s: float | None = None
    searches: int | None = None
    hardware: str = ""
    keep_programs: bool = True

    def __post_init__(self) -> None:
        arguments.checked_integer("device", self.device, least=0)
        arguments.checked_integer_or_none("workers", self.workers)
        arguments.checked_integer_or_none("searches", self.searches)
        arguments.checked_positive_or_none("compile_timeout_s", self.compile_timeout_s)
        arguments.checked_positive_or_none("run_timeout_s", self.run_timeout_s)
        arguments.checked_text("hardware", self.hardware)


@dataclasses.dataclass(frozen=True)
class Task:
    """One candidate to measure, with everything that a process needs to know about it.

    Attributes:
      l2: the cache state of the operands, as in `Bench`.
      incumbent_s: the fastest time so far, in seconds; a candidate that is clearly slower gets fewer repetitions.
      raising: as in `Bench.measure`.
      fingerprint: the fingerprints of the candidate, as measured, and of the reference (`fingerprints.of_candidate`). A
        worker does not confirm a candidate with others. "" disables the comparison.
    """

    operation: Operation[Any]
    problem: Problem
    backend: str
    schedule: Schedule
    repetitions: int
    l2: L2 = "cold"
    incumbent_s: float | None = None
    raising: bool = False
    fingerprint: str = ""


class Runner(Protocol):
    """Compiles, verifies and times candidates, in this process or in others.

    All measurements of one runner are made on one device, from `measure` to the last round of a final comparison
    (`measure` with `again`). Times of two devices are never compared, even if the devices are of the same kind. To use
    several devices, start a runner for each and give each runner whole problems.

    Attributes:
      hardware: the chip on which candidates run.
      environment: versions and date.
      slots: the maximum number of concurrent tasks.
      searches: the recommended number of concurrent problems of a job: candidates of the next problem compile while the
        finalists of one problem are timed.
    """

    hardware: Hardware
    environment: Environment
    slots: int
    searches: int

    def capacity(self, operation: Operation[Any], problem: Problem, l2: L2 = "cold") -> int:
        """Returns how many tasks of `problem` may run at once.

        Raises:
          NoCandidate: the operands and results of one task do not fit in device memory; the message gives both sizes.
        """

    def reserve(
        self, operation: Operation[Any], problem: Problem, l2: L2 = "cold", *, exclusive: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """Context manager that keeps the compiled programs of `problem` while other problems are searched. Blocks.

        A thread must not request other problems within this context. Outside of it, requests may have to compile again.

        Args:
          exclusive: reserve no other problem at the same time, because the caller has a time limit.

        Raises:
          NoCandidate: as in `capacity`.
        """

    def measure(self, task: Task, *, again: bool = False) -> Outcome:
        """Compiles, verifies and times one candidate; `again` only times it if it is still compiled. Blocks."""

    def confirm(self, task: Task) -> Finding:
        """Checks a measured candidate with other inputs and on the neighbour of the problem. Blocks.

        Returns what is wrong, or None if the candidate is correct. When it returns, the candidate is ready to be timed
        again.
        """

    def fingerprint(self, task: Task) -> str:
        """Returns the fingerprint of a candidate without a version number, as in `Trial`. Blocks.

        It is traced in the process that compiles it: what a candidate does while it is traced stays there.
        """

    def others(self) -> int:
        """Returns the number of other processes that use the device now, as far as can be determined."""

    def close(self) -> None:
        """Releases all resources. If `measure` is blocked in another thread, it may raise a WorkerError."""


@runtime_checkable
class CompilesAhead(Protocol):
    """A runner that has processes to compile while other candidates are measured."""

    def compile_ahead(self, task: Task) -> None:
        """Starts compiling the programs that `confirm` of this task runs, once per candidate. Does not block."""


class InProcess:
    """Runs candidates in this process, one at a time.

    Used for devices that processes cannot share, and for operations that only this process can load.
    """

    slots = searches = 1

    def __init__(self) -> None:
        self.hardware = chips.detect()
        self.environment = environment(driver="")
        self._benches = BenchCache[tuple[Operation[Any], Problem, L2]](
            lambda key: Bench(key[0], key[1], self.hardware, l2=key[2])
        )

    def capacity(self, operation: Operation[Any], problem: Problem, l2: L2 = "cold") -> int:
        if self.hardware.abilities.host_memory:
            require_memory(operation, problem, Gpu.none().free_bytes)
        return 1

    def reserve(
        self, operation: Operation[Any], problem: Problem, l2: L2 = "cold", *, exclusive: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        self.capacity(operation, problem, l2)
        return contextlib.nullcontext()

    def measure(self, task: Task, *, again: bool = False) -> Outcome:
        def ask(bench: Bench) -> Outcome:
            if again:
                return bench.again(task.backend, task.schedule, task.repetitions)
            return bench.measure(
                task.backend, task.schedule, task.repetitions, incumbent_s=task.incumbent_s, raising=task.raising
            )

        return self._benches.ask((task.operation, task.problem, task.l2), ask)

    def confirm(self, task: Task) -> Finding:
        key = task.operation, task.problem, task.l2
        return self._benches.ask(key, lambda bench: bench.confirm(task.backend, task.schedule))

    def fingerprint(self, task: Task) -> str:
        kernel = task.operation.kernel(task.backend)
        return fingerprints.of_schedule(kernel, task.problem, task.schedule, self.hardware.target)

    def others(self) -> int:
        return 0  # a CPU has no list of the processes that use it

    def close(self) -> None:
        self._benches.drop()


def environment(driver: str) -> Environment:
    """Returns the environment of measurements that are made from now on."""
    return Environment(
        jax=importlib.metadata.version("jax"),
        jaxlib=importlib.metadata.version("jaxlib"),
        driver=driver,
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


def require_memory(operation: Operation[Any], problem: Problem, free_bytes: int) -> None:
    """Raises NoCandidate if `free_bytes` cannot hold the operands and the results of `problem`."""
    if (least := least_buffer_bytes(problem)) > free_bytes:
        raise NoCandidate(
            f"{operation.name} {problem}: its operands and result take {least / GIB:.4g} GiB of memory, and the "
            f"device has {free_bytes / GIB:.3g} GiB for them"
        )
