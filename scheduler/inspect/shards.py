"""Lists ways to partition a problem over a mesh, the usual ones or a given one, and the problem on each device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from scheduler.core.errors import SchedulerError
from scheduler.core.text import mesh_text
from search_spaces.operation import Operation
from search_spaces.problem import Problem
from search_spaces.sharding import Divided, Letters, MeshAxes, Sharding, Spec, divide
from search_spaces.space import unknown


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to partition a problem.

    Attributes:
      description: A description of the way.
      divided: The result of the partitioning.
    """

    description: str
    divided: Divided[Any]


def sharding_of(operation: Operation[Any], problem: Problem) -> Sharding[Any]:
    """Returns the sharding rule of a problem.

    Raises:
      SchedulerError: The operation declares no sharding rule.
    """
    found = operation.sharding(problem)
    if found is None:
        raise SchedulerError(
            f"{operation.name} does not declare how it is sharded (Operation.shard): on a mesh, calls outside of "
            "jax.shard_map use XLA"
        )
    return found


def usual_ways(sharding: Sharding[Any], problem: Problem, mesh: Mapping[str, int]) -> list[Way]:
    """Returns the usual ways to partition a problem over the mesh's axes.

    The first dimension (sequences, rows) is sharded over all mesh axes except the last, or over all of them. Each other
    dimension (columns, heads, reduced dimensions) is sharded over the last mesh axis, alone or together with the first
    dimension. Ways with the same result are listed once.
    """
    *outer, inner = mesh
    first, *others = (*sharding.divided, *sharding.summed)
    ways: list[dict[str, MeshAxes]] = [{first: tuple(outer)}, {first: tuple(mesh)}]
    for letter in others:
        ways += [{letter: (inner,)}, {first: tuple(outer), letter: (inner,)}]
    found: dict[Any, Way] = {}
    for over in ways:
        named = {letter: axes for letter, axes in over.items() if axes}  # the mesh may have a single axis
        if named:
            way = by_letters(sharding, problem, mesh, named)
            found.setdefault((way.divided.operands, way.divided.results), way)
    return list(found.values())


def by_letters(sharding: Sharding[Any], problem: Problem, mesh: Mapping[str, int], over: Mapping[str, MeshAxes]) -> Way:
    """Returns the way that shards each of these letters over these mesh axes, in all arrays that have the letter.

    Raises:
      ValueError: No array has such a letter, the mesh has no such axis, or an axis is used twice.
    """
    for letter in over:
        if letter not in sharding.letters:
            raise ValueError(f"{sharding.rule!r} has no {unknown(letter, sharding.letters)}")
    named = [axis for axes in over.values() for axis in axes]
    for axis in named:
        if axis not in mesh:
            raise ValueError(f"the mesh has no axis {unknown(axis, mesh)}")
        if named.count(axis) > 1:
            raise ValueError(f"the axis {axis} is used twice")

    def spec(array: Sequence[Letters]) -> Spec:
        return tuple(tuple(axis for letter in letters for axis in over.get(letter, ())) for letters in array)

    operands, results = sharding.arrays
    divided = divide(sharding, problem, mesh, [*map(spec, operands)], [*map(spec, results)])
    return Way(", ".join(f"{letter} over {', '.join(axes)}" for letter, axes in over.items()), divided)


def by_specs(
    sharding: Sharding[Any],
    problem: Problem,
    mesh: Mapping[str, int],
    operands: Sequence[Spec],
    results: Sequence[Spec] = (),
) -> Way:
    """Returns the way given by these partition specs. Operands without a spec are not sharded.

    Raises:
      ValueError: There are more specs than arrays, or a spec does not match its array or the mesh.
    """
    arrays = sharding.arrays
    given = []
    for name, specs, known in zip(("operands", "results"), (operands, results), arrays, strict=True):
        if len(specs) > len(known):
            extents = mesh_text(sharding.extents(problem))
            raise ValueError(
                f"expected at most {len(known)} specs of {name}, found {len(specs)}: {sharding.rule!r} with {extents}"
            )
        given.append([*specs, *[()] * (len(known) - len(specs))] if specs else [])
    divided = divide(sharding, problem, mesh, given[0] or [()] * len(arrays[0]), given[1])
    return Way("as given", divided)


def whole(sharding: Sharding[Any]) -> list[str]:
    """Returns the letters that cannot be sharded: each device holds their whole extent."""
    return [letter for letter in sharding.letters if letter not in (*sharding.divided, *sharding.summed)]


def spec_text(spec: Spec) -> str:
    """Formats a spec as JAX does: ``P('data')``. Trailing axes without sharding are omitted."""
    divided = max((number for number, axes in enumerate(spec, 1) if axes), default=0)
    entries = (None if not axes else axes[0] if len(axes) == 1 else axes for axes in spec[:divided])
    return f"P({', '.join(map(repr, entries))})"
