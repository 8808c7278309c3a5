"""Opens objects of plain classes among the arguments of a call as pytrees, and makes new ones inside of a trace."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Hashable, Iterator
from typing import Any

import jax
import numpy as np

from scheduler.rewriting import module_libraries
from search_spaces import lowering_compat
from search_spaces.exact import exact

ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


@dataclasses.dataclass(frozen=True)
class Static:
    """A static argument, as one leaf."""

    value: Any


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class Instance:
    """An object of a plain class, flattened by its attributes, or a container of such objects, by its elements.

    Attributes:
      number: Counts the objects of a call.
      kind: The class of the object, or the structure of the container.
      original: The object of this call; None in a trace, which other calls may use.
      made: What the traced function sees.
    """

    number: int
    kind: Any
    attributes: dict[Any, Any]
    original: Any = None
    made: list[Any] = dataclasses.field(default_factory=list)

    def tree_flatten(self) -> tuple[tuple[Any], tuple[int, Any]]:
        return (self.attributes,), (self.number, self.kind)

    @classmethod
    def tree_unflatten(cls, aux: tuple[int, Any], children: tuple[Any]) -> Instance:
        return cls(*aux, *children)

    @property
    def target(self) -> Any:
        """The object that the function sees."""
        return self.made[0] if self.made else self.original


@dataclasses.dataclass(frozen=True)
class Again:
    """The `Instance` with this number, where it occurs again."""

    number: int


def opened_object(x: Any, seen: dict[int, int]) -> Any:
    """Returns an object that holds arrays or state, or a container of such objects, as an `Instance`; else `x`.

    Args:
      seen: The numbers of the objects opened before, and of those around `x`, by their identities.
    """
    if is_array(x) or isinstance(x, type | types.ModuleType) or lowering_compat.is_jitted(x) or is_library_jitted(x):
        return x
    if is_boundary(x):
        return x
    if id(x) in seen:
        return Again(seen[id(x)])
    kind: Any = type(x)
    if is_tree := not jax.tree_util.all_leaves([x]):
        inside, kind = jax.tree.flatten(x, is_leaf=lambda y: y is not x)
        held: dict[Any, Any] = dict(enumerate(inside))
    elif _is_plain(kind):
        held = attributes(x)
    else:
        return x
    number = seen[id(x)] = len(seen)
    opened = {name: opened_object(y, seen) for name, y in held.items()}
    if is_tree:
        holds = any(isinstance(y, Instance | Again) for y in opened.values())
    else:
        leaves = jax.tree.leaves(opened, is_leaf=module_libraries.is_flax_node)
        holds = any(is_array(y) or isinstance(y, Again) or module_libraries.is_flax_node(y) for y in leaves)
    if not holds:
        del seen[id(x)]
    return Instance(number, kind, opened, x) if holds else x


class Made:
    """Makes new objects and containers for the `Instance`s in a tree. These may hold each other."""

    def __init__(self, tree: Any) -> None:
        self._instances = {each.number: each for each in _instances(tree)}
        self._unfinished: list[Instance] = []

    def of(self, x: Any) -> Any:
        """Returns what the function sees in place of `x`."""
        if isinstance(x, Static):
            return x.value
        if not isinstance(x, Instance | Again):
            return x
        instance = self._instances[x.number]
        if not instance.made:
            if isinstance(instance.kind, type):
                instance.made.append(_blank(instance.kind))
                self._unfinished.append(instance)
            else:
                instance.made.append(jax.tree.unflatten(instance.kind, map(self.of, instance.attributes.values())))
        return instance.made[0]

    def finish(self) -> None:
        """Sets the attributes of the objects, which makes more of them."""
        for instance in self._unfinished:
            for name, x in instance.attributes.items():
                set_attribute(instance.target, name, self.of(x))


def _instances(tree: Any) -> Iterator[Instance]:
    for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Instance) or is_boundary(x)):
        if isinstance(x, Instance):
            yield x
            yield from _instances(x.attributes)


def attributes(x: Any) -> dict[str, Any]:
    """Returns the attributes of an object, those in slots included."""
    state: Any = object.__getstate__(x)
    parts = state if isinstance(state, tuple) else (state,)
    return {name: y for part in parts for name, y in (part or {}).items()}


def set_attribute(x: Any, name: str, value: Any) -> None:
    """Sets an attribute as `attributes` returns it, without `__setattr__` and properties of the class."""
    if isinstance(inspect.getattr_static(type(x), name, None), types.MemberDescriptorType):
        object.__setattr__(x, name, value)  # in a slot
    else:
        x.__dict__[name] = value


def _blank(cls: type) -> Any:
    """Returns an object without attributes."""
    return (types.SimpleNamespace if issubclass(cls, types.SimpleNamespace) else object).__new__(cls)


@functools.cache
def _is_plain(cls: Any) -> bool:
    """Returns whether an object of the class is its attributes alone."""
    try:
        _blank(cls)
    except TypeError:
        return False
    return True


@dataclasses.dataclass(frozen=True, eq=False)
class ByIdentity:
    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def static_key(x: Any, *, by_identity: bool, around: tuple[int, ...] = ()) -> Hashable:
    """Returns a key that is equal for constants of the same program (`exact`).

    Args:
      around: Identities of the objects that hold `x`.
    """
    if isinstance(x, Static):
        return Static, static_key(x.value, by_identity=by_identity)
    kind: Any = type(x)
    if kind.__hash__ in (object.__hash__, None) and id(x) not in around and _is_plain(kind):
        leaves, tree = jax.tree.flatten(attributes(x))  # which may have changed since the last call
        inside = [static_key(y, by_identity=True, around=(*around, id(x))) for y in leaves]
        return ByIdentity(x), tree, tuple(inside)
    try:
        hash(x)
    except TypeError:
        if by_identity:
            return ByIdentity(x)
        raise TypeError(
            f"an argument has a {type(x).__qualname__}, which is no array and therefore a constant of the program; a "
            f"constant must be hashable: {x!r:.100}"
        ) from None
    return exact(x)


def is_library_jitted(fn: Any) -> bool:
    """Returns whether `fn` was made by `flax.nnx.jit` or `equinox.filter_jit`."""
    return module_libraries.flax_jitted(fn) is not None or module_libraries.is_equinox_jitted(fn)


def is_array(x: Any) -> bool:
    return isinstance(x, ARRAYS) and not (isinstance(x, np.ndarray | np.generic) and x.dtype.kind in "OSUMm")


def is_boundary(x: Any) -> bool:
    return module_libraries.is_flax_node(x) or module_libraries.is_equinox_module(x)
