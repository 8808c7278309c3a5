"""Calls that XLA shards over the devices of a mesh. Each device's schedule is selected after XLA has partitioned."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding

from scheduler.core.text import log, mesh_text
from scheduler.dispatch import stored
from scheduler.dispatch.dispatch import Options
from scheduler.dispatch.query_recorder import RecordingOptions, digest
from search_spaces import partitioning_compat
from search_spaces.front_end import Shape, split_axes
from search_spaces.operation import Operation, Params
from search_spaces.partitioning_compat import DividedCall, Parts
from search_spaces.problem import Problem
from search_spaces.sharding import Divided, Sharding, Spec, divide

# Makes a tuned call of an operation on one device's shards.
Bind = Callable[..., Any]


def sharding_of(
    operation: Operation[Any], problem: Problem, shapes: Sequence[Shape], options: Options
) -> Sharding[Any] | str:
    """Returns how a call may be sharded over the devices of a mesh, or the reason why it cannot.

    Args:
      shapes: the shapes of the operands, which may split an axis into several.
    """
    if options.backends == frozenset({operation.library.backend}):
        return "only the library is allowed, which XLA partitions itself"
    found = operation.sharding(problem)
    if found is None:
        return f"{operation.name} does not declare how it is sharded over devices (Operation.shard)"
    return split_axes(found, problem, shapes)


def lower_divided_call(
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
        log.debug("%s %s over %s: %s", operation.name, problem, mesh_text(mesh), sharding_text(found))
        if isinstance(options, RecordingOptions) and any(map(any, found.operands)):
            options.recorder.shardings.append((tuple(mesh.items()), found.operands))
        run = functools.partial(compute, found, functools.partial(bind, operation, params, local))
        return Parts(run, found.operands, found.results)

    (platform,) = ctx.platforms or ctx.module_context.platforms
    call = DividedCall(
        meant=(operation, problem, shapes, params, dataclasses.replace(options, generation=0)),
        divide=parts,
        within=functools.partial(stored.misses_from, stored.calling_line()),
    )
    key = digest(operation, problem, shapes, params, platform, options)
    return partitioning_compat.lower_divided(ctx, args, sharding, call, key)


def compute(found: Divided[Any], call: Callable[..., Any], *args: Any) -> tuple[Any, ...]:
    """Returns the results of one device.

    All axes of the mesh must be manual. `call` is ``call(problem, *args)``.
    """
    return found.compute(
        call, args, lax.psum, lambda x, axes, dim: lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
    )


def sharding_text(found: Divided[Any]) -> str:
    """Describes the computation of each device, for the log."""
    sums = {axis for axes in found.sums for axis in axes}
    scattered = " and scattered" if found.scatters else ""
    summed = f", summed over {', '.join(sorted(sums))}{scattered}" if sums else ""
    return "; ".join([f"each device runs {found.problem}{summed}", *found.gathered])


# ------------------------------------------------------------------------------
# Calls on arrays with explicit sharding in their types: run as a `jax.shard_map` if the result type equals JAX's.

# The mesh of a call's arrays. Folding the arrays' axes may lose its devices.
_mesh: ContextVar[Any] = ContextVar("mesh", default=None)


class NotShardable(Exception):
    """The call falls back to the library; the message has the reason."""


def call_sharded(
    operation: Operation[Any], problem: Problem, options: Options, call: Callable[..., Any], *args: Any
) -> Any:
    """Runs the call as a `jax.shard_map` over the mesh of its arrays, one shard per device.

    Args:
      call: ``call(problem, *args)`` computes one shard.

    Raises:
      NotShardable: the call cannot be sharded, or only by gathering an array that JAX would leave sharded.
    """
    if partitioning_compat.is_mapped_over_a_mesh():
        raise NotShardable("a `vmap` around it has an `spmd_axis_name`")
    sharding = sharding_of(operation, problem, [x.shape for x in args], options)
    if isinstance(sharding, str):
        raise NotShardable(sharding)
    mesh = _mesh.get()
    if mesh is None:
        raise NotShardable("some axes of its mesh are not explicit")
    specs = [jax.typeof(x).sharding.spec for x in args]
    found: Divided[Any] = divide(sharding, problem, dict(mesh.shape), specs)
    if found.gathered:
        raise NotShardable("; ".join(found.gathered))

    one_device = functools.partial(compute, found, call)
    in_specs, out_specs = (
        tuple(map(partitioning_compat.partition_spec, specs)) for specs in (found.operands, found.results)
    )
    placed = [jax.sharding.reshard(x, NamedSharding(mesh, spec)) for x, spec in zip(args, in_specs, strict=True)]
    log.debug("%s %s on %s: %s", operation.name, problem, mesh, sharding_text(found))
    return problem.pack(jax.shard_map(one_device, mesh=mesh, in_specs=in_specs, out_specs=out_specs)(*placed))


def sharded_or_reason(arrays: Sequence[Any], tuned: Callable[[], Any], plain: Callable[[], Any]) -> Any | str:
    """Returns the result of `tuned` if its type equals that of `plain`, otherwise the reason to use `plain`.

    Errors of JAX when it traces `plain` are raised unchanged.

    Args:
      arrays: the arrays of the call, as the user passed them.
    """
    wanted = _types(plain)
    before = _mesh.set(_mesh_of(arrays))
    try:
        found = _types(tuned)
        return tuned() if found == wanted else f"its result would be {found}, and JAX's is {wanted}"
    except NotShardable as reason:
        return str(reason)
    except partitioning_compat.ShardingTypeError as error:  # sharded axes that cannot be folded into one
        return str(error).splitlines()[0]
    finally:
        _mesh.reset(before)


def _mesh_of(arrays: Sequence[Any]) -> Any:
    """Returns the mesh in the arrays' types, or None if some of its axes are not explicit.

    The mesh includes its devices if one of the arrays is concrete. A function of these arrays has no other source of
    the devices.
    """
    meshes = {mesh for x in arrays if not (mesh := jax.typeof(x).sharding.mesh).empty}
    mesh = meshes.pop()
    if meshes or set(mesh.axis_types) != {AxisType.Explicit}:  # there are two meshes if a `vmap` has taken an axis
        return None
    placed = [getattr(x.sharding, "mesh", None) for x in arrays if not isinstance(x, jax.core.Tracer)]
    return next((each for each in placed if isinstance(each, Mesh) and each.abstract_mesh == mesh), mesh)


def _types(function: Callable[[], Any]) -> list[str]:
    return [str(aval) for aval in jax.make_jaxpr(function)().out_avals]
