"""Where candidates run, in words that any place can keep; and this process as such a place."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
from datetime import UTC, datetime
from typing import Any, Protocol, runtime_checkable

from scheduler.core import checked
from scheduler.core import hardware as chips
from scheduler.core.errors import NoCandidate
from scheduler.core.hardware import GIB, Hardware
from scheduler.core.records import L2, Environment, Failure, Outcome, Schedule
from scheduler.measure.bench import Bench
from scheduler.measure.benches_at_hand import BenchesAtHand
from scheduler.measure.gpu import Gpu
from scheduler.measure.rotation import least_bytes
from search_spaces.operation import Operation
from search_spaces.problem import Problem


@dataclasses.dataclass(frozen=True)
class RunnerOptions:
    """Which runner to start (`pool.start_runner`), and how patient it is.

    Attributes:
      device: the GPU, by its index among the visible ones.
      workers: how many compile processes, on a CPU too; None is as many as `Pool` takes on a GPU, none on a CPU.
      compile_timeout_s: seconds that preparing, lowering or compiling may take; None adapts to what compiling took.
      run_timeout_s: seconds that one run on the device may take; None adapts to the fastest candidate. Below
        `limits.ALLOCATOR_RETRY_S` a lack of memory is taken for a kernel that hangs.
      searches: how many problems a pool takes at once; None is two where a device's own clock times kernels, whatever
        is compiled beside it, and one elsewhere.
      hardware: the chip, by its name as `hardware.find` takes it; where it is not here, its compiler tells how long
        candidates take (`ahead_of_time.AheadOfTime`). "" is the one that is here.
      keep_programs: whether a process that measures on a GPU keeps what it compiles there, the programs of libraries,
        in JAX's persistent compilation cache.
    """

    device: int = 0
    workers: int | None = None
    compile_timeout_s: float | None = None
    run_timeout_s: float | None = None
    searches: int | None = None
    hardware: str = ""
    keep_programs: bool = True

    def __post_init__(self) -> None:
        checked.whole("device", self.device, least=0)
        checked.whole_or_none("workers", self.workers)
        checked.whole_or_none("searches", self.searches)
        checked.positive_or_none("compile_timeout_s", self.compile_timeout_s)
        checked.positive_or_none("run_timeout_s", self.run_timeout_s)
        checked.text("hardware", self.hardware)


@dataclasses.dataclass(frozen=True)
class Task:
    """One candidate to measure: everything a process needs to know about it.

    Attributes:
      l2: what operands meet, as in `Bench`.
      incumbent_s: the fastest time so far, seconds: a candidate that is clearly slower gets fewer repetitions.
      raising: as in `Bench.measure`.
      fingerprint: of the candidate in the process that asks (`fingerprints.of_candidate`): what runs it confirms none
        of another; "" where nobody compares.
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
    """Where candidates run: in this process or in others.

    All that one runner measures is measured on one device, from `measure` to the last round of a final comparison
    (`measure` with `again`): times of two devices, though of one kind, are never compared. Who has several devices
    starts a runner for each, and gives each whole problems.

    Attributes:
      hardware: the chip they run on.
      environment: versions and date.
      slots: how many tasks may be under way at once, at most.
      searches: how many problems a job is best to search at once: while one's finalists are timed, candidates of the
        next compile.
    """

    hardware: Hardware
    environment: Environment
    slots: int
    searches: int

    def capacity(self, operation: Operation[Any], problem: Problem, l2: L2 = "cold") -> int:
        """How many tasks of `problem` may be under way at once: of those whose operands and results memory holds.

        Raises:
          NoCandidate: the device cannot hold one, and how much it lacks.
        """

    def holding(
        self, operation: Operation[Any], problem: Problem, l2: L2 = "cold", *, to_itself: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """Within it what was compiled for `problem` stays, whatever else is searched beside it. Blocks.

        A thread asks of no other problem within. What is asked without it may have to be compiled again.

        Args:
          to_itself: with no other problem beside it, for which whoever asks has only so many seconds.

        Raises:
          NoCandidate: as `capacity`.
        """

    def measure(self, task: Task, *, again: bool = False) -> Outcome:
        """Compiles, verifies and times one candidate; `again` only times it where it is still compiled. Blocks."""

    def confirm(self, task: Task) -> Failure | None:
        """Why a measured candidate is wrong for other inputs or on the neighbour of the problem, or None. Blocks.

        When it returns, the candidate is ready to be timed again.
        """

    def others(self) -> int:
        """How many other processes are on the device now, as far as can be told."""

    def close(self) -> None:
        """Ends all there is. Where `measure` blocks in another thread, it may raise a WorkerError."""


@runtime_checkable
class CompilesAhead(Protocol):
    """A runner with processes that compile while others measure."""

    def compile_ahead(self, task: Task) -> None:
        """Has a process compile what `confirm` of this task runs, once. Does not block."""


class InProcess:
    """Candidates run here, one at a time: for devices that processes cannot share, and operations only known here."""

    slots = searches = 1

    def __init__(self) -> None:
        self.hardware = chips.detect()
        self.environment = environment(driver="")
        self._benches = BenchesAtHand[tuple[Operation[Any], Problem, L2]](
            lambda what: Bench(what[0], what[1], self.hardware, l2=what[2])
        )

    def capacity(self, operation: Operation[Any], problem: Problem, l2: L2 = "cold") -> int:
        if self.hardware.abilities.host_memory:
            require_memory(operation, problem, Gpu.none().free_bytes)
        return 1

    def holding(
        self, operation: Operation[Any], problem: Problem, l2: L2 = "cold", *, to_itself: bool = False
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

    def confirm(self, task: Task) -> Failure | None:
        what = task.operation, task.problem, task.l2
        return self._benches.ask(what, lambda bench: bench.confirm(task.backend, task.schedule))

    def others(self) -> int:
        return 0  # of a CPU there is no list of users

    def close(self) -> None:
        self._benches.drop()


def environment(driver: str) -> Environment:
    """Of what is measured from now on."""
    return Environment(
        jax=importlib.metadata.version("jax"),
        jaxlib=importlib.metadata.version("jaxlib"),
        driver=driver,
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


def require_memory(operation: Operation[Any], problem: Problem, free_bytes: int) -> None:
    """Raises NoCandidate where so much memory holds not even the operands and the results of `problem`."""
    if (least := least_bytes(problem)) > free_bytes:
        raise NoCandidate(
            f"{operation.name} {problem}: its operands and result take {least / GIB:.4g} GiB of memory, and the "
            f"device has {free_bytes / GIB:.3g} GiB for them"
        )
