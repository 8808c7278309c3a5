"""A call on arrays whose types say how they are divided: a `jax.shard_map` of its parts, where its type stays JAX's."""

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
# Of the arrays of a call; folding their axes may leave its devices out.
_mesh: ContextVar[Any] = ContextVar("mesh", default=None)


class WholeError(Exception):
    """Why a call is left to the library, in words."""


def over(operation: Operation[Any], problem: Problem, options: Options, call: Callable[..., Any], *args: Any) -> Any:
    """The call as a `jax.shard_map` over the mesh of its arrays, in which each device makes its part of it.

    Args:
      call: ``call(problem, *args)`` is that part.

    Raises:
      WholeError: it cannot be divided, or not without gathering what JAX would leave divided.
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
    """What `tuned` computes, or why it is to be left to `plain`, in words: its result must be of the same type.

    What JAX refuses of `plain`, it refuses here, in its own words.

    Args:
      arrays: those of the call, as users gave them.
    """
    wanted = _types(plain)
    before = _mesh.set(_mesh_of(arrays))
    try:
        found = _types(tuned)
        return tuned() if found == wanted else f"its result would be {found}, where JAX's is {wanted}"
    except WholeError as reason:
        return str(reason)
    except partitioning_compat.ShardingTypeError as error:  # axes that do not fold into n
        return str(error).splitlines()[0]
    finally:
        _mesh.reset(before)


def _mesh_of(arrays: Sequence[Any]) -> Any:
    """The mesh of arrays whose types name one, where all its axes are explicit; None where some are not.

    With its devices, where an array has some: a function of such arrays alone finds them nowhere else.
    """
    meshes = {mesh for x in arrays if not (mesh := jax.typeof(x).sharding.mesh).empty}
    mesh = meshes.pop()
    if meshes or set(mesh.axis_types) != {AxisType.Explicit}:  # two of them, where a `vmap` has taken an axis
        return None
    placed = [getattr(x.sharding, "mesh", None) for x in arrays if not isinstance(x, jax.core.Tracer)]
    return next((each for each in placed if isinstance(each, Mesh) and each.abstract_mesh == mesh), mesh)


def _types(function: Callable[[], Any]) -> list[str]:
    return [str(aval) for aval in jax.make_jaxpr(function)().out_avals]
