"""One stage of a row program: statistics of the elements that have been read, and the scalars that follow from them.

Each thread, or each lane, keeps statistics. `update` adds elements, `reduce` merges the statistics of all threads, and
`combine` those of two parts of a row.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from search_spaces.rows.elementwise import BIG, REDUCTIONS
from search_spaces.rows.program import Program, Values, compute, scalar_equations

Statistics = tuple[jax.Array, ...]
F32 = np.float32


class Reducer(Protocol):
    """Reduces parts of a row: threads with their elements, or warps with a partial result each."""

    def reduce(self, name: str, parts: jax.Array, /) -> jax.Array: ...
    def broadcast(self, reduced: jax.Array, /) -> jax.Array: ...


@dataclasses.dataclass(frozen=True)
class Stage:
    """The reductions of one stage of a program.

    A statistic is the reduction of the elements so far. A sum of exponentials has two: the maximum, from -`BIG` to
    `BIG`, and the sum relative to it. That maximum also gives the row's own, if the stage needs it.

    Attributes:
      number: index of the stage.
    """

    program: Program
    number: int

    @functools.cached_property
    def kinds(self) -> tuple[tuple[str, Any, tuple[int, ...]], ...]:
        """Name, reduced value, and the values of the program that follow, for each reduction."""
        found: list[tuple[str, Any, tuple[int, ...]]] = []
        all_of = {(e.name, e.inputs[0]): i for i in self.program.stages[self.number] if (e := self.program.equation(i))}
        for (name, atom), value in all_of.items():
            if name == "reduce_max" and ("sum_exp", atom) in all_of:
                continue
            also = (all_of["reduce_max", atom],) if name == "sum_exp" and ("reduce_max", atom) in all_of else ()
            found.append((name, atom, (value, *also)))
        return tuple(found)

    @property
    def count(self) -> int:
        """Number of statistics."""
        return sum(1 + (name == "sum_exp") for name, _, _ in self.kinds)

    def init(self, full: Callable[[float], jax.Array]) -> Statistics:
        """Returns the statistics of no element; ``full(x)`` is an array of equal elements."""
        values = [(-BIG, 0.0) if name == "sum_exp" else (REDUCTIONS[name].identity,) for name, _, _ in self.kinds]
        return tuple(full(x) for each in values for x in each)

    def update(self, statistics: Statistics, elements: Sequence[tuple[Values, jax.Array | None]]) -> Statistics:
        """Adds elements: values of the program, and a mask of those that count, or None if all do."""
        rest, found = list(statistics), []
        for name, atom, _ in self.kinds:
            vectors = [_masked(values.vector(atom), mask, REDUCTIONS[name].identity) for values, mask in elements]
            if name == "sum_exp":
                before, total = rest.pop(0), rest.pop(0)
                most = jnp.minimum(functools.reduce(jnp.maximum, vectors, before), F32(BIG))
                found += [most, sum((jnp.exp(x - most) for x in vectors), total * jnp.exp(before - most))]
            else:
                found.append(functools.reduce(REDUCTIONS[name].join, vectors, rest.pop(0)))
        return tuple(found)

    def of(self, elements: Sequence[tuple[Values, jax.Array | None]]) -> Statistics:
        """Returns the statistics of these elements alone, of a stage without sums of exponentials."""
        found = []
        for name, atom, _ in self.kinds:
            vectors = [_masked(values.vector(atom), mask, REDUCTIONS[name].identity) for values, mask in elements]
            found.append(functools.reduce(REDUCTIONS[name].join, vectors))
        return tuple(found)

    def reduce(self, statistics: Statistics, reducer: Reducer) -> Statistics:
        """Merges the statistics of all threads or warps of the reducer."""
        rest, found = list(statistics), []
        for name, _, _ in self.kinds:
            if name == "sum_exp":
                most, total = rest.pop(0), rest.pop(0)
                of_all = reducer.reduce("reduce_max", most)
                scaled = total * jnp.exp(most - reducer.broadcast(of_all))
                found += [of_all, reducer.reduce("reduce_sum", scaled)]
            else:
                found.append(reducer.reduce(name, rest.pop(0)))
        return tuple(found)

    def combine(self, one: Statistics, other: Statistics) -> Statistics:
        """Merges the statistics of two parts of a row."""
        pairs, found = list(zip(one, other, strict=True)), []
        for name, _, _ in self.kinds:
            if name == "sum_exp":
                tops, totals = pairs.pop(0), pairs.pop(0)
                most = jnp.maximum(*tops)
                first, second = (total * jnp.exp(top - most) for top, total in zip(tops, totals, strict=True))
                found += [most, first + second]
            else:
                found.append(REDUCTIONS[name].join(*pairs.pop(0)))
        return tuple(found)

    def finish(self, statistics: Statistics, scalars: dict[int, jax.Array]) -> dict[int, jax.Array]:
        """Returns the scalars with those of this stage, and all that follow from these before the next stage."""
        rest, found = list(statistics), dict(scalars)
        for name, _, values in self.kinds:
            top = rest.pop(0)
            if name != "sum_exp":
                found[values[0]] = top
                continue
            total = found[values[0]] = rest.pop(0)
            for maximum in values[1:]:
                none = jnp.where(total == 0, F32(-np.inf), top)
                found[maximum] = jnp.where(total == F32(np.inf), F32(np.inf), none)
        return with_scalars(self.program, self.number + 1, found)


def _masked(vector: jax.Array, mask: jax.Array | None, identity: float) -> jax.Array:
    return vector if mask is None else jnp.where(mask, vector, F32(identity))


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
