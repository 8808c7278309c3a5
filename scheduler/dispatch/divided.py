"""Calls that XLA shards over the devices of a mesh. Each device's schedule is selected after XLA has partitioned."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax import lax

from scheduler.dispatch import missed
from scheduler.dispatch.digest import digest
from scheduler.dispatch.dispatch import Options
from search_spaces import partitioning_compat
from search_spaces.operation import Operation, Params
from search_spaces.partitioning_compat import DividedCall, Parts
from search_spaces.problem import Problem
from search_spaces.sharding import Divided, Sharding, Spec, divide
from search_spaces.unfolded import Shape, unfold

# Makes a tuned call of an operation on one device's shards.
Bind = Callable[..., Any]

logger = logging.getLogger("scheduler")


def sharding_of(
    operation: Operation[Any], problem: Problem, shapes: Sequence[Shape], options: Options
) -> Sharding[Any] | str:
    """Returns how a call may be sharded over the devices of a mesh, or the reason why it cannot.

    Args:
      operation: the operation.
      problem: the problem of the whole call.
      shapes: the shapes of the operands, which may split an axis into several.
      options: the options of the call.
    """
    if options.backends == frozenset({operation.library.backend}):
        return "only the library may answer, which XLA divides by itself"
    found = operation.sharding(problem)
    if found is None:
        return f"{operation.name} does not say how it is divided over devices (Operation.shard)"
    return unfold(found, problem, shapes)


def lower(
    ctx: Any,
    args: Sequence[Any],
    bind: Bind,
    operation: Operation[Any],
    problem: Problem,
    params: Params,
    options: Options,
) -> Any:
    """Lowers the call so that each device computes its shard, with the schedule selected for the shard's problem.

    Returns:
      The lowered values, or the reason why the call cannot be sharded.

    Raises:
      SchedulerError: processes of one job could select different schedules.
    """
    shapes = tuple(aval.shape for aval in ctx.avals_in)
    sharding = sharding_of(operation, problem, shapes, options)
    if isinstance(sharding, str):
        return sharding
    if (reason := partitioning_compat.why_whole(ctx)) is not None:
        return reason
    local = dataclasses.replace(options, divided=True)

    def parts(mesh: Mapping[str, int], operands: Sequence[Spec], results: Sequence[Spec]) -> Parts:
        found = divide(sharding, problem, mesh, operands, results)
        logger.debug("%s %s over %s: %s", operation.name, problem, _sizes(mesh), told(found))
        run = functools.partial(compute, found, functools.partial(bind, operation, params, local))
        return Parts(run, found.operands, found.results)

    (platform,) = ctx.platforms or ctx.module_context.platforms
    call = DividedCall(
        meant=(operation, problem, shapes, params, dataclasses.replace(options, generation=0)),
        divide=parts,
        within=functools.partial(missed.asking_from, missed.line_asking()),
    )
    key = digest(operation, problem, shapes, params, platform, options)
    return partitioning_compat.lower_divided(ctx, args, sharding, call, key)


def compute(found: Divided[Any], call: Callable[..., Any], *args: Any) -> tuple[Any, ...]:
    """Returns the results of one device.

    All axes of the mesh must be manual. `call` is ``call(problem, *args)``.
    """
    return found.compute(call, args, lax.psum, _scatter)


def _scatter(x: Any, axes: tuple[str, ...], dim: int) -> Any:
    return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)


def told(found: Divided[Any]) -> str:
    """Describes the computation of each device, for the log."""
    sums = {axis for axes in found.sums for axis in axes}
    scattered = " and scattered" if found.scatters else ""
    summed = f", summed over {', '.join(sorted(sums))}{scattered}" if sums else ""
    return "; ".join([f"each device asks for {found.problem}{summed}", *found.gathered])


def _sizes(mesh: Mapping[str, int]) -> str:
    return " x ".join(map(str, mesh.values())) or "1"
