"""A device's memory in equal shares: which problems the workers hold, and which worker is asked of one."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from scheduler.core.errors import DeviceLost, WorkerError
from scheduler.core.hardware import Hardware
from scheduler.core.interrupts import WAKE_S
from scheduler.core.records import L2
from scheduler.measure.rotation import needed_bytes
from scheduler.measure.runner import require_memory
from scheduler.measure.worker_process import CONTEXT_BYTES, WorkerProcess
from search_spaces.operation import Operation
from search_spaces.problem import Problem

# So many candidates of a problem are tried with the whole device to themselves, and fail for lack of memory there.
MOST_ALONE = 2
# Who waits for a worker is told when there is one; it looks for itself once in a while.
RECHECK_S = 1.0

What = tuple[Operation[Any], Problem, L2]


class Shares:
    """How many workers hold a problem: as many as have the memory for its bench, fewer once that was too little."""

    def __init__(self, free_bytes: int, slots: int) -> None:
        self._free_bytes, self._slots = free_bytes, slots
        self._needed: dict[What, int] = {}
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
            needed = self._needed[what] = needed_bytes(problem, hardware, l2)
            self._most[what] = next(n for n in _fewer(self._slots) if n == 1 or needed <= self.bytes(n))
        return self._most[what]

    def hold(self, problems: Iterable[What], count: int) -> bool:
        """Whether each of `count` workers holds benches of all these problems, of which `holders` was asked before."""
        return sum(self._needed[what] for what in problems) <= self.bytes(count)

    def worth_trying_alone(self, what: What, among: int) -> bool:
        """Whether what lacked memory as one of `among` workers may find it alone."""
        return among > 1 and self._failed_alone[what] < MOST_ALONE

    def tried_alone(self, what: What, among: int, *, lacking: bool) -> None:
        """Told what became of that: it still lacked memory, or more is needed than a share of `among` workers."""
        if lacking:
            self._failed_alone[what] += 1
        else:
            self._most[what] = min(self._most[what], among * 2 // 3)


@dataclasses.dataclass(eq=False)
class _Waiting:
    """A request that waits for a worker, the only one where it is `alone`, or for a certain one."""

    what: What
    number: int
    alone: bool
    ready: threading.Condition
    certain: WorkerProcess | None = None


Rank = Callable[[WorkerProcess, _Waiting], tuple[bool, bool, bool, int, int]]


class Division:
    """The workers that are up, among which the memory is divided now, and the problems that are held.

    Problems are held together that as many workers hold, and a share has the memory for; others wait, in the order in
    which they came. Each has its part of the workers, and what others leave of theirs; of those that have theirs, a
    worker takes one that it has a bench of, then the oldest: a bench takes as long to make as a candidate or two. Who
    claims workers (finalists race where they were compiled) has them for its problem until that is no longer held, so
    that no timing waits for another problem's compilations.

    Args:
      workers: all there may be.
      shares: of the memory.
      holders: how many workers hold a problem now.
      forget: called as soon as a process is lost or started anew, with what it had compiled.
      stop: ends all processes, for who interrupts their start.
    """

    def __init__(
        self,
        workers: Sequence[WorkerProcess],
        shares: Shares,
        holders: Callable[[What], int],
        forget: Callable[[], None],
        stop: Callable[[], None],
    ) -> None:
        self._workers, self._shares, self._holders = workers, shares, holders
        self._forget, self._stop = forget, stop
        self._lock = threading.RLock()
        self._released = threading.Condition(self._lock)
        self._queue: list[object] = []  # who waits to hold a problem
        self._held: dict[What, int] = {}  # by how many; the first is the oldest
        self._to_itself = False  # whether what is held is to have none beside it
        self._waiting: list[_Waiting] = []
        self._numbers = itertools.count()
        self._count = 0  # among how many workers the memory is divided
        self._wanted = 0  # among how many it is to be, while something is held
        self._starting: set[WorkerProcess] = set()
        self._started = threading.Condition(self._lock)
        self._refusals: list[WorkerError] = []
        self._dividing = False  # and the lock is given away meanwhile
        self._busy: dict[WorkerProcess, What] = {}
        self._claims: dict[WorkerProcess, list[What]] = {}  # the first has it
        self._asked: collections.defaultdict[WorkerProcess, set[What]] = collections.defaultdict(set)
        self.living: set[WorkerProcess] = set()

    def start(self, count: int) -> None:
        """Starts so many workers, and waits for the first.

        Raises:
          DeviceLost: none of them starts.
        """
        with self._lock:
            self._divide(count)

    def settle(self) -> None:
        """Waits until no worker is starting any more."""
        with self._lock:
            while self._starting:
                self._started.wait(WAKE_S)

    def hold(self, what: What, *, to_itself: bool = False) -> None:
        """Waits until `what` can be held beside what is held already, or by itself; to be followed by `release`."""
        with self._lock:
            ticket = object()
            self._queue.append(ticket)
            try:
                while what not in self._held and (self._queue[0] is not ticket or not self._joins(what, to_itself)):
                    self._released.wait(WAKE_S)
            finally:
                self._queue.remove(ticket)
                self._released.notify_all()
            if not self._held:
                self._wanted, self._to_itself = self._holders(what), to_itself
            self._held[what] = self._held.get(what, 0) + 1

    def joins(self, what: What) -> bool:
        """Whether `hold` would not wait."""
        with self._lock:
            return what in self._held or (not self._queue and self._joins(what, to_itself=False))

    def release(self, what: What) -> None:
        with self._lock:
            self._held[what] -= 1
            if not self._held[what]:
                del self._held[what]
                for asked in self._asked.values():
                    asked.discard(what)
                claims = {worker: [each for each in by if each != what] for worker, by in self._claims.items()}
                self._claims = {worker: by for worker, by in claims.items() if by}
            self._released.notify_all()
            self._wake()

    def held(self) -> tuple[What, ...]:
        with self._lock:
            return tuple(self._held)

    @contextlib.contextmanager
    def worker(
        self,
        what: What,
        *,
        certain: Callable[[], WorkerProcess | None] = lambda: None,
        alone: bool = False,
    ) -> Iterator[tuple[WorkerProcess, int]]:
        """A worker to be asked of `what`, which is held, and among how many the memory is divided. Waits for it.

        Args:
          certain: which worker it must be, or None. Asked more than once: what it names may be lost in the meantime.
          alone: with the whole memory to itself. Who waits for that is waited for by the others.

        Raises:
          DeviceLost: no worker starts; or all were lost, and none could be started in the place of the last.
        """
        with self._lock:
            mine = _Waiting(what, next(self._numbers), alone, threading.Condition(self._lock))
            self._waiting.append(mine)
            found = None
            try:
                while (found := self._found(mine, certain)) is None:
                    mine.ready.wait(RECHECK_S)
                self._busy[found] = what
                self._asked[found].add(what)
                count = self._count
            finally:
                self._waiting.remove(mine)
                self._wake()
        try:
            yield found, count
        finally:
            with self._lock:
                del self._busy[found]
                self._wake()

    def claim(self, what: What, workers: Iterable[WorkerProcess]) -> None:
        """They are its problem's alone, once they have done what they are at, until it is no longer held.

        Those that another problem has claimed stay with that as long as it is held.
        """
        with self._lock:
            for worker in workers:
                if what not in (by := self._claims.setdefault(worker, [])):
                    by.append(what)

    def preferred(self, what: What) -> list[WorkerProcess]:
        """The living workers, first those that are its own, then those that were asked of it, those at rest first."""

        def rank(worker: WorkerProcess) -> tuple[bool, ...]:
            return self._owner(worker, None) != what, what not in self._asked[worker], worker in self._busy

        with self._lock:
            return sorted((worker for worker in self._workers if worker in self.living), key=rank)

    def lose(self, worker: WorkerProcess) -> None:
        """It is done without from now on."""
        with self._lock:
            self.living.discard(worker)
            self._forget()
            for waiting in self._waiting:  # perhaps for this one
                waiting.ready.notify()

    def _joins(self, what: What, to_itself: bool) -> bool:
        if not self._held or to_itself or self._to_itself:
            return not self._held
        return self._holders(what) == self._wanted and self._shares.hold((*self._held, what), self._wanted)

    def _found(self, mine: _Waiting, certain: Callable[[], WorkerProcess | None]) -> WorkerProcess | None:
        """The worker for this request, or None: then it waits."""
        if self._dividing or (not mine.alone and any(other.alone for other in self._waiting)):
            return None
        count = 1 if mine.alone else self._among()
        if self._count != count:
            if self._busy:
                return None
            self._divide(count)
        if not self.living:
            if self._starting:
                return None
            self._count = 0  # the next request tries to start them again
            raise DeviceLost("the worker processes were lost, and the device takes no new ones")
        mine.certain = certain()
        if mine.certain is not None:
            return None if mine.certain in self._busy else mine.certain
        rank = self._ranks()
        return next((worker for worker in self.preferred(mine.what) if self._may_take(worker, mine, rank)), None)

    def _among(self) -> int:
        """Among how many workers the memory is to be divided.

        What needs larger shares than were thought makes them larger for those beside it, too, and for as long as these
        are held: another division costs all that was compiled.
        """
        self._wanted = min([self._wanted, *map(self._holders, self._held)])
        return self._wanted

    def _wake(self) -> None:
        """Wakes those that can go on now, and as few others as may be: on a loaded host they would be in each
        other's way.
        """
        alone = [waiting for waiting in self._waiting if waiting.alone]
        if alone or self._count != self._among() or not self.living:
            for waiting in (alone or self._waiting)[:1]:
                waiting.ready.notify()
            return
        asleep, rank = list(self._waiting), self._ranks()
        for worker in self._workers:
            if worker in self.living and worker not in self._busy:
                serving = (w for w in asleep if w.certain in (None, worker) and self._serves(worker, w))
                if (first := min(serving, key=functools.partial(rank, worker), default=None)) is not None:
                    asleep.remove(first)
                    first.ready.notify()

    def _ranks(self) -> Rank:
        """In which order a worker takes requests, by what is held and under way now."""
        under_way, ages = collections.Counter(self._busy.values()), {what: age for age, what in enumerate(self._held)}
        part = -(-len(self.living) // max(1, len(ages)))

        def rank(worker: WorkerProcess, waiting: _Waiting) -> tuple[bool, bool, bool, int, int]:
            what = waiting.what
            new = what not in self._asked[worker]
            return waiting.certain is None, under_way[what] >= part, new, ages[what], waiting.number

        return rank

    def _serves(self, worker: WorkerProcess, waiting: _Waiting) -> bool:
        return waiting.certain is worker or self._owner(worker, waiting.what) == waiting.what

    def _owner(self, worker: WorkerProcess, default: What | None) -> What | None:
        return self._claims[worker][0] if worker in self._claims else default

    def _may_take(self, worker: WorkerProcess, mine: _Waiting, rank: Rank) -> bool:
        if worker in self._busy or not self._serves(worker, mine):
            return False
        if mine.alone:  # for which all others wait
            return True
        others = (other for other in self._waiting if other.certain is None and self._serves(worker, other))
        return all(rank(worker, mine) <= rank(worker, other) for other in others)

    def _divide(self, count: int) -> None:
        """Starts `count` workers in place of those there are, each with its share of the memory; the first is awaited.

        The others join as they come: a host makes one CUDA context after the other (`turns.few_at_once`).
        """
        self._dividing = True
        try:
            self._count = 0  # unless it succeeds, the next request tries again
            self.settle()
            self.living, self._refusals = set(), []
            self._claims.clear()
            self._asked.clear()
            self._forget()
            for worker in self._workers:
                worker.stop()
            self._starting = set(self._workers[:count])
            for worker in self._workers[:count]:
                begin = functools.partial(self._begin, worker, self._shares.bytes(count))
                threading.Thread(target=begin, name="scheduler-start", daemon=True).start()
            while self._starting and not self.living:
                self._started.wait(WAKE_S)
            if not self.living:
                raise DeviceLost(str(self._refusals[0])) from self._refusals[0]
            self._count = count
        except (KeyboardInterrupt, SystemExit):
            self._stop()
            raise
        finally:
            self._dividing = False

    def _begin(self, worker: WorkerProcess, share_bytes: int) -> None:
        """Starts a worker, in a thread of its own."""
        try:
            refused = worker.begin(share_bytes)
        except WorkerError as closed:
            refused = closed
        except Exception as defect:  # of a process that is ended meanwhile, too
            refused = WorkerError(f"a worker process did not start: {defect!r}")
        with self._lock:
            self._starting.discard(worker)
            if refused is None:
                self.living.add(worker)
            else:
                self._refusals.append(refused)
            self._started.notify_all()
            if not self._dividing:
                self._wake()


def _fewer(count: int) -> Iterator[int]:
    """`count`, two thirds of it, and so on down to 1: shares that problems of several sizes have in common."""
    while count:
        yield count
        count = count * 2 // 3
