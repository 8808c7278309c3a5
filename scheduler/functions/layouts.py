"""Finds the memory layouts of arrays around an equation, from the transposes before and after it.

XLA folds a transpose into its own matmul, but copies the array for one of our kernels. A kernel that reads the array as
it was before the transpose needs no copy, because the two transposes cancel.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from scheduler.functions.equations import Body, bodies

# For each input and result, its axes in memory order. None is the default order.
Stored = tuple[tuple[int, ...] | None, ...]


def key(primitive: Any, avals: Sequence[Any], params: Mapping[str, Any]) -> Any:
    """Returns the key by which JAX lowers equations once: the primitive, the types and the parameters."""
    return primitive, tuple((x.shape, str(x.dtype)) for x in avals), tuple(sorted(params.items()))


def around(jaxpr: Any, primitives: Collection[Any]) -> dict[Any, Stored]:
    """Returns the most common layouts of each kind of equation, by `key`."""
    votes: dict[Any, collections.Counter[Stored]] = collections.defaultdict(collections.Counter)
    for body in bodies(jaxpr):
        if isinstance(body, Body):
            for found, stored in _of_body(body.jaxpr, primitives):
                votes[found][stored] += body.count
    return {found: counted.most_common(1)[0][0] for found, counted in votes.items()}


def _of_body(jaxpr: Any, primitives: Collection[Any]) -> Iterator[tuple[Any, Stored]]:
    made = {id(equation.outvars[0]): equation for equation in jaxpr.eqns if _is_transpose(equation)}
    users: dict[int, list[Any]] = collections.defaultdict(list)
    for equation in jaxpr.eqns:
        for x in equation.invars:
            users[id(x)].append(equation)
    for x in jaxpr.outvars:
        users[id(x)].append(None)
    for equation in jaxpr.eqns:
        if equation.primitive in primitives:
            avals = [x.aval for x in equation.invars]
            read = (_read(x, made) for x in equation.invars)
            written = (_written(x, users) for x in equation.outvars)
            yield key(equation.primitive, avals, equation.params), (*read, *written)


def _read(x: Any, made: Mapping[int, Any]) -> tuple[int, ...] | None:
    """Returns the memory order of the axes of `x` in the array that transposes made it from."""
    axes = list(range(x.aval.ndim))
    while (transpose := made.get(id(x))) is not None:
        permutation = transpose.params["permutation"]
        axes, x = [permutation[axis] for axis in axes], transpose.invars[0]
    return _unless_own(tuple(int(axis) for axis in np.argsort(axes)))


def _written(x: Any, users: Mapping[int, Sequence[Any]]) -> tuple[int, ...] | None:
    """Returns the memory order of the axes of `x` after the transposes of it, if these are its only users."""
    axes = list(range(x.aval.ndim))
    while (after := users.get(id(x), [])) and all(user is not None and _is_transpose(user) for user in after):
        permutations = {user.params["permutation"] for user in after}
        if len(permutations) > 1:
            break
        axes = [axes[axis] for axis in permutations.pop()]
        if len(after) > 1:
            break
        (x,) = after[0].outvars
    return _unless_own(tuple(axes))


def _is_transpose(equation: Any) -> bool:
    return bool(equation.primitive.name == "transpose")


def _unless_own(order: tuple[int, ...]) -> tuple[int, ...] | None:
    return None if order == tuple(range(len(order))) else order
