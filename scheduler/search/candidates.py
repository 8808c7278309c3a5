"""Among which schedules a search chooses: those that can run and that the model ranks first, and a few for a reason."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from scheduler.core.identity import Point, Versioned, point_of, versioned
from scheduler.core.records import Entry, Schedule
from scheduler.measure.runner import Runner
from scheduler.model.constants import model_of
from scheduler.model.pruning import Candidate, prune
from scheduler.prediction.transfer import Neighbour
from search_spaces.operation import Operation
from search_spaces.problem import Problem

# Of the legal schedules, the search chooses among this share that the model ranks first, but never among too few.
KEPT_SHARE = 0.25
KEPT_PER_TRIAL = 4
# The library's programs are left out where they cannot come nearer than this to what the model expects of a kernel: one
# that writes gigabytes between its kernels (attention of long sequences) would take most of a search's time and memory.
OUT_OF_REACH = 1.5


@runtime_checkable
class Recorded(Protocol):
    """A runner that measures nothing: it tells what was measured once, and of some schedules only."""

    def version(self, backend: str, schedule: Schedule) -> int | None:
        """The kernel version that was measured with this schedule, or None where it was not."""

    def fingerprint(self, backend: str, schedule: Schedule) -> str:
        """That of the trial of this schedule; "" where it has none."""


@dataclasses.dataclass(frozen=True)
class Candidates:
    """What a search chooses among.

    Attributes:
      of: the candidates, the library's programs first, unless they are `OUT_OF_REACH`: whatever ends the search early,
        there is something to compare with. Others are named by their place here.
      seeds: vendors' programs, which are to be beaten as the library's are; what was asked for; and the winners of
        similar problems, the nearest problem's first.
      size: schedules of the whole spaces, before any rule.
      dropped: reason -> how many of these it removed.
      versions: backend -> kernel version, of every backend that competes.
    """

    of: Sequence[Candidate]
    seeds: Sequence[int]
    size: int
    dropped: Mapping[str, int]
    versions: Mapping[str, int]


def collect(
    operation: Operation[Any],
    problem: Problem,
    runner: Runner,
    *,
    allowed: frozenset[str],
    budget: int,
    known: Collection[Versioned],
    near: Sequence[Neighbour],
    first: Sequence[Point] = (),
) -> Candidates:
    """The candidates of a search of `budget` trials.

    Args:
      allowed: the backends that compete beside the library's.
      known: what has a trial already, and stays whatever the model ranks first.
      near: similar problems with their records, whose winners stay, too.
      first: what stays and is tried before these, where it is legal.
    """
    candidates: list[Candidate] = []
    dropped: collections.Counter[str] = collections.Counter()
    versions: dict[str, int] = {}
    size = 0
    won = list(map(versioned, _winners(near, besides=operation.library.backend)))
    stay, asked = {*known, *won}, set(first)
    for kernel in sorted(operation.kernels, key=lambda kernel: not kernel.library):
        if kernel.backend not in allowed and not kernel.library:
            continue
        if reason := kernel.supports(problem, runner.hardware.target):
            dropped[f"{kernel.backend}: {reason}"] += 1
            continue
        pruned = prune(kernel, problem, runner.hardware, model_of(operation, kernel, runner.hardware))
        ranked = pruned.candidates()
        legal = _measured(ranked, runner) if isinstance(runner, Recorded) else ranked
        if len(legal) < len(ranked):
            dropped["not in the recording"] += len(ranked) - len(legal)
        keep = max(KEPT_PER_TRIAL * budget, int(KEPT_SHARE * len(legal))) if pruned.ranked else len(legal)
        candidates += [c for rank, c in enumerate(legal) if rank < keep or versioned(c) in stay or _point(c) in asked]
        size += pruned.size
        dropped.update(pruned.dropped)
        versions[kernel.backend] = legal[0].version if legal else kernel.version
    if not runner.hardware.abilities.interpreted:
        reach_s = OUT_OF_REACH * min((c.predicted_s for c in candidates if not c.library), default=math.inf)
        beyond = [c for c in candidates if c.library and c.floor_s > reach_s and versioned(c) not in known]
        dropped.update(f"{c.backend}: cannot win, by the bytes that it moves" for c in beyond)
        candidates = [c for c in candidates if c not in beyond]
    place = {versioned(candidate): i for i, candidate in enumerate(candidates)}
    vendors = {kernel.backend for kernel in operation.kernels if kernel.vendor}
    points = {_point(candidate): versioned(candidate) for candidate in candidates}
    leading = [versioned(c) for c in candidates if c.backend in vendors]
    leading += [*(points[point] for point in first if point in points), *won]
    seeds = [place[which] for which in dict.fromkeys(leading) if which in place]
    return Candidates(candidates, seeds, size, dropped, versions)


def _point(candidate: Candidate) -> Point:
    return point_of(candidate.backend, candidate.schedule)


def _measured(legal: Iterable[Candidate], recording: Recorded) -> list[Candidate]:
    """Those that a recording can tell about, as of the kernel version that it knows."""
    versions = ((candidate, recording.version(candidate.backend, candidate.schedule)) for candidate in legal)
    return [dataclasses.replace(candidate, version=version) for candidate, version in versions if version is not None]


def _winners(near: Sequence[Neighbour], *, besides: str) -> Iterable[Entry]:
    """The best entry of each backend but one of each of these problems, the nearest problem's first."""
    for neighbour in near:
        for backend in dict.fromkeys(entry.backend for entry in neighbour.record.entries if entry.backend != besides):
            if (entry := neighbour.best(backend)) is not None:
                yield entry
