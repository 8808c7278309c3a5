"""problems(): every tuned problem of a function, how often it is posed, and by which lines."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scheduler.core import hardware as chips
from scheduler.core.errors import SchedulerError
from scheduler.core.hardware import Hardware
from scheduler.dispatch import calls
from scheduler.dispatch.primitive import tuned_call_p
from scheduler.functions import equations, job_text, wording
from scheduler.functions.counted import Counted, Tally
from scheduler.functions.suggestions import Suggestion, suggestions


@dataclasses.dataclass(frozen=True, repr=False)
class Problems:
    """What a function poses, the most expensive first.

    Attributes:
      untuned: what could be tuned and is not, the most expensive first.
      hardware: the chip by whose roofline they are in order.
      loops: what the counts leave open: the turns of a `while`, the branches of a `cond`.
    """

    tuned: tuple[Counted, ...]
    hardware: Hardware
    untuned: tuple[Suggestion, ...] = ()
    loops: tuple[equations.Loop, ...] = ()

    def __repr__(self) -> str:
        return wording.text(self)

    def save(self, file: str | os.PathLike[str]) -> None:
        """Writes the tuned problems as a job, which ``tile-scheduler tune --job`` searches."""
        Path(file).write_text(job_text.written(self), encoding="utf-8")

    def __iter__(self) -> Iterator[Counted]:
        return iter(self.tuned)

    def __len__(self) -> int:
        return len(self.tuned)


def problems(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Problems:
    """Every tuned problem of ``fn(*args, **kwargs)``, the most expensive first; nothing is computed.

    Backward passes are counted where `fn` differentiates; the length of a `lax.scan` multiplies; the turns of a
    `while_loop` count as one, and of a `cond` all branches. Calls that give a `schedule=` ask nothing of a store, and
    are left out. Costs are those of the chip here, or of `scheduler.target`.

    Args:
      fn: plain, or jitted with what `jax.jit` takes (``static_argnums``, shardings).
      args, kwargs: of `fn`; a `jax.ShapeDtypeStruct` does for an array.
    """
    chip = _chip()
    jaxpr = equations.traced(fn, *args, **kwargs)
    tuned, loops = Tally(chip), dict[Any, equations.Loop]()
    for body in equations.bodies(jaxpr):
        if isinstance(body, equations.Loop):
            loops.setdefault((body.kind, body.line), body)
            continue
        for equation in body.jaxpr.eqns:
            if equation.primitive is tuned_call_p and equation.params["options"].schedule is None:
                tuned.add(equation.params["operation"], equation.params["problem"], body.count, [equation])
    return Problems(tuned.rows(), chip, suggestions(jaxpr, chip), tuple(loops.values()))


def _chip() -> Hardware:
    if calls.target.value:
        return chips.find(calls.target.value)
    try:
        return chips.detect()
    except SchedulerError:  # of an unknown chip only the order is wanted
        return chips.TABLE[0]
