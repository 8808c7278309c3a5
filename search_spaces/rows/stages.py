"""One stage of a row program: statistics of the elements that have been read, and the scalars that follow from them.

Each thread, or each lane, keeps statistics. `update` adds elements, `reduce` merges the statistics of all threads, and
`combine` those of two parts of a row.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from search_spaces.rows.elementwise import BIG, REDUCTIONS
from search_spaces.rows.program import Atom, Program, compute, scalar_equations

Statistics = tuple[jax.Array, ...]
# Elements, and a mask of those that count, or None if all do.
Elements = Sequence[tuple[jax.Array, jax.Array | None]]
# Returns a value of the program for some elements (`Values.vector`).
Vectors = Callable[[Atom], jax.Array]
F32 = np.float32


class Reducer(Protocol):
    """Reduces parts of a row: threads with their elements, or warps with a partial result each."""

    def reduce(self, name: str, parts: jax.Array, /) -> jax.Array: ...
    def broadcast(self, reduced: jax.Array, /) -> jax.Array: ...


class RowStatistics(Protocol):
    """How parts of a row become one number of a row.

    Attributes:
      identities: the statistics of no element.
      also: the reduction of the same elements that the statistics give, too; "" if there is none.
    """

    identities: tuple[float, ...]
    also: str

    def update(self, before: Statistics, elements: Elements, /) -> Statistics: ...
    def reduce(self, parts: Statistics, reducer: Reducer, /) -> Statistics:
        """Merges the statistics of all threads or warps of the reducer."""

    def combine(self, one: Statistics, other: Statistics, /) -> Statistics:
        """Merges the statistics of two parts of a row."""

    def finish(self, statistics: Statistics, /) -> tuple[jax.Array, jax.Array | None]:
        """Returns the number, and that of `also`."""


class _Plain:
    """A reduction that joins two vectors as it joins two numbers."""

    also: str = ""

    def __init__(self, name: str) -> None:
        self.name, self.reduction = name, REDUCTIONS[name]
        self.identities: tuple[float, ...] = (self.reduction.identity,)

    def update(self, before: Statistics, elements: Elements) -> Statistics:
        return (functools.reduce(self.reduction.join, _masked(elements, self.reduction.identity), before[0]),)

    def of(self, elements: Elements) -> Statistics:
        return (functools.reduce(self.reduction.join, _masked(elements, self.reduction.identity)),)

    def reduce(self, parts: Statistics, reducer: Reducer) -> Statistics:
        return (reducer.reduce(self.name, parts[0]),)

    def combine(self, one: Statistics, other: Statistics) -> Statistics:
        return (self.reduction.join(one[0], other[0]),)

    def finish(self, statistics: Statistics) -> tuple[jax.Array, jax.Array | None]:
        return statistics[0], None


class _SumOfExponentials:
    """The maximum, from -`BIG` to `BIG`, and the sum of exponentials relative to it."""

    identities: tuple[float, ...] = (-BIG, 0.0)
    also: str = "reduce_max"

    def update(self, before: Statistics, elements: Elements) -> Statistics:
        (top, total), vectors = before, _masked(elements, -np.inf)
        most = jnp.minimum(functools.reduce(jnp.maximum, vectors, top), F32(BIG))
        return most, sum((jnp.exp(x - most) for x in vectors), total * jnp.exp(top - most))

    def reduce(self, parts: Statistics, reducer: Reducer) -> Statistics:
        most, total = parts
        of_all = reducer.reduce("reduce_max", most)
        return of_all, reducer.reduce("reduce_sum", total * jnp.exp(most - reducer.broadcast(of_all)))

    def combine(self, one: Statistics, other: Statistics) -> Statistics:
        most = jnp.maximum(one[0], other[0])
        first, second = (total * jnp.exp(top - most) for top, total in (one, other))
        return most, first + second

    def finish(self, statistics: Statistics) -> tuple[jax.Array, jax.Array | None]:
        top, total = statistics
        none = jnp.where(total == 0, F32(-np.inf), top)
        return total, jnp.where(total == F32(np.inf), F32(np.inf), none)


class _CentredSquares:
    """The number of elements, a pivot, and sums of their differences from it and of the squares of these.

    The pivot is the mean of the first elements, which are as far from the mean of all as they are: few digits cancel,
    wherever that mean is. Parts are merged as in Chan, Golub, LeVeque, Algorithms for computing the sample variance,
    The American Statistician 37 (1983).
    """

    identities: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
    also: str = "reduce_sum"

    def update(self, before: Statistics, elements: Elements) -> Statistics:
        (count, pivot, total, squares), masks = before, [mask for _, mask in elements]
        vectors, one = _masked(elements, 0.0), jnp.full_like(elements[0][0], 1)
        if any(mask is not None for mask in masks):
            more = functools.reduce(jnp.add, _masked([(one, mask) for mask in masks], 0.0))
            share = 1 / jnp.maximum(more, one)
        else:
            more, share = len(vectors) * one, one / len(vectors)
        first = functools.reduce(jnp.add, vectors) * share
        # Differences from an infinite pivot would be NaN, and the sum of the elements with them.
        first = jnp.where(jnp.abs(first) <= F32(BIG), first, F32(0))
        pivot = jnp.where(count == 0, first, pivot)
        away = _masked([(x - pivot, mask) for x, mask in zip(vectors, masks, strict=True)], 0.0)
        squares = functools.reduce(jnp.add, [x * x for x in away], squares)
        return count + more, pivot, functools.reduce(jnp.add, away, total), squares

    def reduce(self, parts: Statistics, reducer: Reducer) -> Statistics:
        count, mean, squares = self._about_mean(parts)
        of_all = reducer.reduce("reduce_sum", count)
        centre = reducer.reduce("reduce_sum", count * mean) / jnp.maximum(of_all, F32(1))
        away = mean - reducer.broadcast(centre)
        return of_all, centre, of_all - of_all, reducer.reduce("reduce_sum", squares + count * away * away)

    def combine(self, one: Statistics, other: Statistics) -> Statistics:
        (n, mean, squares), (more, others_mean, others) = map(self._about_mean, (one, other))
        many, away = jnp.maximum(n + more, F32(1)), others_mean - mean
        centre = (n * mean + more * others_mean) / many
        return n + more, centre, n - n, squares + others + away * away * (n * more / many)

    def finish(self, statistics: Statistics) -> tuple[jax.Array, jax.Array | None]:
        count, mean, squares = self._about_mean(statistics)
        return squares, count * mean

    def _about_mean(self, statistics: Statistics) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the number of elements, their mean, and the sum of squares of their differences from it."""
        count, pivot, total, squares = statistics
        away = total / jnp.maximum(count, F32(1))
        about = jnp.maximum(squares - total * away, F32(0))
        # Squares that overflow have an infinite sum, as those of the differences from the mean do.
        overflow = (squares == F32(np.inf)) & (jnp.abs(total) <= F32(BIG))
        return count, pivot + away, jnp.where(overflow, squares, about)


_SEVERAL: dict[str, RowStatistics] = {"sum_exp": _SumOfExponentials(), "centred_squares": _CentredSquares()}


@dataclasses.dataclass(frozen=True)
class Stage:
    """The reductions of one stage of a program.

    Attributes:
      number: index of the stage.
    """

    program: Program
    number: int

    @functools.cached_property
    def reductions(self) -> tuple[tuple[RowStatistics, Any, tuple[int, int | None]], ...]:
        """Each reduction, the value that it reduces, and the values of the program that are its results."""
        all_of = {(e.name, e.inputs[0]): i for i in self.program.stages[self.number] if (e := self.program.equation(i))}
        found: list[tuple[RowStatistics, Any, tuple[int, int | None]]] = []
        given = {(_SEVERAL[name].also, atom) for name, atom in all_of if name in _SEVERAL}
        for (name, atom), value in all_of.items():
            if (name, atom) not in given:
                reduced: RowStatistics = _SEVERAL[name] if name in _SEVERAL else _Plain(name)
                found.append((reduced, atom, (value, all_of.get((reduced.also, atom)))))
        return tuple(found)

    @property
    def count(self) -> int:
        """Number of statistics."""
        return sum(len(each.identities) for each, _, _ in self.reductions)

    def init(self, full: Callable[[float], jax.Array]) -> Statistics:
        """Returns the statistics of no element; ``full(x)`` is an array of equal elements."""
        return tuple(full(x) for each, _, _ in self.reductions for x in each.identities)

    def update(self, statistics: Statistics, elements: Sequence[tuple[Vectors, jax.Array | None]]) -> Statistics:
        """Adds elements, with a mask of those that count, or None if all do."""
        split, found = self._split(statistics), Statistics()
        for (each, atom, _), before in zip(self.reductions, split, strict=True):
            found += each.update(before, [(vector(atom), mask) for vector, mask in elements])
        return found

    def of(self, elements: Sequence[tuple[Vectors, jax.Array | None]]) -> Statistics:
        """Returns the statistics of these elements alone, each a single number of a part of the row."""
        found = Statistics()
        for each, atom, _ in self.reductions:
            assert isinstance(each, _Plain), "whole rows need no statistics of parts"
            found += each.of([(vector(atom), mask) for vector, mask in elements])
        return found

    def reduce(self, statistics: Statistics, reducer: Reducer) -> Statistics:
        """Merges the statistics of all threads or warps of the reducer."""
        pairs = zip(self.reductions, self._split(statistics), strict=True)
        return sum((each.reduce(parts, reducer) for (each, _, _), parts in pairs), Statistics())

    def combine(self, one: Statistics, other: Statistics) -> Statistics:
        """Merges the statistics of two parts of a row."""
        triples = zip(self.reductions, self._split(one), self._split(other), strict=True)
        return sum((each.combine(x, y) for (each, _, _), x, y in triples), Statistics())

    def finish(self, statistics: Statistics, scalars: dict[int, jax.Array]) -> dict[int, jax.Array]:
        """Returns the scalars with those of this stage, and all that follow from these before the next stage."""
        found = dict(scalars)
        for (each, _, (value, also)), parts in zip(self.reductions, self._split(statistics), strict=True):
            found[value], other = each.finish(parts)
            if also is not None and other is not None:
                found[also] = other
        return with_scalars(self.program, self.number + 1, found)

    def _split(self, statistics: Statistics) -> list[Statistics]:
        """Returns the statistics of each reduction."""
        rest = iter(statistics)
        return [tuple(itertools.islice(rest, len(each.identities))) for each, _, _ in self.reductions]


def _masked(elements: Elements, identity: float) -> list[jax.Array]:
    return [x if mask is None else jnp.where(mask, x, F32(identity)) for x, mask in elements]


def with_scalars(program: Program, level: int, scalars: dict[int, jax.Array]) -> dict[int, jax.Array]:
    """Returns the scalars, and those of this level that follow from them by elementwise equations."""
    found = dict(scalars)
    for value in scalar_equations(program, level):
        equation = program.equation(value)
        assert equation is not None, "scalar equations are equations"
        inputs = [found[x] if isinstance(x, int) else np.dtype(x.dtype).type(x.value) for x in equation.inputs]
        if not any(isinstance(x, jax.Array) for x in inputs):
            inputs[0] = jnp.asarray(inputs[0])
        found[value] = compute(equation, inputs)
    return found


def most_statistics(program: Program) -> int:
    """Returns the most statistics of a stage; 1 without stages."""
    return max([1, *(Stage(program, number).count for number in range(len(program.stages)))])
