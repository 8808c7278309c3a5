"""Represents a call as a pytree: the function without partials, the values it holds, and its arguments."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from scheduler.functions import captured, equinox_modules, flax_modules
from scheduler.functions.captured import Captured
from search_spaces import lowering_compat

# Indices and names of some arguments.
Names = tuple[tuple[int, ...], tuple[str, ...]]
NONE: Names = ((), ())
NUMBERS = (bool, int, float, complex)
ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """``fn(*held, *given, **held_by_name, **named)``.

    Attributes:
      fn: The function, with partials and bound methods removed.
      captured: State in closures and globals of `fn`.
      held, held_by_name: Arguments held by partials and bound methods.
      given, named: The arguments of the call.
    """

    fn: Any
    captured: tuple[Any, ...]
    held: tuple[Any, ...]
    held_by_name: dict[str, Any]
    given: tuple[Any, ...]
    named: dict[str, Any]

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self)), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Sequence[Any]) -> Call:
        return cls(*children)

    @property
    def fixed_leaves(self) -> int:
        """Number of leaves that are not arguments. They come first."""
        return sum(map(_count, (self.fn, self.captured, self.held, self.held_by_name)))

    def numbers(self, leaves: int) -> frozenset[int]:
        """Returns the indices of leaves where a Python number is an input."""
        found = list[int]()
        start = self.fixed_leaves
        for x in jax.tree.leaves((self.given, self.named), is_leaf=_is_boundary):
            size = _count(x)
            if not equinox_modules.is_module(x):
                found += range(start, start + size)
            start += size
        assert start == leaves
        return frozenset(found)

    def leaves_of(self, by_function: Names, by_arguments: Names) -> frozenset[int]:
        """Returns the indices of the leaves of some arguments.

        Args:
          by_function: Arguments by their indices and names in the signature of `fn`.
          by_arguments: Arguments by their indices and names in `given` and `named`.
        """
        found = set[int]()
        before = len(self.held)
        numbers = {*_counted(by_function[0], before + len(self.given))}
        numbers |= {before + i for i in _counted(by_arguments[0], len(self.given))}
        names = {*by_function[1], *by_arguments[1]}
        start = _count(self.fn) + _count(self.captured)
        parts = [*((i in numbers, x) for i, x in enumerate(self.held))]
        parts += [(name in names, self.held_by_name[name]) for name in sorted(self.held_by_name)]
        parts += [(before + i in numbers, x) for i, x in enumerate(self.given)]
        parts += [(name in names, self.named[name]) for name in sorted(self.named)]
        for chosen, x in parts:
            size = _count(x)
            found |= set(range(start, start + size)) if chosen else set()
            start += size
        return frozenset(found)

    def with_static(self, by_function: Names, by_arguments: Names) -> Call:
        """Returns the call with static arguments wrapped as single leaves."""
        before = len(self.held)
        numbers = {i - before for i in _counted(by_function[0], before + len(self.given))}
        numbers |= {*_counted(by_arguments[0], len(self.given))}
        names = {*by_function[1], *by_arguments[1]}
        given = tuple(Static(x) if i in numbers else x for i, x in enumerate(self.given))
        named = {name: Static(x) if name in names else x for name, x in self.named.items()}
        return dataclasses.replace(self, given=given, named=named)

    def realized(self) -> tuple[Call, Callable[[], list[str]]]:
        """Returns the call with new objects and closures, and a check that lists the variables it has assigned."""
        fn: Any = self.fn
        assigned: Callable[[], list[str]] = list
        if isinstance(fn, Captured):
            fn, assigned = fn.replaced(tuple(map(_realized, self.captured)))
        held, given = (tuple(map(_realized, part)) for part in (self.held, self.given))
        named = {name: _realized(x) for name, x in self.named.items()}
        return Call(_realized(fn), self.captured, held, self.held_by_name, given, named), assigned

    def __call__(self) -> Any:
        return self.fn(*self.held, *self.given, **self.held_by_name, **self.named)


@dataclasses.dataclass(frozen=True)
class Static:
    """A static argument, as one leaf."""

    value: Any


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class Instance:
    """An object of a plain class, flattened by its attributes."""

    original: Any
    attributes: dict[str, Any]
    made: list[Any] = dataclasses.field(default_factory=list)

    def tree_flatten(self) -> tuple[tuple[Any], ByIdentity]:
        return (self.attributes,), ByIdentity(self.original)

    @classmethod
    def tree_unflatten(cls, original: ByIdentity, children: Sequence[Any]) -> Instance:
        return cls(original.value, *children)

    @property
    def target(self) -> Any:
        """The object that the function sees."""
        return self.made[0] if self.made else self.original

    def realized(self) -> Any:
        """Creates a new object with these attributes."""
        new = object.__new__(type(self.original))
        new.__dict__.update(self.attributes)
        self.made.append(new)
        return new


@dataclasses.dataclass(frozen=True, eq=False)
class ByIdentity:
    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def opened(fn: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any]) -> Call:
    held, held_by_name = tuple[Any, ...](), dict[str, Any]()
    inner: Any = fn
    while isinstance(inner, functools.partial | types.MethodType):
        if isinstance(inner, types.MethodType):
            inner, held = inner.__func__, (opened_object(inner.__self__), *held)
        else:
            inner, held, held_by_name = inner.func, (*inner.args, *held), {**inner.keywords, **held_by_name}
    if not isinstance(inner, types.FunctionType):
        return Call(opened_object(inner), (), held, _without(held_by_name, named), given, named)
    found = captured.find(inner, _is_state) if flax_modules.is_loaded() else None
    state = tuple(map(opened_object, found.values)) if found else ()
    return Call(found if state else inner, state, held, _without(held_by_name, named), given, named)


def _is_state(x: Any) -> bool:
    """Returns whether a captured value must be an input: a module, or an object that holds one."""
    opened = opened_object(x)
    return has_state(opened.attributes if isinstance(opened, Instance) else x)


def _without(held: dict[str, Any], named: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in held.items() if name not in named}


def opened_object(x: Any) -> Any:
    """Returns an object that holds arrays or state as an `Instance`; any other value unchanged."""
    if isinstance(x, type | types.ModuleType) or lowering_compat.is_jitted(x) or is_library_jitted(x):
        return x
    if flax_modules.is_node(x) or not jax.tree_util.all_leaves([x]) or not hasattr(x, "__dict__"):
        return x
    try:
        object.__new__(type(x))
    except TypeError:  # an object with more than attributes, such as an instance of a dict subclass
        return x
    attributes = dict(vars(x))
    held = jax.tree.leaves(attributes, is_leaf=flax_modules.is_node)
    return Instance(x, attributes) if any(isinstance(y, jax.Array) or flax_modules.is_node(y) for y in held) else x


def _realized(x: Any) -> Any:
    if isinstance(x, Static):
        return x.value
    if isinstance(x, Instance):
        return x.realized()
    return x


@dataclasses.dataclass(frozen=True)
class JitOptions:
    """Options of a library's jit for arguments, by their indices and names in the function's signature."""

    static: Names = NONE
    donated: Names = NONE
    numbers_are_static: bool = False


def jit_options(call: Call) -> JitOptions:
    if (jitted := flax_modules.jitted(call.fn)) is not None:
        return JitOptions(lowering_compat.static_arguments(jitted), lowering_compat.donated_arguments(jitted))
    if equinox_modules.is_jitted(call.fn):
        args, kwargs = (*call.held, *call.given), {**call.held_by_name, **call.named}
        return JitOptions(donated=equinox_modules.donated(call.fn, args, kwargs), numbers_are_static=True)
    return JitOptions()


def has_state(x: Any) -> bool:
    """Returns whether a pytree holds objects updated in place: modules, variables or generators of flax.nnx."""
    if not flax_modules.is_loaded():
        return False
    return any(map(flax_modules.is_node, jax.tree.leaves(x, is_leaf=flax_modules.is_node)))


def is_library_jitted(fn: Any) -> bool:
    """Returns whether `fn` was made by `flax.nnx.jit` or `equinox.filter_jit`."""
    return flax_modules.jitted(fn) is not None or equinox_modules.is_jitted(fn)


def is_array(x: Any) -> bool:
    return isinstance(x, ARRAYS) and not (isinstance(x, np.ndarray | np.generic) and x.dtype.kind in "OSUMm")


def _is_boundary(x: Any) -> bool:
    return flax_modules.is_node(x) or equinox_modules.is_module(x)


def _count(tree: Any) -> int:
    return len(jax.tree.leaves(tree, is_leaf=flax_modules.is_node))


def _counted(numbers: Sequence[int], length: int) -> list[int]:
    return [i % length for i in numbers if -length <= i < length]


def static_key(x: Any, *, by_identity: bool) -> Hashable:
    """Returns a key that is equal for constants of the same program. 1, 1.0 and True differ, as do 0.0 and -0.0."""
    if isinstance(x, Static):
        return Static, static_key(x.value, by_identity=by_identity)
    if isinstance(x, float | complex):
        return type(x), repr(x)
    try:
        hash(x)
    except TypeError:
        if by_identity:
            return ByIdentity(x)
        raise TypeError(
            f"an argument holds a {type(x).__qualname__}, which is no array, and so part of the program; as such it "
            f"must be hashable: {x!r:.100}"
        ) from None
    return type(x), x
