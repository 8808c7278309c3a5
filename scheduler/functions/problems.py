"""problems(): every tuned problem of a function, how often it is posed, and by which lines."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

from scheduler.core import hardware as chips
from scheduler.core.errors import SchedulerError
from scheduler.core.files import replace_text
from scheduler.core.hardware import Hardware
from scheduler.dispatch import calls
from scheduler.functions import equations, job_text, local, wording
from scheduler.functions.counted import Counted, Tally
from scheduler.functions.pure import pure_call
from scheduler.functions.suggestions import Suggestion, suggestions
from search_spaces.configuration import comparisons


@dataclasses.dataclass(frozen=True)
class Left:
    """A tuned call for which no kernel can be asked where XLA divides the function over devices: it answers.

    Attributes:
      row: the problem before it is divided.
      reason: in words.
    """

    row: Counted
    reason: str


@dataclasses.dataclass(frozen=True, repr=False)
class Problems:
    """What a function poses, the most expensive first.

    Attributes:
      untuned: what could be tuned and is not, the most expensive first.
      hardware: the chip by whose roofline they are in order.
      loops: what the counts leave open: the turns of a `while`, the branches of a `cond`.
      mesh: that over which XLA divides the function, as ``data=2, model=4``: tuned problems are those of one device.
        "" where it divides none of its tuned calls.
      left: tuned calls that XLA answers there.
    """

    tuned: tuple[Counted, ...]
    hardware: Hardware
    untuned: tuple[Suggestion, ...] = ()
    loops: tuple[equations.Loop, ...] = ()
    mesh: str = ""
    left: tuple[Left, ...] = ()

    def __repr__(self) -> str:
        return wording.text(self)

    def save(self, file: str | os.PathLike[str]) -> None:
        """Writes the tuned problems as a job, which ``tile-scheduler tune --job`` searches."""
        replace_text(file, self.job())

    def job(self) -> str:
        """That job's text."""
        of = f"one device's of {self.mesh}, " if self.mesh else ""
        return job_text.written(self.tuned, f"The tuned problems of a function, {of}the most expensive first")

    def __iter__(self) -> Iterator[Counted]:
        return iter(self.tuned)

    def __len__(self) -> int:
        return len(self.tuned)


@comparisons()
def problems(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Problems:
    """Every tuned problem of ``fn(*args, **kwargs)``, the most expensive first; nothing is computed.

    Backward passes are counted where `fn` differentiates; the length of a `lax.scan` multiplies; the turns of a
    `while_loop` count as one, and of a `cond` all branches. Calls that give a `schedule=` ask nothing of a store, and
    are left out. Costs are those of the chip here, or of `scheduler.target`.

    Where XLA divides `fn` over the devices of a mesh, problems are those of one of them: `fn` is then compiled for that
    mesh, with XLA's answers. Shardings may be of a mesh without devices, where there are as many on the CPU.

    Args:
      fn: plain, or jitted by `jax.jit`, `flax.nnx.jit` or `equinox.filter_jit`. What it updates in place (modules,
        dicts, lists) counts as a result.
      args, kwargs: of `fn`; a `jax.ShapeDtypeStruct` does for an array, with a sharding where it has one. What is no
        array is constant.

    Raises:
      SchedulerError: XLA divides `fn` over more devices than there are, or cannot compile it so; or `fn` has effects
        that cannot be carried out of a trace.

    There is a warning where all derivatives that `fn` computes are dropped, as nothing that it returns needs them.
    """
    chip = _chip()
    pure = pure_call(fn, args, kwargs)
    function = equations.traced(pure.function, *pure.arrays)
    loops = dict[Any, equations.Loop]()
    for body in equations.bodies(function.jaxpr):
        if isinstance(body, equations.Loop):
            loops.setdefault((body.kind, body.line), body)
    over = local.mesh_of(function)
    tuned, left = Tally(chip), dict[str, Tally]()
    for made in local.calls(function) if over is None else local.calls_divided(function, over):
        for operation, problem in made.asks:
            tuned.add(operation, problem, made.count, [made.line])
        if not made.asks:
            left.setdefault(made.why_not, Tally(chip)).add(made.operation, made.problem, made.count, [made.line])
    by_library = tuple(Left(row, reason) for reason, tally in left.items() for row in tally.rows())
    mesh = "" if over is None else local.mesh_text(over)
    return Problems(tuned.rows(), chip, suggestions(function.jaxpr, chip), tuple(loops.values()), mesh, by_library)


def _chip() -> Hardware:
    if calls.target.value:
        return chips.find(calls.target.value)
    try:
        return chips.detect()
    except SchedulerError:  # of an unknown chip only the order is wanted
        return chips.TABLE[0]
