"""Arrays with several axes where their problem has one: leading axes that a mesh may divide each on its own.

``[batch, length, columns]`` whose batch and length are divided has no rows that are: those of one device do not lie
together. So a call takes such arrays as they are, and its results are such; only what one device has of them is folded.
Of which axes a letter of the sharding consists, the shapes tell.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from search_spaces.problem import Problem
from search_spaces.sharding import Letters, Sharding, shape_of

P = TypeVar("P", bound=Problem)
Shape = tuple[int, ...]


def lead(shape: Shape) -> Shape:
    """Leading axes as a call takes them in place of one: without those of extent 1, and one of 1 where none is left."""
    return tuple(extent for extent in shape if extent > 1) or (1,)


def in_front(x: Any, dim: int | None, size: int) -> jax.Array:
    """An operand of a mapped call with the mapped axis in front; repeated along it where it is not mapped."""
    return jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)


def axes_of(sharding: Sharding[P], problem: P, shapes: Sequence[Shape | None]) -> dict[str, Shape]:
    """Of each letter that has several in arrays of these shapes, their extents, the major one first.

    Args:
      shapes: of operands, and then of results, of some or all; None of what is not known. Axes of extent 1 among
        several are the last of them.

    Raises:
      ValueError: the problem has no such arrays.
    """
    extents = sharding.extents(problem)
    arrays = list(itertools.chain(*sharding.arrays))
    found: dict[str, Shape] = {}
    for array, shape in zip(arrays, shapes, strict=False):
        if shape is None:
            continue
        wanted = [math.prod(extents[letter] for letter in letters) for letters in array]
        for letters, axes in zip(array, _grouped(wanted, shape), strict=True):
            if len(letters) > 1 and len(axes) > 1:
                raise ValueError(f"an axis of {' times '.join(letters)} is one, not {axes}")
            if len(letters) == 1 and found.setdefault(letters[0], axes) != axes:
                raise ValueError(f"{letters[0]} is {axes} in one array and {found[letters[0]]} in another")
    return {letter: axes for letter, axes in found.items() if len(axes) > 1}


def _grouped(wanted: Sequence[int], shape: Shape) -> list[Shape]:
    """The axes that come to each of these extents, one after the other."""
    groups, rest = [], shape
    for after, extent in zip(reversed(range(len(wanted))), wanted, strict=True):
        count = 1
        while len(rest) - count > after and (math.prod(rest[:count]) < extent or rest[count] == 1):
            count += 1
        groups.append(rest[:count])
        rest = rest[count:]
    if rest or [math.prod(axes) for axes in groups] != list(wanted):
        raise ValueError(f"{shape} does not fold into {tuple(wanted)}")
    return groups


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unfolded(Sharding[P]):
    """A sharding of arrays some of whose letters have several axes: each is a letter of its own.

    Attributes:
      folded: that of the problem's own arrays.
      axes: of each such letter, the extents of its axes.
    """

    folded: Sharding[P]
    axes: Mapping[str, Shape]

    def extents(self, problem: P) -> dict[str, int]:
        found = self.folded.extents(problem)
        for letter, axes in self.axes.items():
            del found[letter]
            found |= dict(zip(_names(letter, axes), axes, strict=True))
        return found

    def shapes(self, problem: P) -> list[Shape]:
        """Of operands, and then of results."""
        extents = self.extents(problem)
        return [shape_of(array, extents) for array in itertools.chain(*self.arrays)]

    def at_once(self, problem: P, run: Callable[..., Sequence[jax.Array]], *args: jax.Array) -> tuple[jax.Array, ...]:
        """The results of ``run(problem, *args)``, which takes the problem's own arrays, folded."""
        found = run(problem, *(x.reshape(s.shape) for x, s in zip(args, problem.operands(), strict=True)))
        shapes = self.shapes(problem)[len(args) :]
        return tuple(x.reshape(shape) for x, shape in zip(found, shapes, strict=True))

    def each(self, problem: P, run: Callable[..., Sequence[jax.Array]], *args: jax.Array) -> tuple[jax.Array, ...]:
        """The results of ``run(problem, *args)``, which takes the problem's own arrays, mapped over axes.

        So XLA divides a program of many by each of these axes, as it does one that has them. What is summed is folded.
        """
        extents = self.extents(problem)
        outer = [
            name
            for letter, axes in self.axes.items()
            if letter in self.folded.divided
            for name in _names(letter, axes)[:-1]
        ]
        one = self.local(problem, extents | dict.fromkeys(outer, 1))
        operands, results = self.arrays
        inner = [tuple(x for x in array if x[0] not in outer) for array in results]
        shapes = [shape_of(array, extents) for array in inner]

        def mapped(*args: jax.Array) -> tuple[jax.Array, ...]:
            found = run(one, *(x.reshape(s.shape) for x, s in zip(args, one.operands(), strict=True)))
            return tuple(x.reshape(shape) for x, shape in zip(found, shapes, strict=True))

        for count, name in reversed(list(enumerate(outer))):
            into, out_of = ([_place(array, name, outer[:count]) for array in arrays] for arrays in (operands, results))
            mapped = jax.vmap(mapped, in_axes=tuple(into), out_axes=tuple(out_of))
        return mapped(*args)


def _place(array: Sequence[Letters], name: str, gone: Sequence[str]) -> int | None:
    """Of the axis of this name in an array that has these no more; None where it has no such axis."""
    left = [letters for letters in array if letters[0] not in gone]
    return left.index((name,)) if (name,) in left else None


def _names(letter: str, axes: Shape) -> tuple[str, ...]:
    return tuple(f"{letter}_{i}" for i in range(len(axes)))


def unfold(sharding: Sharding[P], problem: P, shapes: Sequence[Shape]) -> Unfolded[P]:
    """The sharding of operands of these shapes; raises as `axes_of`."""
    axes = axes_of(sharding, problem, shapes)
    names = {letter: _names(letter, extents) for letter, extents in axes.items()}

    def expanded(letters: Sequence[str]) -> tuple[str, ...]:
        return tuple(itertools.chain(*(names.get(letter, (letter,)) for letter in letters)))

    def spelled(array: Sequence[Letters]) -> str:
        return " ".join(" ".join(expanded(x)) if len(x) == 1 else f"({' '.join(x)})" for x in array)

    def local(problem: P, extents: Mapping[str, int]) -> P:
        whole = {letter: math.prod(extents[name] for name in of) for letter, of in names.items()}
        return sharding.local(problem, {**extents, **whole})

    return Unfolded(
        rule=" -> ".join(", ".join(map(spelled, arrays)) for arrays in sharding.arrays),
        divided=expanded(sharding.divided),
        summed=expanded(sharding.summed),
        local=local,
        partial=sharding.partial,
        finish=sharding.finish,
        folded=sharding,
        axes=axes,
    )
