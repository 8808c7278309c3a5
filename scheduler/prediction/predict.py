"""predict(): an answer without measuring, from the model and from what was measured of similar problems."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from scheduler.core.backends import allowed_backends
from scheduler.core.errors import NoCandidate
from scheduler.core.hardware import Hardware
from scheduler.core.identity import key_of
from scheduler.core.records import Record, Schedule
from scheduler.model.constants import model_of
from scheduler.model.cost import CostModel
from scheduler.model.feasibility import illegal
from scheduler.model.pruning import Pruned, prune
from scheduler.prediction.transfer import TELLING, Neighbour, nearest
from scheduler.prediction.validation import recheck
from search_spaces.kernel import Kernel
from search_spaces.operation import Operation
from search_spaces.problem import Problem
from search_spaces.space import Columns

# The model alone displaces the library only where it promises this much: its own error is of that size.
MODEL_GAIN = 0.10
# Predictions closer than this say nothing about who is faster: a neighbour's measured winner goes first.
TIE = 1.02


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
    """

    backend: str
    schedule: Schedule
    predicted_s: float
    library_s: float
    reason: str
    neighbour: str = ""
    ranked: bool = True


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
) -> Answer:
    """The top prediction, without measuring anything, among the schedules that were verified on the architecture.

    Where one of `records` is of this problem and still holds, it is the answer, as it is for a call.

    A kernel that competes with the library must have been verified on this architecture, and promise at least
    `MODEL_GAIN` over it, or less where a similar problem's record vouches for both; where `backends` leaves the library
    out, the best prediction is the answer, and a kernel without a verified schedule gives one that is not.

    Args:
      backends: the kernels that may answer; None allows all.
      records: of this operation on this chip. The one of the most similar problem, at most a doubling away, corrects
        the model: by what it got wrong there, less so the farther that problem is; and the winner there is the first
        choice here where it is legal and the model does not object to it more than it did there.
      shared_only: use no constants of the user's own, which other processes of a job may not have.

    Raises:
      NoCandidate: no allowed kernel supports the problem, or none of its schedules fits.
    """
    allowed, records = allowed_backends(operation, backends), list(records)
    near = nearest(operation, problem, records, within=TELLING)
    library = operation.library
    best = _choose(library, problem, hardware, model_of(operation, library, hardware, shared_only=shared_only), near)
    assert not isinstance(best, str), "a library kernel has a program for every problem"
    library_s = best.predicted_s
    if (measured := _measured(operation, problem, hardware, records, allowed, library_s)) is not None:
        return measured
    found: _Choice | None = None
    refused: dict[str, str] = {}
    for kernel in operation.kernels:
        if kernel.backend not in allowed or kernel.library:
            continue
        if library.backend in allowed and hardware.architecture not in kernel.verified_on:
            refused[kernel.backend] = f"not verified on {hardware.architecture}"
        elif reason := kernel.supports(problem, hardware.target):
            refused[kernel.backend] = reason
        else:
            model = model_of(operation, kernel, hardware, shared_only=shared_only)
            choice = _choose(kernel, problem, hardware, model, near, needed=library.backend not in allowed)
            if isinstance(choice, str):
                refused[kernel.backend] = choice
            elif found is None or choice.predicted_s < found.predicted_s:
                found = choice
    if library.backend not in allowed:
        if found is None:
            raise NoCandidate(f"no kernel of {operation.name} can do {problem} on {hardware.kind}: {_words(refused)}")
        reason = f"the top prediction{found.words}"
        return _answer(found, library_s, reason)
    # What a neighbour's record corrects, the model need not be feared for.
    wanted = MODEL_GAIN * (1 - min(best.weight, found.weight if found is not None else 0.0))
    if found is not None and found.predicted_s <= (1 - wanted) * library_s:
        gain = library_s / found.predicted_s
        reason = f"the model expects {gain:.2f}x the library's speed{found.words}"
        return _answer(found, library_s, reason)
    least = f"less than {wanted:.0%}" if wanted >= 0.005 else "no gain"
    reason = f"the model expects {least} over the library" if found is not None else _words(refused)
    return Answer(library.backend, {}, library_s, library_s, reason or "the library is the only kernel", best.neighbour)


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
        reason = f"measured on {record.environment.date[:10]}{gain}"
        return Answer(entry.backend, entry.schedule, ours_s, library_s, reason)
    return None


@dataclasses.dataclass(frozen=True)
class _Choice:
    """A kernel's answer without measuring; `words` says what a neighbour had to do with it, `weight` how much."""

    backend: str
    schedule: Schedule
    predicted_s: float
    neighbour: str = ""
    words: str = ""
    weight: float = 0.0
    ranked: bool = True


def _answer(found: _Choice, library_s: float, reason: str) -> Answer:
    return Answer(
        found.backend, found.schedule, found.predicted_s, library_s, reason, found.neighbour, ranked=found.ranked
    )


def _choose(
    kernel: Kernel[Any, Any],
    problem: Problem,
    hardware: Hardware,
    model: CostModel,
    near: Sequence[Neighbour],
    *,
    needed: bool = False,
) -> _Choice | str:
    """The first choice for one kernel, seeded by the nearest problem that tells of it; or why there is none.

    It is among the verified schedules; where there is none, and an answer is `needed` all the same, among all.
    """
    pruned = prune(kernel, problem, hardware, model, keep=1, verified=not kernel.library)
    if not len(pruned.points) and needed:
        pruned = prune(kernel, problem, hardware, model, keep=1)
    if not len(pruned.points):
        return f"nothing left of {pruned.size}: {counted(pruned.dropped)}"
    (first,) = pruned.candidates()
    for neighbour in near:
        entry = neighbour.best(kernel.backend)
        if entry is None or entry.version != kernel.version or kernel.supports(neighbour.problem, hardware.target):
            continue
        there = _predicted(kernel, neighbour.problem, hardware, model, entry.schedule)
        if there is None:
            continue
        at = f"{neighbour.problem}, {neighbour.doublings:.1f} doublings away"
        error = (entry.measurement.median_s / there) ** neighbour.weight
        favourite = prune(kernel, neighbour.problem, hardware, model, keep=1).predicted_s[0]
        objection = max(TIE, float(there / favourite) ** neighbour.weight)
        here = _predicted(kernel, problem, hardware, model, entry.schedule)
        checked = here is not None and (needed or _verified(kernel, problem, hardware, entry.schedule))
        if kernel.library or here is None or not checked or here > objection * first.predicted_s:
            chosen, predicted_s, words = first.schedule, first.predicted_s, f" (its times corrected by those of {at})"
        else:
            chosen, predicted_s, words = entry.schedule, here, f" (with the schedule of {at})"
        near_by = str(neighbour.problem)
        weight, ranked = neighbour.weight, pruned.ranked
        return _Choice(first.backend, chosen, predicted_s * error, near_by, words, weight, ranked)
    words = "" if pruned.ranked else ", the first of its schedules, as it declares no footprint to rank them by"
    return _Choice(first.backend, first.schedule, first.predicted_s, words=words, ranked=pruned.ranked)


def _predicted(
    kernel: Kernel[Any, Any], problem: Problem, hardware: Hardware, model: CostModel, schedule: Schedule
) -> float | None:
    """The model's time of one schedule, seconds; None where it is not legal."""
    if illegal(kernel, problem, hardware, schedule) is not None:
        return None
    if kernel.library:
        return model.library_seconds(problem)
    one = Columns.of([kernel.space(problem, hardware.target).decode(schedule)])
    footprint = kernel.footprint(problem, one, hardware.target)
    return model.library_seconds(problem) if footprint is None else float(np.ravel(model.seconds(footprint))[0])


def _verified(kernel: Kernel[Any, Any], problem: Problem, hardware: Hardware, schedule: Schedule) -> bool:
    """Whether a legal schedule is of the part of the space that was checked on a device of this architecture."""
    one = Columns.of([kernel.space(problem, hardware.target).decode(schedule)])
    return bool(np.all(kernel.verified(problem, one, hardware.target)))


def counted(reasons: Mapping[str, int]) -> str:
    """Reasons with how many schedules each concerns, in a line."""
    return "{" + ", ".join(f"{reason}: {count}" for reason, count in reasons.items()) + "}"


def _words(refused: Mapping[str, str]) -> str:
    return "; ".join(f"{backend}: {reason}" for backend, reason in refused.items())
