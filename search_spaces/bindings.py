"""Detects whether a name that a function reads was rebound to another object since its last trace."""

from __future__ import annotations

import collections
import dis
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax

from search_spaces.fingerprint import content, is_of_tools

# `Bindings.generation` of the function being traced. JAX caches traces of kernel bodies and of functions that users
# jitted, with the values read at that time; it traces again if this number differs.
tracing: Any = jax.make_user_context(0)

_numbers = itertools.count(1)
_epoch = 0
# Limit on names, and on cells, checked in each eager call, at 30 ns each.
_MOST = 50


def drop_traces() -> None:
    """Forces every function to be traced again, whatever its names are bound to: values may have changed in place."""
    global _epoch
    _epoch += 1


def epoch() -> int:
    """Returns how often `drop_traces` was called."""
    return _epoch


class Bindings:
    """The globals and closures that functions read by name, also through functions of the same package.

    In-place changes, such as an item of a list or an attribute, keep the same object and are not detected. Names that
    one of the functions binds itself, such as a counter of its traces, are ignored. If there are very many names, those
    read nearest to the functions are checked.
    """

    def __init__(self, *functions: Callable[..., Any]) -> None:
        self._functions = functions
        self._generation = self._epoch = -1
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        self._cells: list[tuple[types.CellType, Any]] = []

    def generation(self) -> int:
        """Returns a number that changes whenever a name is found bound to another object than before.

        No other functions ever get the same number. Each eager call reads it, which takes less than a microsecond.
        """
        if self._epoch != _epoch or self._changed():
            self._note()
            self._generation, self._epoch = next(_numbers), _epoch
        return self._generation

    def _changed(self) -> bool:
        try:
            for namespace, name, value in self._globals:
                if namespace[name] is not value and not _equal(namespace[name], value):
                    return True
            for cell, value in self._cells:
                if cell.cell_contents is not value and not _equal(cell.cell_contents, value):
                    return True
        except (KeyError, ValueError):  # it is no longer bound
            return True
        return False

    def _note(self) -> None:
        reached = list(self._reached())
        bound, stored = (
            {name for function in reached for name in _named(function.__code__, operations)}
            for operations in (_BINDING_GLOBALS, _BINDING_CELLS)
        )
        read = {
            (id(function.__globals__), name): (function.__globals__, name, function.__globals__[name])
            for function in reached
            for name in set(_named(function.__code__, _READING)) - bound
            if not isinstance(function.__globals__.get(name), types.ModuleType | None)
        }
        cells = {
            id(cell): (cell, value)
            for function in reached
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            if name not in stored and (value := content(cell)) is not None
        }
        self._cells, self._globals = list(cells.values())[:_MOST], list(read.values())[:_MOST]

    def _reached(self) -> Iterator[types.FunctionType]:
        """Yields the functions, and functions of the same package that they read, each once, nearest first."""
        waiting: collections.deque[Any] = collections.deque(map(_plain, self._functions))
        packages = {_package(inspect.unwrap(function)) for function in waiting}
        seen: set[int] = set()
        while waiting:
            value = _plain(waiting.popleft())
            while value is not None and id(value) not in seen:
                seen.add(id(value))
                if isinstance(value, types.FunctionType) and not is_of_tools(value) and _package(value) in packages:
                    yield value
                    waiting += map(value.__globals__.get, _named(value.__code__, _READING))
                    waiting += map(content, value.__closure__ or ())
                value = getattr(value, "__wrapped__", None) if callable(value) else None


# Functions that are equal are traced once.
bindings_of = functools.lru_cache(maxsize=1024)(Bindings)
_READING = frozenset({"LOAD_GLOBAL"})
_BINDING_GLOBALS, _BINDING_CELLS = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL"}), frozenset({"STORE_DEREF"})


def _plain(value: Any) -> Any:
    """Returns the function that a bound method, a `functools.partial` or a callable object runs; else the value."""
    while isinstance(value, functools.partial | types.MethodType):
        value = value.func if isinstance(value, functools.partial) else value.__func__
    if callable(value) and not isinstance(value, type) and isinstance(type(value).__call__, types.FunctionType):
        return value if hasattr(value, "__wrapped__") else type(value).__call__
    return value


def _named(code: types.CodeType, operations: frozenset[str]) -> Iterator[str]:
    """Yields the names that a function, or one within it, uses by these operations of Python's bytecode."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in operations:
            yield str(instruction.argval)
        elif isinstance(instruction.argval, types.CodeType):
            yield from _named(instruction.argval, operations)


def _equal(now: Any, value: Any) -> bool:
    """Returns whether both are the same number or text, as when a notebook cell runs again; 0.0 and -0.0 differ."""
    return type(now) is type(value) and isinstance(now, int | float | str) and repr(now) == repr(value)


def _package(value: Any) -> str:
    return str(getattr(value, "__module__", "")).partition(".")[0]
