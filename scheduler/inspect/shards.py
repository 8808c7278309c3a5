"""How the devices of a mesh may divide a problem: the usual ways, or one that is asked for, and what each then asks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from scheduler.core.errors import SchedulerError
from search_spaces.operation import Operation
from search_spaces.problem import Problem
from search_spaces.sharding import Divided, Letters, MeshAxes, Sharding, Spec, divide
from search_spaces.space import unknown


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to divide a problem.

    Attributes:
      said: which, in words.
      divided: what comes of it.
    """

    said: str
    divided: Divided[Any]


def sharding_of(operation: Operation[Any], problem: Problem) -> Sharding[Any]:
    """What of a problem may be divided.

    Raises:
      SchedulerError: the operation does not say.
    """
    found = operation.sharding(problem)
    if found is None:
        raise SchedulerError(
            f"{operation.name} does not say what of it may be divided (Operation.shard): on a mesh outside of "
            "jax.shard_map XLA answers it"
        )
    return found


def usual_ways(sharding: Sharding[Any], problem: Problem, mesh: Mapping[str, int]) -> list[Way]:
    """What may be divided over the mesh's axes in the usual ways.

    The first of it (sequences, rows) over all axes but the last or over all of them; each other part (columns, heads,
    what is summed) over the last axis; and both. Ways that come to the same are one.
    """
    *outer, inner = mesh
    first, *others = (*sharding.divided, *sharding.summed)
    ways: list[dict[str, MeshAxes]] = [{first: tuple(outer)}, {first: tuple(mesh)}]
    for letter in others:
        ways += [{letter: (inner,)}, {first: tuple(outer), letter: (inner,)}]
    found: dict[Any, Way] = {}
    for over in ways:
        named = {letter: axes for letter, axes in over.items() if axes}  # a mesh may have one axis
        if named:
            way = by_letters(sharding, problem, mesh, named)
            found.setdefault((way.divided.operands, way.divided.results), way)
    return list(found.values())


def by_letters(sharding: Sharding[Any], problem: Problem, mesh: Mapping[str, int], over: Mapping[str, MeshAxes]) -> Way:
    """The way in which each of these letters is divided over these axes, in all arrays that have it.

    Raises:
      ValueError: no array has such a letter, or the mesh no such axis; or one axis is to divide two.
    """
    for letter in over:
        if letter not in sharding.letters:
            raise ValueError(f"{sharding.rule!r} has no {unknown(letter, sharding.letters)}")
    named = [axis for axes in over.values() for axis in axes]
    for axis in named:
        if axis not in mesh:
            raise ValueError(f"the mesh has no axis {unknown(axis, mesh)}")
        if named.count(axis) > 1:
            raise ValueError(f"the axis {axis} cannot divide twice")

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
    """The way in which arrays lie as these specs say; those of the operands that are not there are not divided.

    Raises:
      ValueError: there are more specs than arrays, or one is of no such array or mesh.
    """
    arrays = sharding.arrays
    given = []
    for name, specs, known in zip(("operands", "results"), (operands, results), arrays, strict=True):
        if len(specs) > len(known):
            raise ValueError(f"{len(specs)} specs of {len(known)} {name}, which are {_described(sharding, problem)}")
        given.append([*specs, *[()] * (len(known) - len(specs))] if specs else [])
    divided = divide(sharding, problem, mesh, given[0] or [()] * len(arrays[0]), given[1])
    return Way("as given", divided)


def whole(sharding: Sharding[Any]) -> list[str]:
    """What each device has whole."""
    return [letter for letter in sharding.letters if letter not in (*sharding.divided, *sharding.summed)]


def spec_text(spec: Spec) -> str:
    """As JAX writes it: ``P('data')``, where axes that are not divided follow."""
    divided = max((number for number, axes in enumerate(spec, 1) if axes), default=0)
    entries = (None if not axes else axes[0] if len(axes) == 1 else axes for axes in spec[:divided])
    return f"P({', '.join(map(repr, entries))})"


def _described(sharding: Sharding[Any], problem: Problem) -> str:
    extents = sharding.extents(problem)
    return f"{sharding.rule!r} with {', '.join(f'{letter}={extent}' for letter, extent in extents.items())}"
