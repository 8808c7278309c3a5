"""predict(): selects a schedule without measuring, from the cost model and measurements of similar problems."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from scheduler.core.arguments import allowed_backends
from scheduler.core.errors import NoCandidate
from scheduler.core.hardware import Hardware
from scheduler.core.records import Calibration, Entry, Record, Schedule, key_of, variant_of
from scheduler.model.constants import (
    BETWEEN_CHIPS,
    MIN_RESIDUALS,
    ProblemPoint,
    calibrations,
    model_of,
    residuals_of,
    sibling_of,
)
from scheduler.model.cost import CostModel
from scheduler.model.pruning import Pruned, counted, illegal, is_verified, prune
from scheduler.prediction.transfer import TELLING, Neighbour, nearest, recheck
from search_spaces.kernel import Kernel
from search_spaces.operation import Operation
from search_spaces.problem import Problem
from search_spaces.space import Columns

# ------------------------------------------------------------------------------
# Selects a schedule of one kernel without measuring, and predicts its time and the error of the prediction.

# Predictions closer than this ratio do not determine the faster schedule; the measured winner of a neighbour is
# preferred.
TIE = 1.02
# How many predictions are searched for the first schedule of a measured variant.
PASSED_OVER = 1000
# The distance, in doublings, up to which the winner of a tuned problem is used without estimating the chance of a gain:
# half of the largest distance between two points of a tuned range (`task.points`).
SERVED = 0.5


@dataclasses.dataclass(frozen=True)
class Choice:
    """A schedule of one kernel, selected without measuring.

    Attributes:
      backend, schedule: the kernel and the schedule to run.
      predicted_s: its time in seconds, corrected by measurements.
      deviation: standard deviation of the logarithm of its time.
      neighbour: the similar problem with the record that was used; "" if there was none.
      words: a text that describes how that record was used.
      ranked: False if the kernel declares no footprint.
    """

    backend: str
    schedule: Schedule
    predicted_s: float
    deviation: float
    neighbour: str = ""
    words: str = ""
    ranked: bool = True


def choose(
    operation: Operation[Any],
    kernel: Kernel[Any, Any],
    problem: Problem,
    hardware: Hardware,
    fitted: Mapping[str, Calibration],
    near: Sequence[Neighbour],
    *,
    needed: bool = False,
) -> Choice | str:
    """Selects a schedule of one kernel, using the nearest problem with a record of it; or returns why there is none.

    The schedule is a verified one, and of a measured variant if any variant was measured. If there is none and `needed`
    is set, any legal schedule may be selected.

    Args:
      fitted: the calibrations from measurements on this chip or a sibling, by backend.
      near: similar problems with their records, on this chip or a sibling, nearest first.
      needed: allow an unverified schedule if there is no verified one.
    """
    model = model_of(operation, kernel, hardware, found=fitted)
    pruned = prune(kernel, problem, hardware, model, keep=1, verified=not kernel.library)
    if not len(pruned.points) and needed:
        pruned = prune(kernel, problem, hardware, model, keep=1)
    if not len(pruned.points):
        return f"none of {pruned.size} schedules is left: {counted(pruned.dropped)}"
    residuals = residuals_of(operation, kernel, fitted)
    error, deviation = residuals.at(ProblemPoint(problem, float(pruned.predicted_s[0])))
    if kernel.library:
        deviation = math.hypot(deviation, model.library_spread(problem))
    sibling = sibling_of(fitted.get(kernel.backend), hardware)
    if sibling:
        deviation = math.hypot(deviation, BETWEEN_CHIPS)
    corrections = (_neighbour_correction(operation, kernel, neighbour, fitted) for neighbour in near)
    closest = next((one for one in corrections if one is not None), None)
    schedule: Schedule | None = None
    near_by, words = "", f" (from {sibling}, scaled)" if sibling else ""
    if closest is not None:
        # The remaining error there, which the fit does not explain, weighted by half for each doubling. Times of a
        # sibling do not correct a factor that was measured on this chip.
        corrects = bool(sibling) or closest.neighbour.hardware == hardware
        if corrects:
            error += closest.neighbour.weight * (closest.error - residuals.at(closest.place)[0])
        near_by = str(closest.neighbour.problem)
        at = f"{near_by}, {closest.neighbour.doublings:.1f} doublings away"
        record = closest.neighbour.record
        at += ", estimated" if record.estimated else ", imported" if record.imported else ""
        at += f", from {closest.neighbour.hardware.kind}, scaled" if closest.neighbour.hardware != hardware else ""
        words = f" (corrected by the times of {at})" if corrects else ""
        here = modelled_s(kernel, problem, hardware, model, closest.entry.schedule)
        checked = here is not None and (needed or is_verified(kernel, problem, hardware, closest.entry.schedule))
        if not kernel.library and here is not None and checked and here <= closest.objection * pruned.predicted_s[0]:
            schedule, words = closest.entry.schedule, f" (with the schedule of {at})"
    elif not pruned.ranked:
        words = ", the first of its schedules, because it declares no footprint"
    if schedule is None:
        schedule = _first(kernel, problem, hardware, model, pruned, _variants(kernel, fitted), needed)
    if schedule is None:
        return "no measured variant of the kernel is legal for the problem"
    predicted_s = float(pruned.predicted_s[0]) * math.exp(error)
    return Choice(kernel.backend, schedule, predicted_s, deviation, near_by, words, pruned.ranked)


@dataclasses.dataclass(frozen=True)
class _NeighbourCorrection:
    """A neighbour's record of a kernel: the error of the model there, and the model's loss for the winner."""

    neighbour: Neighbour
    entry: Entry
    place: ProblemPoint
    error: float
    objection: float


def _neighbour_correction(
    operation: Operation[Any], kernel: Kernel[Any, Any], neighbour: Neighbour, fitted: Mapping[str, Calibration]
) -> _NeighbourCorrection | None:
    """Returns the correction by a neighbour, against the model of the neighbour's chip; None if none applies."""
    hardware, entry = neighbour.hardware, neighbour.best(kernel.backend)
    if entry is None or entry.version != kernel.version or kernel.supports(neighbour.problem, hardware.target):
        return None
    model = model_of(operation, kernel, hardware, found=fitted)
    there = modelled_s(kernel, neighbour.problem, hardware, model, entry.schedule)
    if there is None:
        return None
    favourite = float(prune(kernel, neighbour.problem, hardware, model, keep=1).predicted_s[0])
    error = math.log(entry.measurement.median_s / favourite)
    objection = max(TIE, (there / favourite) ** neighbour.weight)
    return _NeighbourCorrection(neighbour, entry, ProblemPoint(neighbour.problem, favourite), error, objection)


def _variants(kernel: Kernel[Any, Any], fitted: Mapping[str, Calibration]) -> Sequence[str]:
    """Returns the measured variants; empty if there are too few measurements to exclude other variants."""
    found = fitted.get(kernel.backend)
    enough = found is not None and found.version == kernel.version and found.problems >= MIN_RESIDUALS
    return found.variants if found is not None and enough else ()


def _first(
    kernel: Kernel[Any, Any],
    problem: Problem,
    hardware: Hardware,
    model: CostModel,
    pruned: Pruned,
    variants: Sequence[str],
    needed: bool,
) -> Schedule | None:
    """Returns the best ranked schedule of a measured variant, or of any variant if none was measured.

    Returns None if none of these is legal. The model may rank an unmeasured variant first because of its own error: a
    variant that splits k over clusters takes 18.9 us for 200 x 4096 x 4096, and 14.7 us were predicted (H200).
    """
    if not variants or not pruned.ranked or variant_of(pruned.points.row(0)) in variants:
        return pruned.schedule(0)
    whole = prune(kernel, problem, hardware, model, keep=PASSED_OVER, verified=True)
    rows = (index for index in range(len(whole.points)) if variant_of(whole.points.row(index)) in variants)
    for index in itertools.islice(rows, 1):
        return whole.schedule(index)
    return pruned.schedule(0) if needed else None


def modelled_s(
    kernel: Kernel[Any, Any], problem: Problem, hardware: Hardware, model: CostModel, schedule: Schedule
) -> float | None:
    """Returns the predicted time of one schedule in seconds; None if it is not legal."""
    if illegal(kernel, problem, hardware, schedule) is not None:
        return None
    if kernel.library:
        return model.library_seconds(problem)
    one = Columns.of([kernel.space(problem, hardware.target).decode(schedule)])
    footprint = kernel.footprint(problem, one, hardware.target)
    return model.library_seconds(problem) if footprint is None else float(np.ravel(model.seconds(footprint))[0])


# A kernel is selected without measuring if its expected loss is at most this share of its expected gain, both against
# the library that would run otherwise (`benchmarks/no_search.py`, docs/experiments.md).
LOSS_PER_GAIN = 0.35


@dataclasses.dataclass(frozen=True)
class Prospect:
    """The gain of one choice over another: a normal distribution in log time, errors of both being independent.

    Attributes:
      mean, deviation: of the gain.
    """

    mean: float
    deviation: float

    @classmethod
    def of(cls, other: Choice, choice: Choice) -> Prospect:
        mean = math.log(other.predicted_s / choice.predicted_s)
        return cls(mean, math.hypot(other.deviation, choice.deviation))

    @property
    def probability(self) -> float:
        """The probability of a gain."""
        return (1 + math.erf(self.mean / (self.deviation * math.sqrt(2)))) / 2

    @property
    def loss_per_gain(self) -> float:
        """The expected loss over the expected gain: ``E[max(-x, 0)] / E[max(x, 0)]``."""
        z = self.mean / self.deviation
        density = math.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
        loss = max(density - z * (1 - self.probability), 0.0)
        gain = max(density + z * self.probability, 0.0)
        return loss / gain if gain else math.inf


@dataclasses.dataclass(frozen=True)
class Answer:
    """A prediction.

    Attributes:
      backend, schedule: the kernel and the schedule to run.
      predicted_s: the predicted time of the schedule, in seconds; the measured time if it is known.
      library_s: the same for the library kernel, in seconds.
      otherwise, otherwise_s: the library that would run instead, XLA or the vendor's if it is predicted to be faster,
        and its time in seconds; "" and None if the problem was measured.
      reason: why this schedule was selected, as text.
      neighbour: the similar problem with the record that corrects the model; "" if there was none.
      ranked: False if the kernel declares no footprint. Its time is then unknown, and `predicted_s` is the library's
        time.
      source: "record" if the problem itself was measured.
      faster: the probability that the best kernel is faster than `otherwise`, from the expected errors of both times;
        None if the problem or a near one (`SERVED`) was measured, or no kernel can be used.
      precedence: the `Record.precedence` of that record.
      loss_per_gain: the expected loss of the best kernel over its expected gain; None like `faster`.
    """

    backend: str
    schedule: Schedule
    predicted_s: float
    library_s: float
    reason: str
    neighbour: str = ""
    ranked: bool = True
    source: Literal["record", "model"] = "model"
    faster: float | None = None
    precedence: int = 0
    otherwise: str = ""
    otherwise_s: float | None = None
    loss_per_gain: float | None = None

    @property
    def estimated(self) -> bool:
        """Whether the times are estimates of the compiler."""
        return self.precedence >= 2


def explain(
    operation: Operation[Any], problem: Problem, hardware: Hardware
) -> list[tuple[Kernel[Any, Any], Pruned | str]]:
    """Returns, for each kernel, its pruned and ranked space, or why it does not support this problem here."""
    target = hardware.target
    return [
        (k, k.supports(problem, target) or prune(k, problem, hardware, model_of(operation, k, hardware)))
        for k in operation.kernels
    ]


def predict(
    operation: Operation[Any],
    problem: Problem,
    hardware: Hardware,
    *,
    backends: frozenset[str] | None = None,
    records: Iterable[Record] = (),
    shared_only: bool = False,
    loss_per_gain: float | None = None,
    fitted: Mapping[str, Calibration] | None = None,
) -> Answer:
    """Selects a schedule without measuring, among the schedules that were verified on the architecture.

    If one of `records` is of this problem and still valid, it is selected, as in a call.

    A kernel that competes with the library must have been verified on this architecture. The library that would run
    otherwise is XLA, or the vendor's if it is allowed and predicted to be faster. A kernel is selected if its expected
    loss against that library is at most `LOSS_PER_GAIN` of its expected gain, given the errors of the model on measured
    problems. If `backends` excludes XLA, the best prediction is selected; a kernel without a verified schedule may then
    use an unverified one.

    If a problem at most `SERVED` doublings away was tuned on this chip, its winner is selected, if it is legal here and
    not predicted to be slower than the library.

    The record of the most similar problem, at most one doubling away, corrects the model in addition to the fitted
    constants. The correction is the remaining error of the model there, and shrinks with distance. The winner of that
    record is preferred here if it is legal and the model predicts no larger loss for it than it did there.

    Args:
      backends: the kernels that may be selected; None allows all.
      records: records of this operation on this chip or a sibling; the lowest `Record.precedence` comes first.
      shared_only: use no constants of this user, which other processes of a job may not have.
      loss_per_gain: the maximum ratio, in place of `LOSS_PER_GAIN`; 1 needs no more than an expected gain.
      fitted: the calibrations from measurements on this chip or a sibling, by backend; None loads the stored ones.

    Raises:
      NoCandidate: no allowed kernel supports the problem, or none of its schedules fits.
    """
    most = LOSS_PER_GAIN if loss_per_gain is None else loss_per_gain
    allowed, records = allowed_backends(operation, backends), sorted(records, key=lambda record: record.precedence)
    if fitted is None:
        fitted = calibrations(operation.name, hardware, shared_only=shared_only)
    near = _nearest(operation, problem, hardware, records)
    library = operation.library
    # Standalone measurements of the library do not apply if XLA may fuse its program differently within a function.
    evidence = ({}, ()) if library.loses_ties else (fitted, near)
    best = choose(operation, library, problem, hardware, *evidence)
    assert not isinstance(best, str), "a library kernel has a program for every problem"
    library_s = best.predicted_s
    if (measured := _measured(operation, problem, hardware, records, allowed, library_s)) is not None:
        return measured
    if (tuned := _tuned_near(operation, problem, hardware, near, allowed, fitted)) is not None:
        return tuned
    vendors: list[Choice] = []
    found: Choice | None = None
    refused: dict[str, str] = {}
    target = hardware.target
    for kernel in operation.kernels_on(target.platform):
        if kernel.backend not in allowed or kernel.library or kernel.supports(problem, target):
            continue
        if library.backend in allowed and hardware.architecture not in kernel.verified_on:
            refused[kernel.backend] = f"not verified on {hardware.architecture}"
        else:
            needed = library.backend not in allowed
            choice = choose(operation, kernel, problem, hardware, fitted, near, needed=needed)
            if isinstance(choice, str):
                refused[kernel.backend] = choice
            elif kernel.vendor and not needed:
                vendors.append(choice)
            elif found is None or choice.predicted_s < found.predicted_s:
                found = choice
    otherwise = min((best, *vendors), key=lambda choice: choice.predicted_s)
    if found is None and otherwise is best:
        others = (kernel for kernel in operation.kernels if not refused and kernel.backend in allowed)
        why = _words(refused or {k.backend: reason for k in others if (reason := k.supports(problem, target))})
        if library.backend not in allowed:
            raise NoCandidate(f"no kernel of {operation.name} supports {problem} on {hardware.kind}: {why}")
        reason = why or "the library is the only kernel"
        return Answer(
            library.backend,
            {},
            library_s,
            library_s,
            reason,
            best.neighbour,
            otherwise=best.backend,
            otherwise_s=library_s,
        )
    prospect = None if found is None else Prospect.of(otherwise, found)
    name = "the library" if otherwise is best else otherwise.backend
    selected = found
    if library.backend not in allowed:
        reason = "the top prediction"
    elif found is not None and prospect is not None and prospect.loss_per_gain <= most:
        reason = f"the model expects {math.exp(prospect.mean):.2f}x the speed of {name}"
        reason += f", and a gain with probability {prospect.probability:.0%}"
    else:
        selected, reason = otherwise, f"the model expects no kernel to be faster than {name}"
        if prospect is not None and prospect.probability >= 0.005:
            reason = f"the model expects a gain over {name} with probability {prospect.probability:.0%}, and a loss of "
            reason += f"{prospect.loss_per_gain:.2f} of the gain, above {most:.2f}"
        if otherwise is not best:
            reason = f"{library_s / otherwise.predicted_s:.2f}x the library's speed; {reason}"
    assert selected is not None, "with the library excluded, there was a kernel"
    return Answer(
        backend=selected.backend,
        schedule={} if selected is best else selected.schedule,
        predicted_s=selected.predicted_s,
        library_s=library_s,
        reason=f"{reason}{selected.words}",
        neighbour=selected.neighbour,
        ranked=selected.ranked,
        faster=None if prospect is None else prospect.probability,
        loss_per_gain=None if prospect is None else prospect.loss_per_gain,
        otherwise=otherwise.backend,
        otherwise_s=otherwise.predicted_s,
    )


def _nearest(
    operation: Operation[Any], problem: Problem, hardware: Hardware, records: Sequence[Record]
) -> list[Neighbour]:
    """Returns the nearest measured problems, or the nearest estimated ones if none was measured.

    Estimates would correct the model towards themselves.
    """
    for estimated in (False, True):
        same_kind = [record for record in records if record.estimated is estimated]
        if near := nearest(operation, problem, hardware, same_kind, within=TELLING):
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
        reason = f"{record.origin} on {record.environment.date[:10]}{gain}"
        return Answer(
            entry.backend, entry.schedule, ours_s, library_s, reason, source="record", precedence=record.precedence
        )
    return None


def _tuned_near(
    operation: Operation[Any],
    problem: Problem,
    hardware: Hardware,
    near: Iterable[Neighbour],
    allowed: frozenset[str],
    fitted: Mapping[str, Calibration],
) -> Answer | None:
    """Returns the answer of the nearest problem that was tuned on this chip, or None if none applies.

    One applies within `SERVED`, if its winner is legal for `problem`, verified for it if it was for that problem, and
    not predicted to be slower than the library. Both times are those of the record, scaled by the model.
    """
    library = operation.library
    for neighbour in near:
        if neighbour.hardware != hardware or neighbour.doublings > SERVED:
            continue
        problems, record = (neighbour.problem, problem), neighbour.record
        entry = recheck(operation, neighbour.problem, hardware, record, backends=allowed)
        if isinstance(entry, str) or illegal(
            kernel := operation.kernel(entry.backend), problem, hardware, entry.schedule
        ):
            continue
        if [is_verified(kernel, p, hardware, entry.schedule) for p in problems] == [True, False]:
            continue
        seconds = []
        for each in (entry, record.library_entry or entry):
            kernel = operation.kernel(each.backend)
            model = model_of(operation, kernel, hardware, found=fitted)
            before_s, now_s = (modelled_s(kernel, p, hardware, model, each.schedule) for p in problems)
            scale = now_s / before_s if before_s is not None and now_s is not None else 1.0
            seconds.append(each.measurement.median_s * scale)
        ours_s, library_s = seconds
        if library.backend in allowed and ours_s > library_s:
            continue
        at = str(neighbour.problem)
        reason = f"{record.origin} at {at}, {neighbour.doublings:.1f} doublings away"
        if entry.backend != library.backend:
            reason += f"; {library_s / ours_s:.2f}x the library's speed is predicted here"
        found = Answer(entry.backend, entry.schedule, ours_s, library_s, reason, at, precedence=record.precedence)
        return dataclasses.replace(found, otherwise=library.backend, otherwise_s=library_s)
    return None


def _words(refused: Mapping[str, str]) -> str:
    return "; ".join(f"{backend}: {reason}" for backend, reason in refused.items())
