"""Whoever wants to know what a call asks, and no answer: nothing is looked up, and the library answers meanwhile."""

from __future__ import annotations

import dataclasses
from typing import Any

from scheduler.dispatch.dispatch import Options
from search_spaces.operation import Operation
from search_spaces.problem import Problem


@dataclasses.dataclass(frozen=True, eq=False)
class Listener:
    """What one call asked while it was lowered and compiled. Each is told from others by its identity.

    Attributes:
      asked: the problems that it posed: of a call that XLA divides over devices, those of one device.
      left: why no kernel could be asked, in words.
    """

    asked: list[tuple[Operation[Any], Problem]] = dataclasses.field(default_factory=list)
    left: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Listening(Options):
    """A call's options in place of the caller's own: `listener` is told what is asked."""

    listener: Listener = dataclasses.field(default_factory=Listener)
