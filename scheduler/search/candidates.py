"""Selects the candidates of a search: legal schedules that the model ranks first, and seeds such as known winners."""

from __future__ import annotations

import collections
import dataclasses
import heapq
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from scheduler.core import fingerprints
from scheduler.core.arguments import allowed_backends
from scheduler.core.hardware import Hardware
from scheduler.core.records import Entry, Point, Schedule, Versioned, point_of, versioned
from scheduler.core.text import warn_safely
from scheduler.measure.runner import Runner, Task
from scheduler.model.constants import model_of
from scheduler.model.cost import CostModel
from scheduler.model.pruning import Candidate, Pruned, prune
from scheduler.prediction.transfer import Neighbour
from scheduler.search.task import Task as SearchTask
from search_spaces.operation import Operation
from search_spaces.problem import Problem

# The share of the legal schedules, ranked by the model, that become candidates, and the minimum number per trial.
KEPT_SHARE = 0.25
KEPT_PER_TRIAL = 4
# A library program is dropped if its lower bound exceeds the best predicted kernel time by this factor. A program that
# writes gigabytes between its kernels (attention of long sequences) would take most of a search's time and memory.
OUT_OF_REACH = 1.5


@runtime_checkable
class Recorded(Protocol):
    """A runner that replays a recording and has times for some schedules only."""

    def version(self, backend: str, schedule: Schedule) -> int | None:
        """Returns the kernel version measured with this schedule, or None if it was not measured."""


@dataclasses.dataclass(frozen=True)
class Candidates:
    """The candidates of a search.

    Attributes:
      of: the candidates. The library's programs come first, unless they are `OUT_OF_REACH`, so that even a search that
        ends early has a baseline. Other fields refer to candidates by index.
      seeds: candidates to try first: vendors' programs, which are baselines like the library's; requested schedules;
        and the winners of similar problems, nearest problem first.
      size: number of schedules in all spaces, before any rule.
      dropped: reason -> number of schedules it removed.
      versions: backend -> kernel version, for every competing backend.
      notes: why no kernel has a legal schedule, for the record; empty if one has.
    """

    of: Sequence[Candidate]
    seeds: Sequence[int]
    size: int
    dropped: Mapping[str, int]
    versions: Mapping[str, int]
    notes: tuple[str, ...] = ()


def collect(
    search: SearchTask,
    runner: Runner,
    known: Collection[Versioned] = (),
    near: Sequence[Neighbour] = (),
    first: Sequence[Point] = (),
) -> Candidates:
    """Returns the candidates of a search.

    Args:
      known: candidates that already have a trial. They are kept whatever their rank.
      near: similar problems with their records. Their winners are also kept.
      first: schedules that are kept and tried before those winners, if they are legal.
    """
    operation, problem, options = search.operation, search.problem, search.options
    allowed = allowed_backends(operation, options.backends)
    candidates: list[Candidate] = []
    dropped: collections.Counter[str] = collections.Counter()
    versions: dict[str, int] = {}
    empty: dict[str, str] = {}
    size = 0
    won = list(map(versioned, _winners(near, besides=operation.library.backend)))
    always_kept, requested = {*known, *won}, set(first)
    for kernel in sorted(operation.kernels_on(runner.hardware.target.platform), key=lambda kernel: not kernel.library):
        if kernel.backend not in allowed and not kernel.library:
            continue
        if reason := kernel.supports(problem, runner.hardware.target):
            dropped[f"{kernel.backend}: {reason}"] += 1
            continue
        pruned = prune(kernel, problem, runner.hardware, model_of(operation, kernel, runner.hardware))
        if not (ranked := pruned.candidates()) and not kernel.library:
            empty[kernel.backend] = _obstacles(pruned)
        legal = _measured(ranked, runner) if isinstance(runner, Recorded) else ranked
        if len(legal) < len(ranked):
            dropped["not in the recording"] += len(ranked) - len(legal)
        keep = max(KEPT_PER_TRIAL * options.budget, int(KEPT_SHARE * len(legal))) if pruned.ranked else len(legal)
        candidates += [
            c for rank, c in enumerate(legal) if rank < keep or versioned(c) in always_kept or _point(c) in requested
        ]
        size += pruned.size
        dropped.update(pruned.dropped)
        versions[kernel.backend] = legal[0].version if legal else kernel.version
    notes = []
    if empty and empty.keys() == versions.keys() - {operation.library.backend}:
        notes.append(f"no schedule is legal: {'; '.join(empty.values())}")
        warn_safely(f"{operation.name} {problem}: {notes[0]}")
    if not runner.hardware.abilities.interpreted:
        reach_s = OUT_OF_REACH * min((c.predicted_s for c in candidates if not c.library), default=math.inf)
        beyond = [c for c in candidates if c.library and c.floor_s > reach_s and versioned(c) not in known]
        dropped.update(f"{c.backend}: cannot win, by the bytes that it moves" for c in beyond)
        candidates = [c for c in candidates if c not in beyond]
    place = {versioned(candidate): i for i, candidate in enumerate(candidates)}
    vendors = {kernel.backend for kernel in operation.kernels_on(runner.hardware.target.platform) if kernel.vendor}
    points = {_point(candidate): versioned(candidate) for candidate in candidates}
    leading = [versioned(c) for c in candidates if c.backend in vendors]
    leading += [*(points[point] for point in first if point in points), *won]
    seeds = [place[which] for which in dict.fromkeys(leading) if which in place]
    return Candidates(candidates, seeds, size, dropped, versions, tuple(notes))


def _obstacles(pruned: Pruned) -> str:
    """Describes why a space without a legal schedule has none."""
    reasons = [f"{count} of {pruned.size} break the rule {reason!r}" for reason, count in pruned.dropped.items()]
    if len(reasons) == 1:
        return f"every one of {pruned.size} breaks the rule {next(iter(pruned.dropped))!r}"
    return ", ".join(reasons) or "a choice has no values"


def traced_by(operation: Operation[Any], problem: Problem, runner: Runner) -> fingerprints.Tracer:
    """Returns a function from a schedule to its fingerprint; "" for a kernel with a version number.

    The runner traces each schedule once.
    """
    traced: dict[Point, str] = {}

    def fingerprint(which: fingerprints.Chosen) -> str:
        if operation.kernel(which.backend).version != fingerprints.BY_PROGRAM:
            return ""
        if (point := _point(which)) not in traced:
            traced[point] = runner.fingerprint(Task(operation, problem, which.backend, which.schedule, 1))
        return traced[point]

    return fingerprint


def reference(operation: Operation[Any], problem: Problem, runner: Runner) -> str:
    """Returns the fingerprint of the reference, or "" for a recording."""
    return "" if isinstance(runner, Recorded) else fingerprints.of_reference(operation, problem)


def legal_schedules(operation: Operation[Any], problem: Problem, runner: Runner) -> str:
    """Returns the fingerprint of the legal schedules, or "" for a recording."""
    return "" if isinstance(runner, Recorded) else fingerprints.of_legal(operation, problem, runner.hardware.target)


class EqualPrograms:
    """The candidates of a search that are the same program: schedules of a kernel without a version number.

    Args:
      of: the candidates, with all fields in their schedules.
      fingerprint: of the candidate of an index; "" for a kernel with a version number.
      known: candidates that have a trial.
    """

    def __init__(self, of: Sequence[Candidate], fingerprint: Callable[[int], str], known: Iterable[int] = ()) -> None:
        self._of, self._fingerprint = of, fingerprint
        self._program: dict[int, str] = {}
        self._same: dict[tuple[str, str], list[int]] = collections.defaultdict(list)
        for index in known:
            self(index)

    def __call__(self, index: int) -> Sequence[int]:
        """Returns the candidates seen so far that are the program of this one, which it counts as seen; in order."""
        if index not in self._program:
            found = self._fingerprint(index)
            if not found or found.startswith("raises"):  # each has a message of its own
                found = str(index)
            self._program[index] = found
            self._same[self._of[index].backend, found].append(index)
        return self._same[self._of[index].backend, self._program[index]]

    def warn_of_unused(self, name: str) -> None:
        """Warns of each choice that gave one program for all of its values, whatever the others were."""
        for backend in dict.fromkeys(self._of[index].backend for index in self._program):
            seen = {i: self._of[i].schedule for i in self._program if self._of[i].backend == backend}
            for choice in dict.fromkeys(field for schedule in seen.values() for field in schedule):
                values = {repr(c.schedule.get(choice)) for c in self._of if c.backend == backend}
                of_others: dict[str, dict[str, str]] = collections.defaultdict(dict)
                for i, schedule in seen.items():
                    others = repr(sorted((field, x) for field, x in schedule.items() if field != choice))
                    of_others[others][repr(schedule.get(choice))] = self._program[i]
                one_program = all(len(set(found.values())) == 1 for found in of_others.values())
                if len(values) > 1 and one_program and any(found.keys() == values for found in of_others.values()):
                    warn_safely(
                        f"the {backend} kernel of {name} is the same program for all values of {choice} "
                        f"({', '.join(sorted(values))}): use {choice} in the kernel, or declare no such choice"
                    )


def _point(candidate: fingerprints.Chosen) -> Point:
    return point_of(candidate.backend, candidate.schedule)


def _measured(legal: Iterable[Candidate], recording: Recorded) -> list[Candidate]:
    """Returns the candidates that a recording has times for, with the recorded kernel version."""
    versions = ((candidate, recording.version(candidate.backend, candidate.schedule)) for candidate in legal)
    return [dataclasses.replace(candidate, version=version) for candidate, version in versions if version is not None]


def _winners(near: Sequence[Neighbour], *, besides: str) -> Iterable[Entry]:
    """Yields the best entry of each backend except `besides` for each problem, nearest problem first."""
    for neighbour in near:
        for backend in dict.fromkeys(entry.backend for entry in neighbour.record.entries if entry.backend != besides):
            if (entry := neighbour.best(backend)) is not None:
                yield entry


# ------------------------------------------------------------------------------
# Estimates the duration of a search in Pallas interpret mode from the kernels' footprints, before it starts, and finds
# a problem that is small enough.

# Cost of a step in Pallas interpret mode on one core, measured on matmuls of 256^3 to 2048^3: a minimum time, a pass
# over all arrays at this bandwidth, and arithmetic at this rate. Other kernels differ by less than matters here, which
# is to tell minutes from hours.
STEP_S = 20e-6
BYTES_PER_S = 20e9
FLOPS_PER_S = 15e9


def search_seconds(
    operation: Operation[Any],
    problem: Problem,
    hardware: Hardware,
    *,
    backends: frozenset[str],
    budget: int,
    calls: int,
    finalists: int,
    calls_of_finalist: int,
) -> float:
    """Returns a lower bound of the duration of a search: it assumes the candidates that are quickest to interpret.

    Args:
      backends: of the kernels that take part.
      budget: maximum number of candidates, each called `calls` times.
      finalists: number of candidates that are called `calls_of_finalist` more times.
    """
    launches: list[float] = []
    for kernel in operation.kernels_on(hardware.target.platform):
        if not kernel.library and kernel.backend in backends and kernel.supports(problem, hardware.target) is None:
            points = prune(kernel, problem, hardware, CostModel(hardware)).points
            footprint = kernel.footprint(problem, points, hardware.target)
            least_s = STEP_S + problem.bytes_moved / BYTES_PER_S
            if footprint is None:  # the time of a single step
                launches += [least_s + problem.flops / FLOPS_PER_S] * len(points)
                continue
            demand, blocks = footprint.mean_step, np.prod(np.broadcast_arrays(*footprint.grid), axis=0)
            step_s = least_s + np.asarray(demand.flops + demand.fp32_ops) / FLOPS_PER_S
            launches += np.broadcast_to(blocks * footprint.steps * step_s, (len(points),)).tolist()
    quickest = heapq.nsmallest(budget, launches)
    return calls * sum(quickest) + calls_of_finalist * sum(quickest[:finalists])


def smaller(problem: Problem, fits: Callable[[Problem], bool]) -> Problem | None:
    """Halves the largest extent until the problem `fits`, and returns that problem; None if none fits."""
    while True:
        extents = {name: value for name, value in vars(problem).items() if type(value) is int and value > 1}
        if not extents:
            return None
        name = max(extents, key=extents.__getitem__)
        try:
            problem = dataclasses.replace(problem, **{name: extents[name] // 2})
            if fits(problem):
                return problem
        except (TypeError, ValueError):  # not a valid problem
            return None
