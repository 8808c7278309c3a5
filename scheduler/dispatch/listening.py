"""Recording of the problems that a call queries. Nothing is looked up, and the library runs."""

from __future__ import annotations

import dataclasses
from typing import Any

from scheduler.dispatch.dispatch import Options
from search_spaces.operation import Operation
from search_spaces.problem import Problem


@dataclasses.dataclass(frozen=True, eq=False)
class Listener:
    """The queries of one call while it is lowered and compiled. Compared by identity.

    Attributes:
      asked: the queried problems. For a call that XLA shards over devices, the problems of one device.
      left: the reasons why no kernel could be selected.
    """

    asked: list[tuple[Operation[Any], Problem]] = dataclasses.field(default_factory=list)
    left: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Listening(Options):
    """Options that replace the caller's own, and record queries in `listener`."""

    listener: Listener = dataclasses.field(default_factory=Listener)
