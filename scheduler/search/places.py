"""Executors of a job's problems ("places"): their interface, and local devices that implement it."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from scheduler.core.errors import DeviceLost, PlaceLost, WorkerError
from scheduler.core.hardware import Hardware
from scheduler.core.progress import Progress
from scheduler.core.records import Record
from scheduler.measure.compilers import Compilers, count_of
from scheduler.measure.pool import start_runner
from scheduler.measure.runner import Runner, RunnerOptions
from scheduler.search import tuner
from scheduler.search.task import How, Task
from scheduler.search.trials import Keeper
from search_spaces.operation import Operation


class Place(Protocol):
    """Tunes whole problems, each on one device from its first trial to the end of its final comparison.

    Only one thread at a time calls `open` or `close`. Up to `searches` threads call `search`, always between two calls
    of `open`. `close` may be called while another thread is in `open` or `search`.

    Attributes:
      name: for messages: "GPU 2".
      hardware: the chip; set by `open`.
      searches: number of problems tuned at once; set by `open`.
    """

    name: str
    hardware: Hardware
    searches: int

    def open(self) -> None:
        """Starts the processes that run candidates, unless they are running. Blocks.

        It is also called after `search` raised `PlaceLost`.

        Raises:
          SchedulerError: the place cannot start; it is not used again.
        """

    def search(self, task: Task, how: How, store: Keeper, progress: Callable[[Progress], None]) -> Record:
        """Searches one problem without reading its record in `store`; the caller holds the lease. Blocks.

        Args:
          store: has earlier trials and similar problems. On return it has all trials and the record, as far as writes
            succeeded. Only this process writes to it.
          progress: called before the first trial and after each, from any thread.

        Raises:
          PlaceLost: the place was lost, for reasons unrelated to the problem: retry the problem at another place.
          SchedulerError: as `tuner.tune`; the problem failed.
        """

    def close(self) -> None:
        """Closes the place for good. Running searches raise an error soon."""


class Device:
    """A local device: one runner, started on first use.

    Args:
      start: starts the runner.
      name: for messages.
      owned: whether the runner is closed with the place.
      compilers: compile processes shared by the places of a host; each place closes them once.
    """

    def __init__(
        self,
        start: Callable[[], Runner],
        name: str = "the device",
        *,
        owned: bool = True,
        compilers: Compilers | None = None,
    ) -> None:
        self.name = name
        self.hardware: Hardware
        self.searches = 1
        self._start, self._owned, self._compilers = start, owned, compilers
        self._lock = threading.Lock()
        self._runner: Runner | None = None
        self._closed = False

    @classmethod
    def of(cls, runner: Runner) -> Device:
        """Returns the place of a runner that the caller has started and will close."""
        return cls(lambda: runner, owned=False)

    @classmethod
    def for_(
        cls,
        operation: Operation[Any],
        options: RunnerOptions | None = None,
        name: str = "the device",
        compilers: Compilers | None = None,
    ) -> Device:
        """Returns the device of `options`, run in other processes if those can load `operation`."""
        return cls(lambda: start_runner(operation, options, compilers), name, compilers=compilers)

    def open(self) -> None:
        if self._runner is not None:
            return
        runner = self._start()
        with self._lock:
            self._runner = runner
        if self._closed:  # closed while the runner was starting
            self._end(runner)
            raise WorkerError(f"{self.name} was closed")
        self.hardware, self.searches = runner.hardware, runner.searches

    def search(self, task: Task, how: How, store: Keeper, progress: Callable[[Progress], None]) -> Record:
        if (runner := self._runner) is None:  # lost, as another search has found
            raise PlaceLost(f"{self.name} was lost")
        try:
            runner.capacity(task.operation, task.problem, how.l2)  # raises if the problem does not fit in memory
            return tuner.search(
                task.operation,
                task.problem,
                runner,
                backends=task.backends,
                first_error=how.first_error,
                budget=task.budget,
                seconds=task.seconds,
                seed=how.seed,
                sampler=how.sampler,
                l2=how.l2,
                store=store,
                progress=progress,
                first=task.first,
                brief=task.brief,
            )
        except WorkerError as error:
            ended = self._runner is not runner and not self._closed  # by another search, after the device was lost
            if not ended and not isinstance(error, DeviceLost):
                raise
            self._end(runner)
            raise PlaceLost(str(error)) from error

    def close(self) -> None:
        first, self._closed = not self._closed, True
        if (runner := self._runner) is not None:
            self._end(runner)
        if first and self._compilers is not None:
            self._compilers.close()

    def _end(self, runner: Runner) -> None:
        """Closes the runner, unless another thread has."""
        with self._lock:
            mine = self._runner is runner
            self._runner = None if mine else self._runner
        if mine and self._owned:
            runner.close()


def gpus(operation: Operation[Any], indices: Sequence[int], options: RunnerOptions | None = None) -> list[Device]:
    """Returns the visible GPUs with these indices. They share the compile processes of this host.

    Args:
      operation: one of the operations to tune.
      options: of the runner of each; `device` is ignored.
    """
    options = options or RunnerOptions()
    if len(indices) == 1:
        return [Device.for_(operation, dataclasses.replace(options, device=indices[0]), f"GPU {indices[0]}")]
    share = options.workers or max(1, count_of(None) // len(indices))
    compilers = Compilers(share * len(indices), users=len(indices))
    each = dataclasses.replace(options, workers=share)
    return [
        Device.for_(operation, dataclasses.replace(each, device=index), f"GPU {index}", compilers) for index in indices
    ]
