"""Finds modules that a function holds in its closure, defaults and globals instead of taking them as arguments."""

from __future__ import annotations

import collections
import dataclasses
import functools
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

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
                    made.append((holder.__code__.co_freevars[place], _contents(cells[place]), new))
                elif part == "global":
                    copy.__globals__[place] = new
                elif part == "default":
                    defaults = copy.__defaults__ or ()
                    copy.__defaults__ = (*defaults[:place], new, *defaults[place + 1 :])
                else:
                    copy.__kwdefaults__ = {**(copy.__kwdefaults__ or {}), place: new}
            known = copy.__globals__
            made += [(name, functools.partial(known.get, name), known.get(name)) for name in _names(copy.__code__)]
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


def find(fn: Callable[..., Any], wanted: Callable[[Any], bool]) -> Captured:
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
        if holder.__globals__ is getattr(_innermost(fn), "__globals__", None):
            known = holder.__globals__
            yield from ((("global", name), known[name]) for name in _names(holder.__code__) if name in known)


def _innermost(fn: Any) -> Any:
    while isinstance(fn, functools.partial | types.MethodType):
        fn = fn.func if isinstance(fn, functools.partial) else fn.__func__
    return fn


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _function(fn: types.FunctionType, places: Sequence[int]) -> tuple[types.FunctionType, dict[int, types.CellType]]:
    """Copies a function with its own globals, and with new cells at these indices of its closure."""
    cells = {place: types.CellType() for place in places}
    closure = tuple(cells.get(i, cell) for i, cell in enumerate(fn.__closure__ or ()))
    copy = types.FunctionType(fn.__code__, dict(fn.__globals__), fn.__name__, fn.__defaults__, closure)
    copy.__kwdefaults__, copy.__qualname__ = fn.__kwdefaults__, fn.__qualname__
    copy.__dict__.update(fn.__dict__)
    return copy, cells


def _contents(cell: types.CellType) -> Callable[[], Any]:
    return lambda: cell.cell_contents
