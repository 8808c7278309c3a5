"""Whether one schedule of a kernel can run for a problem on a chip, and why not."""

from __future__ import annotations

from typing import Any

import numpy as np

from scheduler.core.hardware import Hardware
from scheduler.core.records import Schedule
from search_spaces.kernel import Kernel
from search_spaces.problem import Problem
from search_spaces.space import Columns


def illegal(kernel: Kernel[Any, Any], problem: Problem, hardware: Hardware, schedule: Schedule) -> str | None:
    """Why `schedule` cannot run, in words, or None where it is legal and fits on the chip."""
    if reason := kernel.supports(problem, hardware.target):
        return reason
    space = kernel.space(problem, hardware.target)
    try:
        point = space.decode(schedule)
    except ValueError as error:
        return str(error)
    if reason := space.broken(point):
        return reason
    if (asked := onchip_bytes(kernel, problem, hardware, schedule)) > hardware.onchip_bytes:
        return f"it needs {asked} bytes of on-chip memory and a block of {hardware.kind} has {hardware.onchip_bytes}"
    return None


def onchip_bytes(kernel: Kernel[Any, Any], problem: Problem, hardware: Hardware, schedule: Schedule) -> int:
    """What one block of a point of the kernel's space asks for; 0 where no footprint tells."""
    space = kernel.space(problem, hardware.target)
    one = Columns.of([space.decode(schedule)]) if space.choices else Columns({}, length=1)
    footprint = kernel.footprint(problem, one, hardware.target)
    return 0 if footprint is None else int(np.ravel(footprint.onchip_bytes)[0])
