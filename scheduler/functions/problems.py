"""Lists the tuned problems of a function, their counts and their source lines: `problems()`."""

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
    """A tuned call left to XLA because no kernel can be used where XLA partitions the function over devices.

    Attributes:
      row: The problem before partitioning.
      reason: Why no kernel can be used.
    """

    row: Counted
    reason: str


@dataclasses.dataclass(frozen=True, repr=False)
class Problems:
    """The problems of a function, the most expensive first.

    Attributes:
      untuned: Calls that could be tuned but are not, the most expensive first.
      hardware: The chip used for the roofline that orders the problems.
      loops: Loops whose counts are unknown: the iterations of a `while`, the branches of a `cond`.
      mesh: The mesh over which XLA partitions the function, as ``data=2, model=4``: tuned problems are those of one
        device. "" if XLA partitions none of its tuned calls.
      left: Tuned calls left to XLA on that mesh.
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
        """Writes the tuned problems as a job file for ``tile-scheduler tune --job``."""
        replace_text(file, self.job())

    def job(self) -> str:
        """Returns the text of the job that `save` writes."""
        of = f"one device's of {self.mesh}, " if self.mesh else ""
        return job_text.written(self.tuned, f"The tuned problems of a function, {of}the most expensive first")

    def __iter__(self) -> Iterator[Counted]:
        return iter(self.tuned)

    def __len__(self) -> int:
        return len(self.tuned)


@comparisons()
def problems(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Problems:
    """Returns the tuned problems of ``fn(*args, **kwargs)``, the most expensive first, without running the function.

    Backward passes are counted if `fn` differentiates. The counts inside a `lax.scan` are multiplied by its length. The
    iterations of a `while_loop` count as one, and all branches of a `cond` are counted. Calls that pass `schedule=` do
    not query a store and are left out. Costs are for the current chip, or for `scheduler.target`.

    If XLA partitions `fn` over the devices of a mesh, the problems are those of one device: `fn` is compiled for that
    mesh, with XLA in place of all kernels. Shardings may use a mesh without devices, if the CPU has enough devices.

    Args:
      fn: A plain function, or one jitted by `jax.jit`, `flax.nnx.jit` or `equinox.filter_jit`. State that it updates in
        place (modules, dicts, lists) counts as a result.
      args, kwargs: Arguments of `fn`. A `jax.ShapeDtypeStruct`, optionally with a sharding, may replace an array. Other
        arguments are constants.

    Raises:
      SchedulerError: XLA partitions `fn` over more devices than are available, or cannot compile it for the mesh; or
        `fn` has effects that cannot be carried out of a trace.

    Warns if all derivatives that `fn` computes are dropped because none of its results needs them.
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
    except SchedulerError:  # on an unknown chip only the order of problems matters
        return chips.TABLE[0]
