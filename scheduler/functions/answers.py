"""Finds a record for each problem of a function, and tunes problems without one until the time limit."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from scheduler.core import fingerprints, text
from scheduler.core.errors import SchedulerError
from scheduler.core.hardware import Hardware
from scheduler.core.plan import Planned
from scheduler.core.progress import Progress
from scheduler.core.records import Entry, Record, key_of
from scheduler.functions.equations import ProblemCount
from scheduler.measure.pool import start_runner
from scheduler.measure.runner import Runner
from scheduler.prediction.predict import predict
from scheduler.prediction.transfer import recheck
from scheduler.search import tuner
from scheduler.store.cache import Cache
from scheduler.store.store import Store
from search_spaces.operation import Operation
from search_spaces.space import DeclarationError

logger = logging.getLogger("scheduler")
# Remaining searches are skipped if together they could save less than this share of a call.
MIN_GAIN = 0.005
# A kernel slower than the fastest library by at most this share, timed alone, may still be faster inside a function.
# XLA may split a program there that it fuses when compiled alone (the gradient of SiLU-and-mul on an H200: 135 us
# alone, 337 us within a training step), and the clock frequency follows power. The share is smaller than the slowdown
# that `verify --plan` accepts.
NEAR = 0.02


@dataclasses.dataclass(frozen=True)
class Search:
    """Options for tuning problems without a record.

    Attributes:
      store: Where tuned records are read, and trials and records are written.
      seconds: Time limit of all searches together.
      budget: Trials of each search.
      progress: Called after each trial with the problem as text.
    """

    store: Store | Cache
    seconds: float
    budget: int
    progress: Callable[[str, Progress], None] | None = None


@dataclasses.dataclass(frozen=True)
class Known:
    """The fastest kernel and library for one problem, each timed alone.

    Attributes:
      best: The fastest allowed backend; None if there is no record, or if a library is the fastest.
      library: The fastest of XLA's programs, and of a vendor's programs if allowed; None if none was measured.
      reason: Why `best` is None.
      contender: The fastest kernel, if a library is the fastest and the kernel is within `NEAR` of it.
    """

    row: ProblemCount
    best: Entry | None = None
    library: Entry | None = None
    reason: str = ""
    contender: Entry | None = None

    @property
    def kernel(self) -> Entry | None:
        """The kernel that may replace the library inside a function."""
        return self.best or self.contender

    @property
    def library_s(self) -> float:
        """Seconds of the fastest library per call of the function; 0 if none was measured."""
        return 0.0 if self.library is None else self.row.count * self.library.measurement.median_s

    @property
    def gain_s(self) -> float:
        """Seconds that `best` saves per call of the function."""
        if self.best is None or self.library is None:
            return 0.0
        return self.row.count * (self.library.measurement.median_s - self.best.measurement.median_s)

    def planned(self, *, kernel: bool, reason: str) -> Planned:
        """Returns the plan's entry: the kernel if `kernel` is set, otherwise the fastest library."""
        operation = self.row.operation
        chosen = self.kernel if kernel else self.library
        return Planned(
            operation.name,
            self.row.problem.canonical(),
            operation.library.backend if chosen is None else chosen.backend,
            operation.library.version if chosen is None else chosen.version,
            {} if chosen is None else dict(chosen.schedule),
            self.row.count,
            reason,
            None if self.kernel is None else self.kernel.measurement.median_s,
            None if self.library is None else self.library.measurement.median_s,
            operation.library.backend if self.library is None else self.library.backend,
            operation.library.version if self.library is None else self.library.version,
            {} if self.library is None else dict(self.library.schedule),
            "" if chosen is None else chosen.fingerprint,
            fingerprints.of_reference(operation, self.row.problem),
        )


def known(
    rows: Sequence[ProblemCount],
    hardware: Hardware,
    backends_of: Callable[[Operation[Any]], frozenset[str] | None],
    search: Search,
    step_s: Callable[[], float],
) -> list[Known]:
    """Returns the fastest candidates of each problem, in order, after tuning problems without a valid record.

    Problems with the largest possible gain are tuned first.

    Args:
      backends_of: Returns the backends allowed for an operation.
      step_s: Returns seconds per call of the function. Called once, and only if a problem has to be tuned.
    """
    found: dict[int, Known] = {}
    left: list[tuple[float, int]] = []
    for i, row in enumerate(rows):
        record = _record(row, hardware, backends_of(row.operation), search.store)
        if record is not None:
            found[i] = of_record(row, record, backends_of(row.operation))
        else:
            left.append((_max_gain_s(row, hardware), i))
    left.sort(key=lambda each: -each[0])
    with _runner() as runner_for:
        # The model cannot predict interpreted kernels.
        least_s = MIN_GAIN * step_s() if left and not hardware.abilities.interpreted else 0.0
        until = time.perf_counter() + search.seconds
        while left:
            row, remaining_s = rows[left[0][1]], until - time.perf_counter()
            if remaining_s <= 0:
                reason = "not tuned: the time for searches was over"
            elif sum(gain for gain, _ in left) < least_s:
                reason = f"not tuned: all searches left would save less than {MIN_GAIN:.1%} of a call"
            else:
                found[left.pop(0)[1]] = _tuned(row, backends_of(row.operation), search, remaining_s, runner_for)
                continue
            found |= {i: Known(rows[i], reason=reason) for _, i in left}
            break
    return [found[i] for i in range(len(rows))]


def of_record(row: ProblemCount, record: Record, backends: frozenset[str] | None) -> Known:
    """Returns the fastest candidates of a record among these backends. None allows all."""
    best = record.winner if backends is None else record.best(backends)
    vendors = {kernel.backend for kernel in row.operation.kernels if kernel.vendor}
    libraries = {record.library} | (vendors if backends is None else vendors & backends)
    library = record.best(frozenset(libraries))
    if best is None or best.backend in libraries:
        others = {entry.backend for entry in record.entries} - libraries
        contender = record.best(frozenset(others if backends is None else others & backends))
        if contender is not None and library is not None:
            near_s = (1 + NEAR) * library.measurement.median_s
            contender = contender if contender.measurement.median_s <= near_s else None
        reason = f"{best.backend if best else record.library} is the fastest alone"
        return Known(row, None, library, reason, contender)
    return Known(row, best, library)


def _record(
    row: ProblemCount, hardware: Hardware, backends: frozenset[str] | None, store: Store | Cache
) -> Record | None:
    key = key_of(row.operation, row.problem, hardware)
    records: Iterator[Record | None]
    if isinstance(store, Cache):
        records = (record for _, record in store.find(key, shared_only=False))
    else:
        records = iter((store.get(key),))
    for record in records:
        if record is not None and isinstance(
            recheck(row.operation, row.problem, hardware, record, backends=backends), Entry
        ):
            return record
    return None


def _max_gain_s(row: ProblemCount, hardware: Hardware) -> float:
    """Returns an upper bound of the seconds saved per call: XLA's predicted time minus the roofline's."""
    return row.count * predict(row.operation, row.problem, hardware).library_s - row.least_s


@contextlib.contextmanager
def _runner() -> Iterator[Callable[[Operation[Any]], Runner]]:
    """Provides one runner for all searches, started by the first search."""
    runners: list[Runner] = []

    def runner_for(operation: Operation[Any]) -> Runner:
        if not runners:
            runners.append(start_runner(operation))
        return runners[0]

    try:
        yield runner_for
    finally:
        for runner in runners:
            runner.close()


def _tuned(
    row: ProblemCount,
    backends: frozenset[str] | None,
    search: Search,
    seconds: float,
    runner_for: Callable[[Operation[Any]], Runner],
) -> Known:
    name = f"{row.operation.name} {row.problem}"
    logger.info("tuning %s, %d times a call", name, row.count)
    runner, progress = runner_for(row.operation), search.progress
    try:
        record = tuner.tune(
            row.operation,
            row.problem,
            backends=backends,
            budget=search.budget,
            seconds=seconds,
            store=search.store,
            runner=runner,
            progress=None if progress is None else lambda step: progress(name, step),
        )
    except (SchedulerError, DeclarationError) as error:
        reason = str(error).partition("\n")[0]
        text.warn_safely(f"{name} is not tuned: {reason} (XLA is used)")
        return Known(row, reason=f"not tuned: {reason}")
    return of_record(row, record, backends)
