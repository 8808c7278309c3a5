"""Candidates of one problem timed in turns on the same buffers, in processes that chose none of them."""

from __future__ import annotations

import dataclasses
import itertools
import random
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from harness import told
from torch_process import TORCH, TorchProcess

from scheduler.core.interrupts import Threads
from scheduler.core.records import Entry, Failure, Measurement, Outcome, Trial
from scheduler.measure import timer
from scheduler.measure.gpu import Gpu
from scheduler.measure.pool import Pool
from scheduler.measure.runner import InProcess, Runner, RunnerOptions, Task
from search_spaces import Operation, Problem

# Of each candidate in each round.
REPETITIONS = 10
# XLA tries algorithms out while it compiles, and picks one in this process and another in the next: a library's time is
# that of so many compilations, each in a process of its own.
LIBRARY_COMPILATIONS = 5


@dataclasses.dataclass(frozen=True)
class Candidate:
    """What is timed, if it is no entry of a record and no trial."""

    backend: str
    version: int
    schedule: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Timed:
    """What the rounds showed.

    Attributes:
      rounds: name -> its times in each round, of those that ran in all of them.
      failures: name -> why it did not.
    """

    rounds: Mapping[str, tuple[Measurement, ...]]
    failures: Mapping[str, Failure]

    def times(self, name: str) -> Measurement | None:
        """All its repetitions, or None where it failed or took no part."""
        return timer.join(self.rounds[name]) if name in self.rounds else None


def times_of(name: str, measured: Measurement | None) -> dict[str, Any]:
    """What a row says of a candidate's times: their median and each in microseconds, and where operands were."""
    return {
        f"{name}_us": measured and measured.median_s * 1e6,
        f"{name}_samples_us": measured and [round(sample * 1e6, 3) for sample in measured.samples_s],
        f"{name}_l2": measured and measured.l2,
    }


class FreshProcesses:
    """A runner of several measuring processes on one GPU: libraries are measured by each in turn, others by the first.

    Args:
      gpu: whose memory the processes share equally.
      count: of measuring processes.
    """

    searches = 1

    def __init__(self, gpu: Gpu, count: int = LIBRARY_COMPILATIONS) -> None:
        each = dataclasses.replace(gpu, free_bytes=gpu.free_bytes // count)
        self._pools: list[Pool] = []
        try:
            for _ in range(count):
                self._pools.append(Pool(each, RunnerOptions(workers=1, keep_programs=False)))
        except BaseException:
            self.close()
            raise
        first = self._pools[0]
        self.hardware, self.environment, self.slots = first.hardware, first.environment, first.slots
        self.capacity, self.reserve, self.confirm = first.capacity, first.reserve, first.confirm
        self._libraries = itertools.cycle(self._pools)

    def measure(self, task: Task, *, again: bool = False) -> Outcome:
        library = task.operation.kernel(task.backend).library
        return (next(self._libraries) if library else self._pools[0]).measure(task, again=again)

    def others(self) -> int:
        return max(0, self._pools[0].others() - len(self._pools) + 1)

    def close(self) -> None:
        for pool in self._pools:
            pool.close()


class WithTorch:
    """A runner that leaves candidates of the backend "torch" to a process of torch, and others to `fresh`.

    Args:
      request: what `torch` is asked for a task, besides its repetitions.
    """

    def __init__(self, fresh: Runner, torch: TorchProcess, request: Callable[[Task], Mapping[str, Any]]) -> None:
        self._fresh, self._torch, self._request = fresh, torch, request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fresh, name)

    def measure(self, task: Task, *, again: bool = False) -> Outcome:
        if task.backend != TORCH:
            return self._fresh.measure(task, again=again)
        samples = self._torch.seconds({**self._request(task), "repetitions": task.repetitions})
        if isinstance(samples, str):
            return Failure("time", samples)
        return Measurement(statistics.median(samples), tuple(samples), "cupti", "cold")

    def close(self) -> None:
        self._torch.close()
        self._fresh.close()


def start_fresh() -> Runner:
    """Fresh processes: as many as a library is compiled in, or this one where there is no GPU.

    Raises:
      WorkerError: the processes cannot start.
    """
    gpu = Gpu.wanted()
    return InProcess() if gpu is None else FreshProcesses(gpu)


def conditions(
    operation: Operation[Any],
    problem: Problem,
    candidates: Mapping[str, Candidate | Entry | Trial],
    fresh: Runner,
    rounds: int,
) -> dict[str, Any]:
    """All that such times depend on."""
    return {
        "operation": operation.name,
        "problem": told(problem),
        "device": fresh.hardware.id,
        "jax": fresh.environment.jax,
        "jaxlib": fresh.environment.jaxlib,
        "driver": fresh.environment.driver,
        "rounds": rounds,
        "repetitions": REPETITIONS,
        "candidates": {
            name: {"backend": one.backend, "version": one.version, "schedule": dict(one.schedule)}
            for name, one in candidates.items()
        },
    }


def time_in_rounds(runner: Runner, tasks: Mapping[str, Task], rounds: int) -> Timed:
    """Verifies the candidates, then times them in rounds, in another random order each.

    Names of one and the same task share its measurements. Their operation and problem are one, so that a process never
    has to make room for another's operands. A candidate that fails leaves; the others go on.
    """
    leaders: dict[str, str] = {}
    for name, task in tasks.items():
        leaders[name] = next((other for other in leaders.values() if tasks[other] == task), name)
    running = list(dict.fromkeys(leaders.values()))
    failures: dict[str, Failure] = {}

    def failed(name: str, outcome: Outcome) -> bool:
        if isinstance(outcome, Failure):
            failures[name] = outcome
            running.remove(name)
        return isinstance(outcome, Failure)

    with Threads[str, Outcome](runner.slots, runner.close) as threads:
        for name, outcome in threads.map(lambda name: runner.measure(tasks[name]), list(running)):
            failed(name, outcome)
    samples: dict[str, list[Measurement]] = {name: [] for name in running}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(running, len(running)):
            outcome = runner.measure(tasks[name], again=True)
            if not failed(name, outcome):
                assert isinstance(outcome, Measurement)
                samples[name].append(outcome)
    return Timed(
        {name: tuple(samples[leader]) for name, leader in leaders.items() if leader not in failures},
        {name: failures[leader] for name, leader in leaders.items() if leader in failures},
    )
