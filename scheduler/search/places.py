"""Where the problems of a job are tuned: what such a place promises; devices of this host as such places."""

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
    """Where whole problems are tuned, each on one device from its first trial to the end of its final comparison.

    `open` and `close` are asked by one thread at a time; `search` by as many as `searches` says, all between two
    `open`; `close` also while another thread is in `open` or `search`.

    Attributes:
      name: for messages: "GPU 2".
      hardware: the chip; known once it is open.
      searches: how many problems it tunes at once; known once it is open.
    """

    name: str
    hardware: Hardware
    searches: int

    def open(self) -> None:
        """Starts what candidates run in, where that is not there; also after `search` raised `PlaceLost`. Blocks.

        Raises:
          SchedulerError: it does not start, and why: nothing more is asked of this place.
        """

    def search(self, task: Task, how: How, store: Keeper, progress: Callable[[Progress], None]) -> Record:
        """Searches one problem, whatever `store` holds and whoever else is at it: the caller holds its lease. Blocks.

        Args:
          store: knows earlier trials and similar problems. When this returns, it has all trials and the record, as far
            as it takes them; this process writes them, never another.
          progress: called before the first trial and after each, from any thread.

        Raises:
          PlaceLost: the place went away, which tells nothing of the problem: another place is asked for it.
          SchedulerError: as `tuner.tune`; what failed is the problem.
        """

    def close(self) -> None:
        """Ends all there is, for good. Searches under way raise an error soon."""


class Device:
    """A device of this host: one runner, started when it is first needed.

    Args:
      start: starts the runner.
      name: for messages.
      owned: whether the runner is ended with the place.
      compilers: compile processes that the places of a host share; each closes them once.
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
        """Where a runner is that somebody else has started, and will end."""
        return cls(lambda: runner, owned=False)

    @classmethod
    def for_(
        cls,
        operation: Operation[Any],
        options: RunnerOptions | None = None,
        name: str = "the device",
        compilers: Compilers | None = None,
    ) -> Device:
        """The device of `options`, by other processes where those can load `operation`."""
        return cls(lambda: start_runner(operation, options, compilers), name, compilers=compilers)

    def open(self) -> None:
        if self._runner is not None:
            return
        runner = self._start()
        with self._lock:
            self._runner = runner
        if self._closed:  # meanwhile
            self._end(runner)
            raise WorkerError(f"{self.name} was closed")
        self.hardware, self.searches = runner.hardware, runner.searches

    def search(self, task: Task, how: How, store: Keeper, progress: Callable[[Progress], None]) -> Record:
        if (runner := self._runner) is None:  # another search has found that it is lost
            raise PlaceLost(f"{self.name} was lost")
        try:
            runner.capacity(task.operation, task.problem, how.l2)  # or the memory holds none, and nothing need be asked
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
            ended = self._runner is not runner and not self._closed  # by another search, which has lost it
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
        """Ends it, unless another thread has."""
        with self._lock:
            mine = self._runner is runner
            self._runner = None if mine else self._runner
        if mine and self._owned:
            runner.close()


def gpus(operation: Operation[Any], indices: Sequence[int], options: RunnerOptions | None = None) -> list[Device]:
    """The GPUs of these indices among the visible ones, which share the compile processes of this host.

    Args:
      operation: one of those that are tuned.
      options: of the runner of each; `device` is none of them.
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
