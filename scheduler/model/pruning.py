"""Drops the schedules that cannot run or cannot win, ranks the others, and counts each reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler.core.hardware import Hardware
from scheduler.core.records import Schedule
from scheduler.model.cost import CostModel, arithmetic_intensity
from scheduler.model.traffic import column
from search_spaces.footprint import Footprint
from search_spaces.kernel import Kernel
from search_spaces.problem import Problem
from search_spaces.space import Choice, Columns, DeclarationError, Space
from search_spaces.target import Target

# ------------------------------------------------------------------------------
# Feasibility of a schedule for a problem on a chip, with the reason if it cannot run.


def illegal(kernel: Kernel[Any, Any], problem: Problem, hardware: Hardware, schedule: Schedule) -> str | None:
    """Returns why `schedule` cannot run, or None if it is legal and fits on the chip."""
    if reason := kernel.supports(problem, hardware.target):
        return reason
    space = kernel.space(problem, hardware.target)
    try:
        point = space.decode(schedule)
    except ValueError as error:
        return str(error)
    if reason := space.broken(point):
        return reason
    footprint = _footprint(kernel, problem, hardware, schedule)
    if footprint is None:
        return None
    demand, most = onchip_demand(footprint), onchip_limit(footprint, hardware)
    onchip_needed, limit = int(np.ravel(demand)[0]), int(np.ravel(most)[0])
    if onchip_needed > limit:
        return f"it needs {onchip_needed} bytes of on-chip memory and a block of {hardware.kind} has {limit}"
    tmem_needed = int(np.ravel(footprint.tmem_bytes)[0])
    if tmem_needed > hardware.tmem_bytes:
        return f"it needs {tmem_needed} bytes of tensor memory and a core of {hardware.kind} has {hardware.tmem_bytes}"
    return None


def onchip_demand(footprint: Footprint) -> npt.NDArray[np.float64]:
    """Returns the minimum on-chip bytes per block of each schedule."""
    return column(footprint.onchip_bytes) + footprint.spill_bytes


def onchip_limit(footprint: Footprint, hardware: Hardware) -> npt.NDArray[np.float64]:
    """Returns the maximum on-chip bytes per block of each schedule: its launch's request, up to the chip's limit."""
    onchip_needed = column(footprint.onchip_limit_bytes)
    unasked = hardware.onchip_default_bytes or hardware.onchip_bytes
    return np.minimum(np.where(onchip_needed > 0, onchip_needed, unasked), hardware.onchip_bytes)


def onchip_bytes(kernel: Kernel[Any, Any], problem: Problem, hardware: Hardware, schedule: Schedule) -> int:
    """Returns the on-chip bytes that one block of a schedule requests; 0 if the kernel has no footprint."""
    footprint = _footprint(kernel, problem, hardware, schedule)
    return 0 if footprint is None else int(np.ravel(footprint.onchip_bytes)[0])


def _footprint(kernel: Kernel[Any, Any], problem: Problem, hardware: Hardware, schedule: Schedule) -> Footprint | None:
    space = kernel.space(problem, hardware.target)
    one = Columns.of([space.decode(schedule)]) if space.choices else Columns({}, length=1)
    return kernel.footprint(problem, one, hardware.target)


def has_fields(kernel: Kernel[Any, Any], problem: Problem, target: Target, schedule: Schedule) -> bool:
    """Whether these are the fields of the kernel's schedules; values are not checked."""
    space = kernel.space(problem, target)
    fields = {field.name for field in dataclasses.fields(space.schedule)}
    return fields - space.defaults.keys() <= schedule.keys() <= fields


# Limit for kernels without a footprint, because a search holds all their schedules from the start (10 s for this
# number).
MOST_UNRANKED = 100_000


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A schedule to measure.

    Attributes:
      backend, version: of its kernel.
      schedule: field -> value, without fields at their defaults.
      predicted_s: the predicted time, in seconds; the library's if the kernel declares no footprint.
      onchip_bytes: on-chip memory that one block requests, in bytes; 0 if unknown.
      library: whether it is a program of the XLA implementation.
      defaults: field -> default value, for fields with a default and at least one other choice.
      floor_s: lower bound on the time, in seconds; 0 if unknown.
    """

    backend: str
    version: int
    schedule: Mapping[str, Choice]
    predicted_s: float
    onchip_bytes: int
    library: bool
    floor_s: float = 0.0
    defaults: Mapping[str, Choice] = dataclasses.field(default_factory=dict)

    def whole(self) -> Candidate:
        """Returns a copy with all fields in its schedule, for comparison field by field."""
        return dataclasses.replace(self, schedule={**self.defaults, **self.schedule})


@dataclasses.dataclass(frozen=True)
class Pruned:
    """The result of pruning a kernel's space: ``size == sum(dropped.values()) + len(points)``.

    Attributes:
      kernel: the kernel.
      space: its space.
      size: number of points before any rule.
      dropped: reason -> number of dropped points, in the order of application; each point counts once.
      points: the remaining points, best prediction first.
      predicted_s, floor_s, onchip_bytes: of the remaining points, in the same order.
      ranked: whether the model ranks the points; False if the kernel declares no footprint.
    """

    kernel: Kernel[Any, Any]
    space: Space[Any]
    size: int
    dropped: Mapping[str, int]
    points: Columns
    predicted_s: npt.NDArray[np.float64]
    floor_s: npt.NDArray[np.float64]
    onchip_bytes: npt.NDArray[np.int64]
    ranked: bool = True

    def schedule(self, index: int) -> dict[str, Choice]:
        """Returns the schedule of point `index` in its stored form."""
        return self.space.encode(self.points.row(index))

    def candidates(self) -> list[Candidate]:
        """Returns the remaining points as candidates, best prediction first."""
        defaults = {n: value for n, value in self.space.defaults.items() if len(self.space.choices.get(n, ())) > 1}
        return [
            Candidate(
                backend=self.kernel.backend,
                version=self.kernel.version,
                schedule=self.schedule(index),
                predicted_s=float(self.predicted_s[index]),
                onchip_bytes=int(self.onchip_bytes[index]),
                library=self.kernel.library,
                defaults=defaults,
                floor_s=float(self.floor_s[index]),
            )
            for index in range(len(self.points))
        ]


def prune(
    kernel: Kernel[Any, Any],
    problem: Problem,
    hardware: Hardware,
    model: CostModel,
    *,
    keep: int | None = None,
    incumbent_s: float | None = None,
    verified: bool = False,
    only: Mapping[str, Choice] | None = None,
) -> Pruned:
    """Returns the points of the kernel's space for `problem` that can run on `hardware`, ranked.

    Args:
      kernel: a kernel that supports the problem on this hardware.
      model: predicts the times for the ranking.
      keep: maximum number of points to keep; None keeps all that can run.
      incumbent_s: a time already reached, in seconds; points with a larger lower bound are dropped.
      verified: keep only schedules that the kernel declares as checked on a device of this architecture.
      only: restricts the space to these values of these choices; None means the whole space.

    Raises:
      DeclarationError: the kernel has no footprint, and too many schedules.
    """
    space = kernel.space(problem, hardware.target)
    if only:
        space = dataclasses.replace(space, choices={**space.choices, **{name: (only[name],) for name in only}})
    points, dropped = space.legal()

    def full(value: npt.ArrayLike) -> npt.NDArray[Any]:
        return np.broadcast_to(np.asarray(value), (len(points),))

    def best(rank: npt.NDArray[Any], predicted_s: Any, floor_s: Any, onchip_bytes: Any, ranked: bool = True) -> Pruned:
        """Returns the points with the indices `rank`, at most `keep`."""
        if keep is not None and len(rank) > keep:
            dropped[f"ranked below the first {keep}"] = len(rank) - keep
            rank = rank[:keep]
        return Pruned(
            kernel=kernel,
            space=space,
            size=space.size,
            dropped=dropped,
            points=points.take(rank),
            predicted_s=predicted_s[rank],
            floor_s=floor_s[rank],
            onchip_bytes=onchip_bytes[rank].astype(np.int64),
            ranked=ranked,
        )

    def left(obstacles: Mapping[str, npt.NDArray[np.bool_]]) -> npt.NDArray[np.bool_]:
        """Returns which points have no obstacle, and counts the first obstacle of the others."""
        alive = np.ones(len(points), dtype=bool)
        for reason, hit in obstacles.items():
            if lost := int((alive & hit).sum()):
                dropped[reason] = lost
                alive &= ~hit
        return alive

    if not len(points):  # A kernel need not report that it has no legal schedule.
        return best(np.arange(0), full(0.0), full(0.0), full(0))
    library_s = full(model.library_seconds(problem))
    if kernel.library:  # The model does not distinguish a library's programs.
        least_s = 0.0 if kernel.loses_ties else model.library_floor(problem)
        return best(np.arange(len(points)), library_s, full(least_s), full(0))
    unchecked = {}
    if verified:
        reason = f"has not been checked on a device of architecture {hardware.architecture}"
        unchecked[reason] = ~full(kernel.verified(problem, points, hardware.target))
    footprint = kernel.footprint(problem, points, hardware.target)
    if footprint is None:
        if len(points) > MOST_UNRANKED:
            raise DeclarationError(
                f"the {kernel.backend} kernel has {len(points):,} legal schedules and no footprint to rank them by; a "
                f"search holds {MOST_UNRANKED:,} of these at most: declare a footprint, rules, or fewer choices"
            )
        return best(np.flatnonzero(left(unchecked)), library_s, full(0.0), full(0), ranked=False)
    onchip_bytes = full(footprint.onchip_bytes)
    demand, limit = full(onchip_demand(footprint)), full(onchip_limit(footprint, hardware))
    obstacles = {
        f"needs more on-chip memory than {hardware.kind} has ({hardware.onchip_bytes} bytes)": (demand > limit)
        & (demand > hardware.onchip_bytes),
        f"needs more on-chip memory than {hardware.kind} gives whoever asks for no more": demand > limit,
        f"needs more tensor memory than one core has ({hardware.tmem_bytes} bytes)": full(footprint.tmem_bytes)
        > hardware.tmem_bytes,
        f"spills registers ({hardware.registers_per_thread} per thread)": full(footprint.registers)
        > hardware.registers_per_thread,
        f"needs more registers than one core has ({hardware.registers_per_core})": full(footprint.registers_per_block)
        > hardware.registers_per_core,
        **unchecked,
    }
    floor_s = full(model.floor(footprint))
    if incumbent_s is not None:
        obstacles["cannot beat the incumbent"] = floor_s > incumbent_s
    alive = left(obstacles)

    predicted = full(model.seconds(footprint))
    # Ties are common, for example among traversal orders. Tie-breakers: arithmetic intensity, less on-chip memory,
    # order.
    rank = np.lexsort((onchip_bytes, -full(arithmetic_intensity(footprint)), np.round(predicted, 12)))
    return best(rank[alive[rank]], predicted, floor_s, onchip_bytes)


def is_verified(kernel: Kernel[Any, Any], problem: Problem, hardware: Hardware, schedule: Schedule) -> bool:
    """Returns whether a legal schedule is in the part of the space that was verified on this architecture."""
    one = Columns.of([kernel.space(problem, hardware.target).decode(schedule)])
    return bool(np.all(kernel.verified(problem, one, hardware.target)))


def counted(reasons: Mapping[str, int]) -> str:
    """Formats reasons with the number of schedules for each, in one line."""
    return "{" + ", ".join(f"{reason}: {count}" for reason, count in reasons.items()) + "}"
