"""Feasibility of a schedule for a problem on a chip, with the reason if it cannot run."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler.core.hardware import Hardware
from scheduler.core.records import Schedule
from scheduler.model.traffic import column
from search_spaces.footprint import Footprint
from search_spaces.kernel import Kernel, Target
from search_spaces.problem import Problem
from search_spaces.space import Columns


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
    asked, limit = int(np.ravel(onchip_demand(footprint))[0]), int(np.ravel(onchip_limit(footprint, hardware))[0])
    if asked > limit:
        return f"it needs {asked} bytes of on-chip memory and a block of {hardware.kind} has {limit}"
    return None


def onchip_demand(footprint: Footprint) -> npt.NDArray[np.float64]:
    """Returns the minimum on-chip bytes per block of each schedule."""
    return column(footprint.onchip_bytes) + footprint.spill_bytes


def onchip_limit(footprint: Footprint, hardware: Hardware) -> npt.NDArray[np.float64]:
    """Returns the maximum on-chip bytes per block of each schedule: its launch's request, up to the chip's limit."""
    asked = column(footprint.onchip_limit_bytes)
    unasked = hardware.onchip_default_bytes or hardware.onchip_bytes
    return np.minimum(np.where(asked > 0, asked, unasked), hardware.onchip_bytes)


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
