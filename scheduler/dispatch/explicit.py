"""Calls on arrays with explicit sharding in their types: run as a `jax.shard_map` if the result type equals JAX's."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding

from scheduler.dispatch.dispatch import Options
from scheduler.dispatch.divided import compute, sharding_of, told
from search_spaces import partitioning_compat
from search_spaces.operation import Operation
from search_spaces.problem import Problem
from search_spaces.sharding import Divided, divide

logger = logging.getLogger("scheduler")
# The mesh of a call's arrays. Folding the arrays' axes may lose its devices.
_mesh: ContextVar[Any] = ContextVar("mesh", default=None)


class WholeError(Exception):
    """The call falls back to the library; the message has the reason."""


def over(operation: Operation[Any], problem: Problem, options: Options, call: Callable[..., Any], *args: Any) -> Any:
    """Runs the call as a `jax.shard_map` over the mesh of its arrays, one shard per device.

    Args:
      call: ``call(problem, *args)`` computes one shard.

    Raises:
      WholeError: the call cannot be sharded, or only by gathering an array that JAX would leave sharded.
    """
    if partitioning_compat.is_mapped_over_a_mesh():
        raise WholeError("a `vmap` around it has an `spmd_axis_name`")
    sharding = sharding_of(operation, problem, [x.shape for x in args], options)
    if isinstance(sharding, str):
        raise WholeError(sharding)
    mesh = _mesh.get()
    if mesh is None:
        raise WholeError("some axes of its mesh are not explicit")
    specs = [jax.typeof(x).sharding.spec for x in args]
    found: Divided[Any] = divide(sharding, problem, dict(mesh.shape), specs)
    if found.gathered:
        raise WholeError("; ".join(found.gathered))

    one_device = functools.partial(compute, found, call)
    in_specs, out_specs = (
        tuple(map(partitioning_compat.partition_spec, specs)) for specs in (found.operands, found.results)
    )
    placed = [jax.sharding.reshard(x, NamedSharding(mesh, spec)) for x, spec in zip(args, in_specs, strict=True)]
    logger.debug("%s %s on %s: %s", operation.name, problem, mesh, told(found))
    return problem.pack(jax.shard_map(one_device, mesh=mesh, in_specs=in_specs, out_specs=out_specs)(*placed))


def unless(arrays: Sequence[Any], tuned: Callable[[], Any], plain: Callable[[], Any]) -> Any | str:
    """Returns the result of `tuned` if its type equals that of `plain`, otherwise the reason to use `plain`.

    Errors of JAX when it traces `plain` are raised unchanged.

    Args:
      arrays: the arrays of the call, as the user passed them.
    """
    wanted = _types(plain)
    before = _mesh.set(_mesh_of(arrays))
    try:
        found = _types(tuned)
        return tuned() if found == wanted else f"its result would be {found}, where JAX's is {wanted}"
    except WholeError as reason:
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
