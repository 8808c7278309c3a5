"""A device's memory in equal shares: how many workers hold a problem, and the workers that are up for that."""

from __future__ import annotations

import collections
import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from scheduler.core.errors import WorkerError
from scheduler.core.hardware import Hardware
from scheduler.core.records import L2
from scheduler.core.threads import WAKE_S, Threads
from scheduler.measure.bench import needed_bytes
from scheduler.measure.runner import require_memory
from scheduler.measure.worker_process import CONTEXT_BYTES, WorkerProcess
from search_spaces.operation import Operation
from search_spaces.problem import Problem

# So many candidates of a problem are tried with the whole device to themselves, and fail for lack of memory there.
MOST_ALONE = 2

What = tuple[Operation[Any], Problem, L2]


class Shares:
    """How many workers hold a problem: as many as have the memory for its bench, fewer once that was too little."""

    def __init__(self, free_bytes: int, slots: int) -> None:
        self._free_bytes, self._slots = free_bytes, slots
        self._most: dict[What, int] = {}
        self._failed_alone: collections.Counter[What] = collections.Counter()

    def bytes(self, count: int) -> int:
        """The share of each of `count` workers."""
        return self._free_bytes // count - CONTEXT_BYTES

    def holders(self, what: What, hardware: Hardware) -> int:
        """How many workers hold a bench of it, one at least; raises as `Runner.capacity` does."""
        operation, problem, l2 = what
        if what not in self._most:
            require_memory(operation, problem, self.bytes(1))
            needed = needed_bytes(problem, hardware, l2)
            self._most[what] = next(n for n in _fewer(self._slots) if n == 1 or needed <= self.bytes(n))
        return self._most[what]

    def worth_trying_alone(self, what: What, among: int) -> bool:
        """Whether what lacked memory as one of `among` workers may find it alone."""
        return among > 1 and self._failed_alone[what] < MOST_ALONE

    def tried_alone(self, what: What, among: int, *, lacking: bool) -> None:
        """Told what became of that: it still lacked memory, or more is needed than a share of `among` workers."""
        if lacking:
            self._failed_alone[what] += 1
        else:
            self._most[what] = min(self._most[what], among * 2 // 3)


class Division:
    """The workers that are up, among which the memory is divided now.

    Args:
      workers: all there may be.
      shares: of the memory.
      forget: called as soon as a process is lost or started anew, with what it had compiled.
      stop: ends all processes, for who interrupts their start.
    """

    def __init__(
        self,
        workers: Sequence[WorkerProcess],
        shares: Shares,
        forget: Callable[[], None],
        stop: Callable[[], None],
    ) -> None:
        self._workers, self._shares, self._forget, self._stop = workers, shares, forget, stop
        self._idle = threading.Condition()
        self._busy = self._count = 0  # requests under way; among how many workers the memory is divided
        self._free: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        self.living: set[WorkerProcess] = set()

    @contextlib.contextmanager
    def among(self, count: int) -> Iterator[None]:
        """Within it the memory is divided among `count` workers; waits for requests under way in another division.

        Raises:
          WorkerError: none of them starts.
        """
        with self._idle:
            while self._busy and self._count != count:
                self._idle.wait(WAKE_S)
            if self._count != count:
                self._divide(count)
            self._busy += 1
        try:
            yield
        finally:
            with self._idle:
                self._busy -= 1
                self._idle.notify_all()

    def take(self) -> WorkerProcess:
        """A worker that is free, until it is put back. Waits for it.

        Raises:
          WorkerError: all processes were lost, and none could be started in the place of the last.
        """
        while self.living:
            with contextlib.suppress(queue.Empty):
                return self._free.get(timeout=WAKE_S)
        self._count = 0  # the next request tries to start them again
        raise WorkerError("the worker processes were lost, and the device takes no new ones")

    def put_back(self, worker: WorkerProcess) -> None:
        self._free.put(worker)

    def lose(self, worker: WorkerProcess) -> None:
        """It is done without from now on."""
        self.living.discard(worker)
        self._forget()

    def _divide(self, count: int) -> None:
        """Starts `count` workers in place of those there are, each with its share of the memory."""
        self._count = 0  # unless it succeeds, the next request tries again
        self.living, self._free = set(), queue.SimpleQueue()
        self._forget()
        for worker in self._workers:
            worker.stop()
        refusals = []
        share_bytes = self._shares.bytes(count)
        with Threads[WorkerProcess, WorkerError | None](count, self._stop) as starters:
            for worker, refused in starters.map(lambda worker: worker.begin(share_bytes), self._workers[:count]):
                if refused is not None:
                    refusals.append(refused)
                else:
                    self.living.add(worker)
                    self._free.put(worker)
        if not self.living:
            raise refusals[0]
        self._count = count


def _fewer(count: int) -> Iterator[int]:
    """`count`, two thirds of it, and so on down to 1: shares that problems of several sizes have in common."""
    while count:
        yield count
        count = count * 2 // 3
