"""Moves the equations of a function from the explicit axes of a mesh to automatic ones, where XLA divides arrays."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from scheduler.rewriting import equations
from search_spaces import lowering_compat
from search_spaces.jax_compat import is_explicit

# Equations that move an array to another sharding, and nothing else.
_MOVES = ("reshard", "mesh_cast")
# Parameters that name the sharding of a result on explicit axes.
_OF_RESULTS = ("sharding", "out_sharding")


def on_automatic_axes(closed: Any) -> Any:
    """Returns a closed jaxpr of the same arguments and results, with no equation on explicit axes.

    On explicit axes, types have shardings, which replaced equations would have to keep. Arguments and results keep
    theirs, and `jax.sharding.reshard` becomes a constraint. XLA decides about other arrays.

    Raises:
      NotImplementedError: The function has a `jax.shard_map` on explicit axes.
    """
    made = (x.aval for equation in closed.jaxpr.eqns for x in equation.outvars)
    meshes = (x.sharding.mesh for x in (*closed.in_avals, *map(jax.typeof, closed.consts), *made))
    if (mesh := next(filter(is_explicit, meshes), None)) is None:
        return closed
    whole = NamedSharding(mesh, PartitionSpec())
    shardings = [whole if x.sharding.mesh.empty else x.sharding for x in closed.out_avals]
    structs = [_struct(x, x.sharding) for x in closed.in_avals]

    @functools.partial(jax.sharding.auto_axes, out_sharding=shardings)
    def run(constants: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
        return _evaluated(closed.jaxpr, constants, arrays)

    return jax.make_jaxpr(lambda *arrays: run(closed.consts, arrays))(*structs)


def _evaluated(jaxpr: Any, constants: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    def results(equation: Any, args: Sequence[Any]) -> Sequence[Any]:
        with jax.sharding.use_abstract_mesh(_automatic(jax.sharding.get_abstract_mesh())):
            return _results(equation, args)

    return equations.evaluated(jaxpr, constants, arrays, results)


def _results(equation: Any, args: Sequence[Any]) -> Sequence[Any]:
    primitive, params = equation.primitive, equation.params
    if primitive.name == "shard_map":
        raise NotImplementedError("a shard_map inside of explicit axes")
    if primitive.name in _MOVES:
        to = params["dst_sharding"]
        if not args[0].ndim or not is_explicit(to.mesh):
            return args
        return [jax.lax.with_sharding_constraint(args[0], NamedSharding(_automatic(to.mesh), to.spec))]
    params = {name: None if name in _OF_RESULTS else _automatic(x) for name, x in params.items()}
    if primitive.name == "sharding_constraint":
        params["sharding"] = _constraint(equation.outvars[0].aval, equation.params["sharding"])
    with lowering_compat.source_of(equation):
        results = primitive.bind(*args, **primitive.get_bind_params(params))
    return results if primitive.multiple_results else [results]


def _automatic(x: Any) -> Any:
    """Returns a mesh, or a value of an equation's parameters, for automatic axes."""
    match x:
        case dict():
            return {name: _automatic(value) for name, value in x.items()}
        case tuple() if type(x) is tuple:
            return tuple(map(_automatic, x))
        case Mesh() | AbstractMesh():
            types = tuple(AxisType.Auto if each is AxisType.Explicit else each for each in x.axis_types)
            return x.update(axis_types=types)
        case NamedSharding():
            return NamedSharding(_automatic(x.mesh), x.spec, memory_kind=x.memory_kind)
        case core.ClosedJaxpr():
            return _traced(x.jaxpr, x.consts)
        case core.Jaxpr():
            return _traced(x, ()).jaxpr
    return x


def _constraint(aval: Any, sharding: Any) -> Any:
    """Returns a constraint of automatic axes with the explicit axes of its array."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    given = (*sharding.spec, *(None,) * (aval.ndim - len(sharding.spec)))
    spec = (x if x is not None else y for x, y in zip(aval.sharding.spec, given, strict=True))
    return NamedSharding(_automatic(sharding.mesh), PartitionSpec(*spec))


def _traced(jaxpr: Any, constants: Sequence[Any]) -> Any:
    def run(*arrays: Any) -> list[Any]:
        return _evaluated(jaxpr, constants, arrays)

    avals = [x.aval for x in jaxpr.invars]
    return jax.make_jaxpr(run)(
        *(_struct(x, NamedSharding(_automatic(x.sharding.mesh), PartitionSpec())) for x in avals)
    )


def _struct(aval: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    given = None if sharding.mesh.empty else sharding
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=given, weak_type=aval.weak_type)
