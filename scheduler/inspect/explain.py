"""Where every schedule of a space went: dropped and by which rule, ranked, tried, failed, or not tried."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scheduler.core.hardware import Hardware
from scheduler.core.identity import Fields, Point, fields_of
from scheduler.core.quantities import share_text
from scheduler.core.records import Schedule, Trial
from scheduler.measure.blame import blamed
from scheduler.measure.lowered import asked_onchip_bytes, lower
from scheduler.model.constants import calibrations, model_of
from scheduler.model.pruning import Pruned
from scheduler.prediction import predict
from search_spaces.footprint import Footprint
from search_spaces.kernel import Kernel
from search_spaces.operation import Operation
from search_spaces.problem import Problem


@dataclasses.dataclass(frozen=True)
class Access:
    """How a whole launch reaches device memory, as far as its footprint tells.

    Attributes:
      transactions: accesses of warps, and bulk copies.
      coalescing: share of what those move, in whole sectors, that is wanted.
      bytes: of one access of one thread.
    """

    transactions: float
    coalescing: float
    bytes: float


@dataclasses.dataclass(frozen=True)
class Ranked:
    """One schedule as the model sees it.

    Attributes:
      predicted_s: the model's time, seconds.
      onchip_bytes: on-chip memory of one block; 0 where nobody says.
      terms: what the prediction is made of, seconds by name.
      access: None where the kernel does not tell.
      refused: why it does not lower, in words; "" where it does, or was not lowered.
    """

    schedule: Schedule
    predicted_s: float
    onchip_bytes: int
    terms: Mapping[str, float]
    access: Access | None = None
    refused: str = ""


@dataclasses.dataclass(frozen=True)
class Account:
    """The schedules of one kernel: ``size == sum(dropped.values()) + len(tried) + untried``.

    Attributes:
      refused: why the kernel cannot do this problem here; "" where it can.
      size: schedules before any rule.
      dropped: reason -> how many it removed, in the order in which reasons are asked.
      first: what the model ranks first.
      fitted: where the constants of its model come from, in words.
      tried: the last trial of each legal schedule that was tried, by this version of the kernel.
      untried: legal schedules that were not tried.
      footprint: whether it declares one: else nothing was pruned by it, and the model ranks none before another.
      ranks: each legal schedule's place in the model's order, from 1.
      asked: those that were asked about, as far as they are legal.
    """

    backend: str
    version: int
    refused: str = ""
    size: int = 0
    dropped: Mapping[str, int] = dataclasses.field(default_factory=dict)
    first: tuple[Ranked, ...] = ()
    fitted: str = ""
    tried: tuple[Trial, ...] = ()
    untried: int = 0
    footprint: bool = True
    ranks: Mapping[Fields, int] = dataclasses.field(default_factory=dict, repr=False)
    asked: tuple[Ranked, ...] = ()

    def rank(self, schedule: Schedule) -> int | None:
        """The place of a schedule in the model's order, None where it is not legal here and now."""
        return self.ranks.get(fields_of(schedule))


def explain(
    operation: Operation[Any],
    problem: Problem,
    hardware: Hardware,
    trials: Sequence[Trial],
    *,
    top: int = 5,
    about: Sequence[Point] = (),
    lowering: bool = False,
) -> list[Account]:
    """An account of each kernel of `operation`, its best `top` predictions with their terms, and those `about`.

    Args:
      lowering: lower the first of a kernel that declares no footprint, to read their on-chip memory. JAX starts its
        devices for that.
    """
    return [
        Account(kernel.backend, kernel.version, refused=pruned)
        if isinstance(pruned, str)
        else _account(operation, kernel, pruned, problem, hardware, trials, top, about, lowering)
        for kernel, pruned in predict.explain(operation, problem, hardware)
    ]


def _account(
    operation: Operation[Any],
    kernel: Kernel[Any, Any],
    pruned: Pruned,
    problem: Problem,
    hardware: Hardware,
    trials: Sequence[Trial],
    top: int,
    about: Sequence[Point],
    lowering: bool,
) -> Account:
    ranks = {fields_of(pruned.schedule(index)): index + 1 for index in range(len(pruned.points))}
    last = {
        fields_of(trial.schedule): trial
        for trial in trials
        if (trial.backend, trial.version) == (kernel.backend, kernel.version)
    }
    tried = tuple(trial for schedule, trial in last.items() if schedule in ranks)
    asked = [ranks[fields] - 1 for backend, fields in about if backend == kernel.backend and fields in ranks]
    top = min(top, len(ranks))
    shown = _ranked(operation, kernel, pruned, problem, hardware, [*range(top), *asked])
    if lowering and not pruned.ranked:
        shown = tuple(_lowered(ranked, pruned, problem, hardware) for ranked in shown)
    untried = len(pruned.points) - len(tried)
    fitted = _fitted(operation, kernel, hardware) if pruned.ranked else ""
    return Account(
        kernel.backend,
        kernel.version,
        size=pruned.size,
        dropped=pruned.dropped,
        first=shown[:top],
        fitted=fitted,
        tried=tried,
        untried=untried,
        footprint=pruned.ranked,
        ranks=ranks,
        asked=shown[top:],
    )


def _ranked(
    operation: Operation[Any],
    kernel: Kernel[Any, Any],
    pruned: Pruned,
    problem: Problem,
    hardware: Hardware,
    places: Sequence[int],
) -> tuple[Ranked, ...]:
    """The schedules at these places of the model's order."""
    points = pruned.points.take(np.array(places, dtype=np.intp))
    terms: Mapping[str, Any] = {}
    accesses: Sequence[Access | None] = [None] * len(points)
    footprint = kernel.footprint(problem, points, hardware.target) if len(points) and not kernel.library else None
    if footprint is not None:
        terms = model_of(operation, kernel, hardware).terms(footprint)
        accesses = _accesses(footprint, len(points))
    return tuple(
        Ranked(
            pruned.schedule(place),
            float(pruned.predicted_s[place]),
            int(pruned.onchip_bytes[place]),
            {name: float(np.broadcast_to(values, (len(points),))[index]) for name, values in terms.items()},
            accesses[index],
        )
        for index, place in enumerate(places)
    )


def _lowered(ranked: Ranked, pruned: Pruned, problem: Problem, hardware: Hardware) -> Ranked:
    """With what the lowered kernel asks for, or why it does not lower."""
    schedule = pruned.space.decode(ranked.schedule)
    try:
        asked = asked_onchip_bytes(lower(pruned.kernel, problem, schedule, hardware.target))
    except Exception as error:  # as in a search: while a kernel is lowered, no code runs but its own and JAX's
        return dataclasses.replace(ranked, refused=blamed(error))
    return dataclasses.replace(ranked, onchip_bytes=asked or 0)


def _fitted(operation: Operation[Any], kernel: Kernel[Any, Any], hardware: Hardware) -> str:
    found = calibrations(operation.name, hardware).get(kernel.backend)
    if found is None:
        return "nothing was fitted for this chip: the model's times are rough"
    return (
        f"the model's constants: fitted to {found.trials} trials of {found.problems} problems until "
        f"{found.environment.date[:10]}, typical error {share_text(found.error)}"
        + (f" (of version {found.version})" if found.version != kernel.version else "")
    )


def _accesses(footprint: Footprint, schedules: int) -> list[Access | None]:
    """One for each schedule."""
    blocks = np.prod(np.broadcast_arrays(*footprint.grid), axis=0)
    transactions = footprint.mean_step.transactions * footprint.steps * blocks
    columns = transactions, footprint.coalescing, footprint.access_bytes
    rows = zip(*(np.broadcast_to(column, (schedules,)) for column in columns), strict=True)
    return [Access(*map(float, row)) if row[-1] else None for row in rows]
