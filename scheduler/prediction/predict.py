"""predict(): selects a schedule without measuring, from the cost model and measurements of similar problems."""

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

# The minimum probability that a kernel is faster than the library, for it to be selected without measuring. At this
# value, the expected gain equals its standard deviation. From `benchmarks/no_search.py`, with no similar problem
# measured.
SURE = 0.84


@dataclasses.dataclass(frozen=True)
class Answer:
    """A prediction.

    Attributes:
      backend, schedule: the kernel and the schedule to run.
      predicted_s: the predicted time of the schedule, in seconds; the measured time if it is known.
      library_s: the same for the library kernel, in seconds.
      reason: why this schedule was selected, as text.
      neighbour: the similar problem with the record that corrects the model; "" if there was none.
      ranked: False if the kernel declares no footprint. Its time is then unknown, and `predicted_s` is the library's
        time.
      source: "record" if the problem itself was measured, "range" if it lies between two points of a range.
      faster: the probability that the best kernel is faster than the library, from the expected errors of both times;
        None if the problem was measured, or no kernel can be used.
      estimated: whether the record, or the records at the points of the range, are estimates of the compiler.
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
    """Returns, for each kernel, its pruned and ranked space, or why it does not support this problem here."""
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
    """Selects a schedule without measuring, among the schedules that were verified on the architecture.

    If one of `records` is of this problem and still valid, it is selected, as in a call.

    A kernel that competes with the library must have been verified on this architecture. It must be faster with a
    probability of at least `SURE`, given the errors of the model on measured problems. If `backends` excludes the
    library, the best prediction is selected; a kernel without a verified schedule may then use an unverified one.

    The record of the most similar problem, at most one doubling away, corrects the model in addition to the fitted
    constants. The correction is the remaining error of the model there, and shrinks with distance. The winner of that
    record is preferred here if it is legal and the model predicts no larger loss for it than it did there.

    Args:
      backends: the kernels that may be selected; None allows all.
      records: records of this operation on this chip; measurements take precedence over estimates.
      shared_only: use no constants of this user, which other processes of a job may not have.
      sure: the minimum probability, in place of `SURE`.
      fitted: the calibrations from measurements on this chip, by backend; None loads the stored ones.

    Raises:
      NoCandidate: no allowed kernel supports the problem, or none of its schedules fits.
    """
    sure = SURE if sure is None else sure
    allowed, records = allowed_backends(operation, backends), sorted(records, key=lambda record: record.estimated)
    if fitted is None:
        fitted = calibrations(operation.name, hardware, shared_only=shared_only)
    near = _nearest(operation, problem, records)
    library = operation.library
    # Standalone measurements of the library do not apply if XLA may fuse its program differently within a function.
    told = ({}, ()) if library.taken_apart else (fitted, near)
    best = choose(operation, library, problem, hardware, *told)
    assert not isinstance(best, str), "a library kernel has a program for every problem"
    library_s = best.predicted_s
    if (measured := _measured(operation, problem, hardware, records, allowed, library_s)) is not None:
        return measured
    found: Choice | None = None
    refused: dict[str, str] = {}
    unsupported: dict[str, str] = {}  # reported only if no kernel was refused for another reason
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
    """Returns the probability that the library takes longer.

    Errors of log time are assumed normal, and independent between the two.
    """
    gain = math.log(library.predicted_s / found.predicted_s)
    deviation = math.hypot(library.deviation, found.deviation)
    return (1 + math.erf(gain / (deviation * math.sqrt(2)))) / 2


def _nearest(operation: Operation[Any], problem: Problem, records: Sequence[Record]) -> list[Neighbour]:
    """Returns the nearest measured problems, or the nearest estimated ones if none was measured.

    Estimates would correct the model towards themselves.
    """
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
    """Returns the answer of the problem's own record, or None if there is no valid one.

    `library_s` is used if the library did not run in the record.
    """
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
