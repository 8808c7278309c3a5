"""Selects a schedule of one kernel without measuring, and predicts its time and the error of the prediction."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scheduler.core.hardware import Hardware
from scheduler.core.records import Calibration, Entry, Schedule, variant_of
from scheduler.model.constants import model_of, residuals_of
from scheduler.model.cost import CostModel
from scheduler.model.feasibility import illegal
from scheduler.model.pruning import Pruned, counted, prune
from scheduler.model.residuals import LEAST, ProblemPoint
from scheduler.prediction.transfer import Neighbour
from search_spaces.kernel import Kernel
from search_spaces.operation import Operation
from search_spaces.problem import Problem
from search_spaces.space import Columns

# Predictions closer than this ratio do not determine the faster schedule; the measured winner of a neighbour is
# preferred.
TIE = 1.02
# How many predictions are searched for the first schedule of a measured variant.
PASSED_OVER = 1000


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
      fitted: the calibrations from measurements on this chip, by backend.
      near: similar problems with their records, nearest first.
      needed: allow an unverified schedule if there is no verified one.
    """
    model = model_of(operation, kernel, hardware, found=fitted)
    pruned = prune(kernel, problem, hardware, model, keep=1, verified=not kernel.library)
    if not len(pruned.points) and needed:
        pruned = prune(kernel, problem, hardware, model, keep=1)
    if not len(pruned.points):
        return f"nothing left of {pruned.size}: {counted(pruned.dropped)}"
    residuals = residuals_of(operation, kernel, fitted)
    error, deviation = residuals.at(ProblemPoint(problem, float(pruned.predicted_s[0])))
    if kernel.library:
        deviation = math.hypot(deviation, model.library_spread(problem))
    told = (_told(kernel, neighbour, hardware, model) for neighbour in near)
    closest = next((one for one in told if one is not None), None)
    schedule: Schedule | None = None
    near_by = words = ""
    if closest is not None:
        # The remaining error there, which the fit does not explain, weighted by half for each doubling.
        error += closest.neighbour.weight * (closest.error - residuals.at(closest.place)[0])
        near_by = str(closest.neighbour.problem)
        at = f"{near_by}, {closest.neighbour.doublings:.1f} doublings away"
        at += ", estimated" if closest.neighbour.record.estimated else ""
        words = f" (its times corrected by those of {at})"
        here = modelled_s(kernel, problem, hardware, model, closest.entry.schedule)
        checked = here is not None and (needed or _verified(kernel, problem, hardware, closest.entry.schedule))
        if not kernel.library and here is not None and checked and here <= closest.objection * pruned.predicted_s[0]:
            schedule, words = closest.entry.schedule, f" (with the schedule of {at})"
    elif not pruned.ranked:
        words = ", the first of its schedules, as it declares no footprint to rank them by"
    if schedule is None:
        schedule = _first(kernel, problem, hardware, model, pruned, _variants(kernel, fitted), needed)
    if schedule is None:
        return "no variant of it that was measured suits the problem"
    predicted_s = float(pruned.predicted_s[0]) * math.exp(error)
    return Choice(kernel.backend, schedule, predicted_s, deviation, near_by, words, pruned.ranked)


@dataclasses.dataclass(frozen=True)
class _Told:
    """A neighbour's record of a kernel: the error of the model there, and the model's loss for the winner."""

    neighbour: Neighbour
    entry: Entry
    place: ProblemPoint
    error: float
    objection: float


def _told(kernel: Kernel[Any, Any], neighbour: Neighbour, hardware: Hardware, model: CostModel) -> _Told | None:
    entry = neighbour.best(kernel.backend)
    if entry is None or entry.version != kernel.version or kernel.supports(neighbour.problem, hardware.target):
        return None
    there = modelled_s(kernel, neighbour.problem, hardware, model, entry.schedule)
    if there is None:
        return None
    favourite = float(prune(kernel, neighbour.problem, hardware, model, keep=1).predicted_s[0])
    error = math.log(entry.measurement.median_s / favourite)
    objection = max(TIE, (there / favourite) ** neighbour.weight)
    return _Told(neighbour, entry, ProblemPoint(neighbour.problem, favourite), error, objection)


def _variants(kernel: Kernel[Any, Any], fitted: Mapping[str, Calibration]) -> Sequence[str]:
    """Returns the measured variants; empty if there are too few measurements to exclude other variants."""
    found = fitted.get(kernel.backend)
    enough = found is not None and found.version == kernel.version and found.problems >= LEAST
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


def _verified(kernel: Kernel[Any, Any], problem: Problem, hardware: Hardware, schedule: Schedule) -> bool:
    """Returns whether a legal schedule is in the part of the space that was verified on this architecture."""
    one = Columns.of([kernel.space(problem, hardware.target).decode(schedule)])
    return bool(np.all(kernel.verified(problem, one, hardware.target)))
