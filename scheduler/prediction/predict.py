"""predict(): an answer without measuring, from the model and from what was measured of similar problems."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from scheduler.core.backends import allowed_backends
from scheduler.core.errors import NoCandidate
from scheduler.core.hardware import Hardware
from scheduler.core.identity import key_of
from scheduler.core.records import Calibration, Record, Schedule
from scheduler.model.constants import calibrations, model_of
from scheduler.model.pruning import Pruned, prune
from scheduler.prediction.choice import Choice, choose
from scheduler.prediction.transfer import TELLING, Neighbour, nearest
from scheduler.prediction.validation import recheck
from search_spaces.kernel import Kernel
from search_spaces.operation import Operation
from search_spaces.problem import Problem

# How probable it must be that a kernel is faster than the library for it to answer unmeasured: the gain that is
# expected is as large as its standard deviation. By `benchmarks/no_search.py`, where nothing near was measured.
SURE = 0.84


@dataclasses.dataclass(frozen=True)
class Answer:
    """A prediction.

    Attributes:
      backend, schedule: what to run.
      predicted_s: its predicted time, seconds; what was measured, where that is known.
      library_s: the same of the library's answer, seconds.
      reason: why this one, in words.
      neighbour: the similar problem whose record corrects the model; "" where there was none.
      ranked: False where its kernel declares no footprint: its time is then unknown, and the library's stands for it.
      source: "record" where the problem itself was measured, "range" where it lies between two points of one.
      faster: how probable it is that the best kernel is faster than the library, by the errors that are expected of
        both times; None where that was measured, or no kernel can answer.
      estimated: whether the record, or those at the points of the range, are the compiler's estimates.
    """

    backend: str
    schedule: Schedule
    predicted_s: float
    library_s: float
    reason: str
    neighbour: str = ""
    ranked: bool = True
    source: Literal["record", "range", "model"] = "model"
    faster: float | None = None
    estimated: bool = False


def explain(
    operation: Operation[Any], problem: Problem, hardware: Hardware
) -> list[tuple[Kernel[Any, Any], Pruned | str]]:
    """For each kernel, its space pruned and ranked, or why it cannot do this problem here."""
    return [
        (
            kernel,
            reason
            if (reason := kernel.supports(problem, hardware.target))
            else prune(kernel, problem, hardware, model_of(operation, kernel, hardware)),
        )
        for kernel in operation.kernels
    ]


def predict(
    operation: Operation[Any],
    problem: Problem,
    hardware: Hardware,
    *,
    backends: frozenset[str] | None = None,
    records: Iterable[Record] = (),
    shared_only: bool = False,
    sure: float | None = None,
    fitted: Mapping[str, Calibration] | None = None,
) -> Answer:
    """The top prediction, without measuring anything, among the schedules that were verified on the architecture.

    Where one of `records` is of this problem and still holds, it is the answer, as it is for a call.

    A kernel that competes with the library must have been verified on this architecture, and be faster with a
    probability of at least `SURE`, by the errors that the model made on measured problems; where `backends` leaves the
    library out, the best prediction is the answer, and a kernel without a verified schedule gives one that is not.

    Args:
      backends: the kernels that may answer; None allows all.
      records: of this operation on this chip; what was measured goes before estimates. The one of the most similar
        problem, at most a doubling away, corrects the model beside what was fitted: by what that still got wrong there,
        less so the farther that problem is; and the winner there is the first choice here where it is legal and the
        model does not object to it more than it did there.
      shared_only: use no constants of the user's own, which other processes of a job may not have.
      sure: that probability, where another is wanted.
      fitted: by backend, what was fitted to measurements on this chip; None takes what is stored.

    Raises:
      NoCandidate: no allowed kernel supports the problem, or none of its schedules fits.
    """
    sure = SURE if sure is None else sure
    allowed, records = allowed_backends(operation, backends), sorted(records, key=lambda record: record.estimated)
    if fitted is None:
        fitted = calibrations(operation.name, hardware, shared_only=shared_only)
    near = _nearest(operation, problem, records)
    library = operation.library
    # What was measured of it alone says nothing of what it does within a function where it is taken apart.
    told = ({}, ()) if library.taken_apart else (fitted, near)
    best = choose(operation, library, problem, hardware, *told)
    assert not isinstance(best, str), "a library kernel has a program for every problem"
    library_s = best.predicted_s
    if (measured := _measured(operation, problem, hardware, records, allowed, library_s)) is not None:
        return measured
    found: Choice | None = None
    refused: dict[str, str] = {}
    unsupported: dict[str, str] = {}  # of no interest where another kernel is for this chip and this problem
    for kernel in operation.kernels:
        if kernel.backend not in allowed or kernel.library:
            continue
        if reason := kernel.supports(problem, hardware.target):
            unsupported[kernel.backend] = reason
        elif library.backend in allowed and hardware.architecture not in kernel.verified_on:
            refused[kernel.backend] = f"not verified on {hardware.architecture}"
        else:
            needed = library.backend not in allowed
            choice = choose(operation, kernel, problem, hardware, fitted, near, needed=needed)
            if isinstance(choice, str):
                refused[kernel.backend] = choice
            elif found is None or choice.predicted_s < found.predicted_s:
                found = choice
    if found is None:
        why = _words(refused or unsupported)
        if library.backend not in allowed:
            raise NoCandidate(f"no kernel of {operation.name} can do {problem} on {hardware.kind}: {why}")
        reason = why or "the library is the only kernel"
        return Answer(library.backend, {}, library_s, library_s, reason, best.neighbour)
    gain, faster = library_s / found.predicted_s, _probability_of_gain(best, found)
    if library.backend in allowed and faster < sure:
        reason = f"the model expects a gain over the library with {faster:.0%}, and {sure:.0%} is wanted"
        return Answer(library.backend, {}, library_s, library_s, reason, best.neighbour, faster=faster)
    reason = "the top prediction"
    if library.backend in allowed:
        reason = f"the model expects {gain:.2f}x the library's speed, and a gain with {faster:.0%}"
    return Answer(
        backend=found.backend,
        schedule=found.schedule,
        predicted_s=found.predicted_s,
        library_s=library_s,
        reason=f"{reason}{found.words}",
        neighbour=found.neighbour,
        ranked=found.ranked,
        faster=faster,
    )


def _probability_of_gain(library: Choice, found: Choice) -> float:
    """That the library takes longer: errors in log time are normal, and those of the two independent."""
    gain = math.log(library.predicted_s / found.predicted_s)
    deviation = math.hypot(library.deviation, found.deviation)
    return (1 + math.erf(gain / (deviation * math.sqrt(2)))) / 2


def _nearest(operation: Operation[Any], problem: Problem, records: Sequence[Record]) -> list[Neighbour]:
    """Those that were measured; estimates, which correct the model towards themselves, for want of any."""
    for estimated in (False, True):
        alike = [record for record in records if record.estimated is estimated]
        if near := nearest(operation, problem, alike, within=TELLING):
            return near
    return []


def _measured(
    operation: Operation[Any],
    problem: Problem,
    hardware: Hardware,
    records: Iterable[Record],
    allowed: frozenset[str],
    library_s: float,
) -> Answer | None:
    """What the problem's own record says, where there is one that holds; `library_s` counts where that did not run."""
    key = key_of(operation, problem, hardware)
    for record in records:
        entry = recheck(operation, problem, hardware, record, backends=allowed) if record.key == key else "another's"
        if isinstance(entry, str):
            continue
        library, ours_s = record.best(frozenset({operation.library.backend})), entry.measurement.median_s
        library_s = library_s if library is None else library.measurement.median_s
        gain = "" if entry == library else f", at {library_s / ours_s:.2f}x the library's speed"
        how = "estimated by the compiler, not measured," if record.estimated else "measured"
        reason = f"{how} on {record.environment.date[:10]}{gain}"
        return Answer(
            entry.backend, entry.schedule, ours_s, library_s, reason, source="record", estimated=record.estimated
        )
    return None


def _words(refused: Mapping[str, str]) -> str:
    return "; ".join(f"{backend}: {reason}" for backend, reason in refused.items())
