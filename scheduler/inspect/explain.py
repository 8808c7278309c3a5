"""Accounts for every schedule of a space: dropped and by which rule, ranked, tried, failed, or not tried."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from scheduler.core.hardware import Hardware
from scheduler.core.records import Fields, Point, Schedule, Trial, fields_of
from scheduler.core.text import share_text
from scheduler.measure.build import describe_exception, lower_candidate, requested_onchip_bytes
from scheduler.model.constants import calibrations, model_of, sibling_of
from scheduler.model.pruning import Pruned
from scheduler.prediction import predict
from search_spaces.footprint import Footprint
from search_spaces.kernel import Kernel
from search_spaces.operation import Operation
from search_spaces.problem import Problem


@dataclasses.dataclass(frozen=True)
class Access:
    """The device memory accesses of a whole launch, as far as the footprint declares them.

    Attributes:
      transactions: Number of warp accesses and bulk copies.
      coalescing: Useful share of the bytes moved, counted in whole sectors.
      bytes: Bytes of one access by one thread.
    """

    transactions: float
    coalescing: float
    bytes: float


@dataclasses.dataclass(frozen=True)
class Ranked:
    """The model's prediction for one schedule.

    Attributes:
      predicted_s: Predicted time in seconds.
      onchip_bytes: On-chip memory of one block; 0 if unknown.
      terms: Terms of the prediction: name -> seconds.
      access: Device memory accesses; None if the kernel does not declare them.
      refused: Why the schedule fails to lower; "" if it lowers, or was not lowered.
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
      refused: Why the kernel does not support the problem here; "" if it does.
      size: Number of schedules before any rule.
      dropped: Reason -> number of schedules removed, in the order in which the rules are applied.
      first: The top schedules of the model's ranking.
      fitted: Source of the model's constants.
      tried: The last trial of each legal schedule that was tried with this version of the kernel.
      untried: Number of legal schedules that were not tried.
      footprint: Whether the kernel declares a footprint. Without one, the model neither prunes nor ranks its schedules.
      ranks: Rank of each legal schedule in the model's order, from 1.
      asked: The schedules passed as `about`, if legal.
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
        """Returns the rank of a schedule in the model's order; None if it is not legal here now."""
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
    """Returns an account of each kernel of `operation`, with terms for its `top` predictions and the schedules `about`.

    Args:
      lowering: Whether to lower the top schedules of a kernel without a footprint, to read their on-chip memory. JAX
        initializes its devices for that.
    """
    accounts = []
    for kernel, pruned in predict.explain(operation, problem, hardware):
        if isinstance(pruned, str):
            accounts.append(Account(kernel.backend, kernel.version, refused=pruned))
            continue
        which = kernel.backend, kernel.version
        ranks = {fields_of(pruned.schedule(index)): index + 1 for index in range(len(pruned.points))}
        last = {fields_of(trial.schedule): trial for trial in trials if (trial.backend, trial.version) == which}
        tried = tuple(trial for schedule, trial in last.items() if schedule in ranks)
        requested = [ranks[fields] - 1 for backend, fields in about if backend == kernel.backend and fields in ranks]
        first = range(min(top, len(ranks)))
        shown = _ranked(operation, kernel, pruned, problem, hardware, [*first, *requested])
        if lowering and not pruned.ranked:
            shown = tuple(_lowered(ranked, pruned, problem, hardware) for ranked in shown)
        account = Account(
            *which,
            size=pruned.size,
            dropped=pruned.dropped,
            first=shown[: len(first)],
            fitted=_fitted(operation, kernel, hardware) if pruned.ranked else "",
            tried=tried,
            untried=len(pruned.points) - len(tried),
            footprint=pruned.ranked,
            ranks=ranks,
            asked=shown[len(first) :],
        )
        accounts.append(account)
    return accounts


def _ranked(
    operation: Operation[Any],
    kernel: Kernel[Any, Any],
    pruned: Pruned,
    problem: Problem,
    hardware: Hardware,
    places: Sequence[int],
) -> tuple[Ranked, ...]:
    """Returns the schedules at these places of the model's order."""
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
    """Adds the on-chip memory of the lowered kernel, or the reason why it fails to lower."""
    schedule = pruned.space.decode(ranked.schedule)
    try:
        requested = requested_onchip_bytes(lower_candidate(pruned.kernel, problem, schedule, hardware.target))
    except Exception as error:  # as in a search: lowering runs only the kernel's code and JAX's
        return dataclasses.replace(ranked, refused=describe_exception(error))
    return dataclasses.replace(ranked, onchip_bytes=requested or 0)


def _fitted(operation: Operation[Any], kernel: Kernel[Any, Any], hardware: Hardware) -> str:
    found = calibrations(operation.name, hardware).get(kernel.backend)
    if found is None:
        return "nothing was fitted for this chip: the model's times are rough"
    sibling = sibling_of(found, hardware)
    return (
        f"the model's constants: fitted to {found.trials} trials of {found.problems} problems until "
        f"{found.environment.date[:10]}, typical error {share_text(found.error)}"
        + (f", from {sibling}, scaled" if sibling else "")
        + (f" (of version {found.version})" if found.version != kernel.version else "")
    )


def _accesses(footprint: Footprint, schedules: int) -> list[Access | None]:
    """Returns the accesses of each schedule."""
    blocks = np.prod(np.broadcast_arrays(*footprint.grid), axis=0)
    transactions = footprint.mean_step.transactions * footprint.steps * blocks
    columns = transactions, footprint.coalescing, footprint.access_bytes
    rows = zip(*(np.broadcast_to(column, (schedules,)) for column in columns), strict=True)
    return [Access(*map(float, row)) if row[-1] else None for row in rows]


# ------------------------------------------------------------------------------
# Names the bottleneck of a schedule: groups the cost model's terms by hardware resource.

# In the order of stacking and colours in plots.
GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "matrix units": ("mma", "power", "smem", "wgmma_bubble", "step_bubble", "tile_bubble", "tile_end"),
        "FP32 lanes and MUFU": ("mufu", "fp32"),
        "L2 and TMA": ("l2", "tma_rows", "oob_fill"),
        "device memory": ("hbm",),
        "latency": ("latency",),
        "start and end": (
            "step",
            "pipeline_setup",
            "prologue",
            "epilogue",
            "copies",
            "cluster_sync",
            "dsmem",
            "exchange",
            "tail_reduction",
            "launch",
        ),
    }
)


def group_of(term: str) -> str:
    """Returns the group of a term of the model.

    Raises:
      KeyError: The model has no such term.
    """
    return {name: group for group, names in GROUPS.items() for name in names}[term]
