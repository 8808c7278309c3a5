"""A version of a function that follows from its source and what it refers to: what was changed has another.

What counts: the function's text without decorators, docstring, comments and layout; and, of the names that it and the
functions within it read (globals and closures), constants and containers of them, arrays by their content (large ones
by shape and dtype), functions and classes of one's own by their text and what they refer to in turn, and what is read
of modules of one's own. Of installed packages and of all other objects only the name or the type counts. A function
without a source file (typed into a console) counts by its bytecode, which differs between versions of Python.
"""

from __future__ import annotations

import ast
import enum
import functools
import hashlib
import inspect
import sysconfig
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

# What is used to write and tune kernels: these packages count as installed wherever they lie.
_TOOLS = frozenset({"jax", "jaxlib", "numpy", "scheduler", "search_spaces", "tile_scheduler"})
_MOST_BYTES = 2**20  # of an array whose content counts
_INSTALLED = tuple(Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib", "stdlib", "platstdlib"))


class Source:
    """The source of a function: its own text as of now, and what it refers to as of when the version is first asked."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._text = _text(inspect.unwrap(function)) if _code(function) is not None else ""

    @functools.cached_property
    def version(self) -> int:
        """A positive number below 2^31."""
        root = str(getattr(inspect.unwrap(self._function), "__module__", "")).partition(".")[0]
        parts = [self._text, *_Walk(root).of(self._function)]
        digest = hashlib.sha256("\n".join(parts).encode()).digest()
        return int.from_bytes(digest[:4], "big") % (2**31 - 1) + 1


class _Walk:
    """What a function refers to as text, each thing once. `root` is the package of the function, installed or not."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._seen: set[int] = set()
        self._kept: list[Any] = []  # so that no two things have one id

    def of(self, value: Any) -> Iterator[str]:
        if isinstance(value, int | float | complex | str | bytes | None | enum.Enum | np.dtype | type(...)):
            yield repr(value)
            return
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._kept.append(value)
        match value:
            case np.ndarray() | np.generic() | jax.Array() if not isinstance(value, jax.core.Tracer):
                yield f"{value.dtype}{value.shape}"
                if value.nbytes <= _MOST_BYTES:
                    yield hashlib.sha256(np.asarray(value).tobytes()).hexdigest()
            case tuple() | list():
                yield f"{type(value).__name__}{len(value)}"
                for item in value:
                    yield from self.of(item)
            case set() | frozenset():
                yield from sorted("\n".join(self.of(item)) for item in value)
            case dict() | types.MappingProxyType():
                for key, item in value.items():
                    yield from self.of(key)
                    yield from self.of(item)
            case functools.partial():
                yield from self.of((value.func, value.args, value.keywords))
            case types.MethodType():
                yield from self.of((value.__func__, value.__self__))
            case types.ModuleType():
                yield "" if self._is_own(value) else value.__name__
            case type():
                yield from self._class(value)
            case _ if _code(value) is not None:
                yield from self._function(value)
            case _:
                yield type(value).__qualname__

    def _class(self, value: type) -> Iterator[str]:
        if not self._is_own(value):
            yield f"{value.__module__}.{value.__qualname__}"
        else:
            yield _text(value)
            for member in vars(value).values():
                if _code(member) is not None:
                    yield from self.of(member)

    def _function(self, value: Any) -> Iterator[str]:
        function = inspect.unwrap(value)
        if not self._is_own(function):
            yield f"{function.__module__}.{function.__qualname__}"
            return
        yield _text(function)
        names = sorted(set(_names(function.__code__)))
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for name in sorted(cells):
            try:
                yield from (name, *self.of(cells[name].cell_contents))
            except ValueError:  # it is not bound yet
                yield name
        for name in names:
            if name in function.__globals__:
                yield from (name, *self._read(function.__globals__[name], names))
        yield from self.of((function.__defaults__, function.__kwdefaults__))

    def _read(self, value: Any, names: list[str]) -> Iterator[str]:
        yield from self.of(value)
        if isinstance(value, types.ModuleType) and self._is_own(value):
            for name in names:
                if name in vars(value):
                    yield from (name, *self.of(vars(value)[name]))

    def _is_own(self, value: Any) -> bool:
        """Whether it is of the user's own code: of the function's package, or of a file that is not installed."""
        package = str(getattr(value, "__module__", None) or getattr(value, "__name__", "")).partition(".")[0]
        if package in _TOOLS:
            return False
        try:
            file = Path(inspect.getfile(value))
        except (TypeError, OSError):  # built in, or of a class that a console defined
            return package in (self._root, "__main__")
        return package == self._root or not any(file.is_relative_to(place) for place in _INSTALLED)


def _code(value: Any) -> types.CodeType | None:
    """The code of a Python function, also below decorators such as `jax.jit`."""
    found = getattr(inspect.unwrap(value), "__code__", None) if callable(value) else None
    return found if isinstance(found, types.CodeType) else None


def _names(code: types.CodeType) -> Iterator[str]:
    """Every name that a function, and the functions within it, read of globals and attributes."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _text(value: Any) -> str:
    """The source of a function or class in one layout, without decorators and docstring; or else its bytecode."""
    try:
        lines, _ = inspect.findsource(value)
        tree = _parsed("".join(lines))
    except (OSError, TypeError, SyntaxError, IndentationError):
        return _bytecode(value.__code__) if hasattr(value, "__code__") else repr(value)
    found = [node for node in ast.walk(tree) if _is_source(node, value)]
    return "\n".join(map(_unparsed, found)) if found else _bytecode(value.__code__)


@functools.lru_cache(maxsize=8)
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def _is_source(node: ast.AST, value: Any) -> bool:
    if isinstance(value, type):
        return isinstance(node, ast.ClassDef) and node.name == value.__name__
    code = value.__code__
    if isinstance(node, ast.Lambda):  # those of one line are told apart by nothing else than their parameters
        own = tuple(argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs))
        taken = code.co_argcount + code.co_kwonlyargcount
        return code.co_name == "<lambda>" and node.lineno == code.co_firstlineno and own == code.co_varnames[:taken]
    if isinstance(node, ast.FunctionDef):
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        return code.co_name == node.name and first == code.co_firstlineno
    return False


def _unparsed(node: ast.AST) -> str:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
        changed: Any = type(node)(**{**dict(ast.iter_fields(node)), "decorator_list": [], "body": body or [ast.Pass()]})
        return ast.unparse(ast.fix_missing_locations(ast.copy_location(changed, node)))
    return ast.unparse(node)


def _bytecode(code: types.CodeType) -> str:
    constants = (_bytecode(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts)
    return f"{code.co_code.hex()} {code.co_names} {' '.join(constants)}"
