"""Common code of front ends: reasons why no kernel supports given arrays, and axes split into several."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from search_spaces import jax_compat
from search_spaces.problem import Problem
from search_spaces.sharding import Letters, Sharding, shape_of

# The reason if a call on such a mesh is not sharded explicitly. The reason why it is not may follow.
EXPLICIT_AXES = "an array is on a mesh with explicit axes (inside `jax.shard_map` kernels are asked)"
_posing: ContextVar[bool] = ContextVar("posing", default=False)


@contextmanager
def allow_explicit_axes() -> Iterator[None]:
    """Context in which arrays on a mesh with explicit axes pose problems, too: problems of the whole arrays."""
    before = _posing.set(True)
    try:
        yield
    finally:
        _posing.reset(before)


def unsupported_reason(arrays: Mapping[str, Any]) -> str | None:
    """Returns why no operation supports these arrays, keyed by the caller's names; None if they are supported."""
    for name, x in arrays.items():
        if not isinstance(x, jax.Array):
            return f"{name} is no array but {type(x).__name__}"
        if not all(isinstance(extent, int) for extent in x.shape):
            return f"{name} has symbols for extents: {x.shape}"
        if not all(x.shape):
            return f"{name} is empty: {x.shape}"
    return EXPLICIT_AXES if jax_compat.has_explicit_axes(list(arrays.values())) and not _posing.get() else None


def require_array(name: str, x: Any) -> None:
    """Raises a TypeError if `x` is neither an array nor a number, as `jnp` does for a list."""
    if x is None or isinstance(x, list | tuple):
        raise TypeError(f"{name} must be an array, not {type(x).__name__}: give it as jnp.asarray({name})")


def weakly_typed(*arrays: jax.Array) -> str | None:
    """Returns why arrays have no dtype of their own to define a problem by; None if they have."""
    if any(x.weak_type for x in arrays):
        return "an array is weakly typed, as Python's numbers are: give it a dtype with .astype"
    return None


# ------------------------------------------------------------------------------
# Arrays with several axes in place of one axis of their problem: leading axes that a mesh may divide separately.
#
# If batch and length of ``[batch, length, columns]`` are divided, the folded rows are not: the rows of one device are
# not contiguous. So a call takes and returns such arrays unfolded, and only the shards of a device are folded. The
# shapes determine the axes of each letter of the sharding.

P = TypeVar("P", bound=Problem)
Shape = tuple[int, ...]


def lead(shape: Shape) -> Shape:
    """Returns leading axes in the form that a call takes: without axes of extent 1, but at least one axis."""
    return tuple(extent for extent in shape if extent > 1) or (1,)


def in_front(x: Any, dim: int | None, size: int) -> jax.Array:
    """Moves the mapped axis of an operand to the front; repeats the operand along it if it is not mapped."""
    return jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)


def axes_of(sharding: Sharding[P], problem: P, shapes: Sequence[Shape | None]) -> dict[str, Shape]:
    """Returns, for each letter that has several axes in arrays of these shapes, their extents, major first.

    Args:
      shapes: shapes of operands and then of results, all or the first ones; None if unknown. In a group of several
        axes, those of extent 1 come last.

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
        for letters, axes in zip(array, grouped(wanted, shape), strict=True):
            if len(letters) > 1 and len(axes) > 1:
                raise ValueError(f"an axis of {' times '.join(letters)} is one, not {axes}")
            if len(letters) == 1 and found.setdefault(letters[0], axes) != axes:
                raise ValueError(f"{letters[0]} is {axes} in one array and {found[letters[0]]} in another")
    return {letter: axes for letter, axes in found.items() if len(axes) > 1}


def grouped(wanted: Sequence[int], shape: Shape) -> list[Shape]:
    """Groups consecutive axes so that the product of each group is the wanted extent; raises a ValueError if not."""
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
class SplitAxes(Sharding[P]):
    """A sharding of arrays in which some letters have several axes: each axis is a letter of its own.

    Attributes:
      folded: the sharding of the problem's own arrays.
      axes: for each such letter, the extents of its axes.
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
        """Returns the shapes of operands, and then of results."""
        extents = self.extents(problem)
        return [shape_of(array, extents) for array in itertools.chain(*self.arrays)]

    def at_once(self, problem: P, run: Callable[..., Sequence[jax.Array]], *args: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the results of ``run(problem, *args)``, where `run` takes the problem's own, folded arrays."""
        found = run(problem, *(x.reshape(s.shape) for x, s in zip(args, problem.operands(), strict=True)))
        shapes = self.shapes(problem)[len(args) :]
        return tuple(x.reshape(shape) for x, shape in zip(found, shapes, strict=True))

    def each(self, problem: P, run: Callable[..., Sequence[jax.Array]], *args: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the results of ``run(problem, *args)``, mapped over axes, where `run` takes the problem's own arrays.

        XLA then partitions the mapped program along each of these axes, as it does a program that has them. Summed
        letters are folded.
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
    """Returns the index of the axis of this name, once the axes in `gone` are removed; None if there is none."""
    left = [letters for letters in array if letters[0] not in gone]
    return left.index((name,)) if (name,) in left else None


def _names(letter: str, axes: Shape) -> tuple[str, ...]:
    return tuple(f"{letter}_{i}" for i in range(len(axes)))


def split_axes(sharding: Sharding[P], problem: P, shapes: Sequence[Shape]) -> SplitAxes[P]:
    """Returns the sharding of operands of these shapes; raises as `axes_of` does."""
    axes = axes_of(sharding, problem, shapes)
    names = {letter: _names(letter, extents) for letter, extents in axes.items()}

    def expanded(letters: Sequence[str]) -> tuple[str, ...]:
        return tuple(itertools.chain(*(names.get(letter, (letter,)) for letter in letters)))

    def spelled(array: Sequence[Letters]) -> str:
        return " ".join(" ".join(expanded(x)) if len(x) == 1 else f"({' '.join(x)})" for x in array)

    def local(problem: P, extents: Mapping[str, int]) -> P:
        whole = {letter: math.prod(extents[name] for name in of) for letter, of in names.items()}
        return sharding.local(problem, {**extents, **whole})

    return SplitAxes(
        rule=" -> ".join(", ".join(map(spelled, arrays)) for arrays in sharding.arrays),
        divided=expanded(sharding.divided),
        summed=expanded(sharding.summed),
        local=local,
        partial=sharding.partial,
        finish=sharding.finish,
        folded=sharding,
        axes=axes,
    )
