"""Represents a call as a pytree (function, held values, arguments), and finds the modules that the function holds."""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from scheduler.rewriting import module_libraries
from search_spaces import fingerprint, lowering_compat
from search_spaces.exact import exact

# ------------------------------------------------------------------------------
# Finds modules that a function holds in its closure, defaults and globals instead of taking them as arguments.

# A slot in which a function holds a value: the kind of slot, and its index or name.
_Slot = tuple[str, Any]
_Holder = types.FunctionType | types.MethodType | functools.partial[Any]
_HOLDERS = (types.FunctionType, types.MethodType, functools.partial)


@dataclasses.dataclass(frozen=True, eq=False)
class Captured:
    """The values that a function holds, and the slots for replacing them.

    Attributes:
      values: The values without duplicates, in the order found.
    """

    fn: Callable[..., Any]
    values: tuple[Any, ...]
    _holders: Mapping[int, _Holder]
    _slots: Mapping[int, Sequence[tuple[_Slot, Any]]]

    @functools.cached_property
    def _pattern(self) -> Hashable:
        numbers = {id(value): i for i, value in enumerate(self.values)}
        return id(self.fn), tuple(
            (i, tuple((slot, numbers.get(id(x), id(x))) for slot, x in own)) for i, own in self._slots.items()
        )

    def __eq__(self, other: object) -> bool:
        """Returns whether both have the same functions and the same slots. The values may differ."""
        return isinstance(other, Captured) and self._pattern == other._pattern

    def __hash__(self) -> int:
        return hash(self._pattern)

    def replaced(self, values: Sequence[Any]) -> tuple[Callable[..., Any], Callable[[], list[str]]]:
        """Returns a copy of the function with new values, and a check that lists the names it has assigned since."""
        if not self.values:
            return self.fn, list
        copies: dict[int, Any] = {id(old): new for old, new in zip(self.values, values, strict=True)}
        made: list[tuple[str, Callable[[], Any], Any]] = []
        fn = self._copied(self.fn, copies, made)
        return fn, lambda: sorted({name for name, now, given in made if now() is not given})

    def _copied(self, value: Any, copies: dict[int, Any], made: list[tuple[str, Callable[[], Any], Any]]) -> Any:
        if id(value) in copies or id(value) not in self._holders:
            return copies.get(id(value), value)
        holder, slots = self._holders[id(value)], self._slots[id(value)]
        if isinstance(holder, types.FunctionType):
            copy, cells = _function(holder, [place for (part, place), _ in slots if part == "cell"])
            copies[id(value)] = copy
            for (part, place), old in slots:
                new = self._copied(old, copies, made)
                if part == "cell":
                    cells[place].cell_contents = new
                    now = functools.partial(getattr, cells[place], "cell_contents")
                    made.append((holder.__code__.co_freevars[place], now, new))
                elif part == "global":
                    copy.__globals__[place] = new
                elif part == "default":
                    defaults = copy.__defaults__ or ()
                    copy.__defaults__ = (*defaults[:place], new, *defaults[place + 1 :])
                else:
                    copy.__kwdefaults__ = {**(copy.__kwdefaults__ or {}), place: new}
            known = copy.__globals__
            made += [
                (name, functools.partial(known.get, name), known.get(name)) for name in fingerprint.names(copy.__code__)
            ]
            return copy
        new_of = {slot: self._copied(old, copies, made) for slot, old in slots}
        if isinstance(holder, types.MethodType):
            func = new_of.get(("func", 0), holder.__func__)
            copies[id(value)] = types.MethodType(func, new_of.get(("self", 0), holder.__self__))
        else:
            args = [new_of.get(("arg", i), x) for i, x in enumerate(holder.args)]
            named = {name: new_of.get(("name", name), x) for name, x in holder.keywords.items()}
            copies[id(value)] = functools.partial(new_of.get(("func", 0), holder.func), *args, **named)
        return copies[id(value)]


def find_captured(fn: Callable[..., Any], wanted: Callable[[Any], bool]) -> Captured:
    """Finds the wanted values held by `fn` and by the functions that it calls.

    The search follows functions in closures, defaults, partials and bound methods, and global functions defined in the
    module of `fn`. Functions jitted by JAX or by another library are not searched, because they treat captured values
    as constants.

    Args:
      wanted: Returns whether to include a value.
    """
    if not isinstance(fn, _HOLDERS):
        return Captured(fn, (), {}, {})
    holders: dict[int, _Holder] = {}
    slots: dict[int, list[tuple[_Slot, Any]]] = {}
    values: dict[int, Any] = {}
    queue = collections.deque([fn])
    while queue:
        holder = queue.popleft()
        if id(holder) in holders:
            continue
        holders[id(holder)], slots[id(holder)] = holder, []
        for slot, value in _held(holder, fn):
            if isinstance(value, _HOLDERS):
                queue.append(value)
            elif wanted(value):
                values.setdefault(id(value), value)
            else:
                continue
            slots[id(holder)].append((slot, value))
    holding = set(values)
    while new := {i for i, own in slots.items() if i not in holding and any(id(x) in holding for _, x in own)}:
        holding |= new
    return Captured(
        fn,
        tuple(values.values()),
        {i: holder for i, holder in holders.items() if i in holding},
        {i: [(slot, x) for slot, x in own if id(x) in holding] for i, own in slots.items() if i in holding},
    )


def _held(holder: _Holder, fn: Callable[..., Any]) -> Iterator[tuple[_Slot, Any]]:
    if isinstance(holder, types.MethodType):
        yield ("func", 0), holder.__func__
        yield ("self", 0), holder.__self__
    elif isinstance(holder, functools.partial):
        yield ("func", 0), holder.func
        yield from ((("arg", i), x) for i, x in enumerate(holder.args))
        yield from ((("name", name), x) for name, x in holder.keywords.items())
    else:
        for i, cell in enumerate(holder.__closure__ or ()):
            try:
                yield ("cell", i), cell.cell_contents
            except ValueError:  # an empty cell
                continue
        yield from ((("default", i), x) for i, x in enumerate(holder.__defaults__ or ()))
        yield from ((("named default", name), x) for name, x in (holder.__kwdefaults__ or {}).items())
        while isinstance(fn, functools.partial | types.MethodType):
            fn = fn.func if isinstance(fn, functools.partial) else fn.__func__
        if holder.__globals__ is getattr(fn, "__globals__", None):
            known = holder.__globals__
            yield from ((("global", name), known[name]) for name in fingerprint.names(holder.__code__) if name in known)


def _function(fn: types.FunctionType, places: Sequence[int]) -> tuple[types.FunctionType, dict[int, types.CellType]]:
    """Copies a function with its own globals, and with new cells at these indices of its closure."""
    cells = {place: types.CellType() for place in places}
    closure = tuple(cells.get(i, cell) for i, cell in enumerate(fn.__closure__ or ()))
    copy = types.FunctionType(fn.__code__, dict(fn.__globals__), fn.__name__, fn.__defaults__, closure)
    copy.__kwdefaults__, copy.__qualname__ = fn.__kwdefaults__, fn.__qualname__
    copy.__dict__.update(fn.__dict__)
    return copy, cells


# Indices and names of some arguments.
Names = tuple[tuple[int, ...], tuple[str, ...]]
NONE: Names = ((), ())
NUMBERS = (bool, int, float, complex)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class OpenedCall:
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
    def tree_unflatten(cls, _: None, children: Sequence[Any]) -> OpenedCall:
        return cls(*children)

    @property
    def fixed_leaves(self) -> int:
        """Number of leaves that are not arguments. They come first."""
        return sum(map(_count, (self.fn, self.captured, self.held, self.held_by_name)))

    def owners(self) -> list[str]:
        """Returns for each leaf the name of the parameter that has it, or of the function that holds it."""
        fn = self.fn.fn if isinstance(self.fn, Captured) else getattr(self.fn, "original", self.fn)
        names = parameters_of(fn)[len(self.held) :]
        names += [f"argument {number}" for number in range(len(names), len(self.given))]
        held = getattr(fn, "__name__", type(fn).__name__)
        given = [*zip(names, self.given, strict=False), *sorted(self.named.items())]
        return [held] * self.fixed_leaves + [name for name, x in given for _ in range(_count(x))]

    def numbers(self, leaves: int) -> frozenset[int]:
        """Returns the indices of leaves where a Python number is an input."""
        found = list[int]()
        start = self.fixed_leaves
        for x in jax.tree.leaves((self.given, self.named), is_leaf=is_boundary):
            size = _count(x)
            if not module_libraries.is_equinox_module(x):
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

    def with_static(self, by_function: Names, by_arguments: Names) -> OpenedCall:
        """Returns the call with static arguments wrapped as single leaves."""
        before = len(self.held)
        numbers = {i - before for i in _counted(by_function[0], before + len(self.given))}
        numbers |= {*_counted(by_arguments[0], len(self.given))}
        names = {*by_function[1], *by_arguments[1]}
        given = tuple(Static(x) if i in numbers else x for i, x in enumerate(self.given))
        named = {name: Static(x) if name in names else x for name, x in self.named.items()}
        return dataclasses.replace(self, given=given, named=named)

    def realized(self) -> tuple[OpenedCall, Callable[[], list[str]]]:
        """Returns the call with new objects and closures, and a check that lists the variables it has assigned."""
        fn: Any = self.fn
        made = Made(self)
        assigned: Callable[[], list[str]] = list
        if isinstance(fn, Captured):
            fn, assigned = fn.replaced(tuple(map(made.of, self.captured)))
        held, given = (tuple(map(made.of, part)) for part in (self.held, self.given))
        named = {name: made.of(x) for name, x in self.named.items()}
        fn = made.of(fn)
        made.finish()
        return OpenedCall(fn, self.captured, held, self.held_by_name, given, named), assigned

    def __call__(self) -> Any:
        return self.fn(*self.held, *self.given, **self.held_by_name, **self.named)


def parameters_of(fn: Any) -> list[str]:
    """Returns the names of the parameters that take an argument by position; none without a signature."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return []
    return [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]


def opened(fn: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any]) -> OpenedCall:
    open_object = functools.partial(opened_object, seen={})
    given, named = tuple(map(open_object, given)), {name: open_object(x) for name, x in named.items()}
    held, held_by_name = tuple[Any, ...](), dict[str, Any]()
    inner: Any = fn
    while isinstance(inner, functools.partial | types.MethodType):
        if isinstance(inner, types.MethodType):
            inner, held = inner.__func__, (open_object(inner.__self__), *held)
        else:
            inner, held, held_by_name = inner.func, (*inner.args, *held), {**inner.keywords, **held_by_name}
    if not isinstance(inner, types.FunctionType):
        return OpenedCall(open_object(inner), (), held, _removed(held_by_name, named), given, named)

    def is_state(x: Any) -> bool:  # a module, or an object that holds one: it must be an input
        opened = opened_object(x, {})
        return has_state(opened.attributes if isinstance(opened, Instance) else x)

    found = find_captured(inner, is_state) if module_libraries.is_flax_loaded() else None
    state = tuple(map(open_object, found.values)) if found else ()
    return OpenedCall(found if state else inner, state, held, _removed(held_by_name, named), given, named)


def _removed(held: dict[str, Any], named: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in held.items() if name not in named}


@dataclasses.dataclass(frozen=True)
class JitOptions:
    """Options of a library's jit for arguments, by their indices and names in the function's signature."""

    static: Names = NONE
    donated: Names = NONE
    numbers_are_static: bool = False


def jit_options(call: OpenedCall) -> JitOptions:
    if (jitted := module_libraries.flax_jitted(call.fn)) is not None:
        return JitOptions(lowering_compat.static_arguments(jitted), lowering_compat.donated_arguments(jitted))
    if module_libraries.is_equinox_jitted(call.fn):
        args, kwargs = (*call.held, *call.given), {**call.held_by_name, **call.named}
        return JitOptions(donated=module_libraries.equinox_donated(call.fn, args, kwargs), numbers_are_static=True)
    return JitOptions()


def has_state(x: Any) -> bool:
    """Returns whether a pytree holds objects updated in place: modules, variables or generators of flax.nnx."""
    if not module_libraries.is_flax_loaded():
        return False
    return any(map(module_libraries.is_flax_node, jax.tree.leaves(x, is_leaf=module_libraries.is_flax_node)))


def _count(tree: Any) -> int:
    return len(jax.tree.leaves(tree, is_leaf=module_libraries.is_flax_node))


def _counted(numbers: Sequence[int], length: int) -> list[int]:
    return [i % length for i in numbers if -length <= i < length]


# ------------------------------------------------------------------------------
# Objects with arrays or state among the arguments of a call, flattened by their attributes.

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
