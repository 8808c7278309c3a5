"""Digest of what a function computes, read from its jaxpr, without names, line numbers or addresses.

Two functions with the same fingerprint run the same equations on the same constants. Everything that a trace depends on
counts: globals, closures, decorators, environment variables, the content of arrays. Anything that a trace does not show
does not count: comments, names, and the derivative rules of the function. Host callbacks and inline Mosaic GPU code are
Python functions in the jaxpr; they count by their bytecode and by the values they refer to.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import inspect
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from search_spaces import configuration

# ------------------------------------------------------------------------------
# Helpers for the jaxprs that equations hold; JAX has one or two types of these, depending on its version.


def is_jaxpr(value: Any) -> bool:
    return isinstance(value, core.Jaxpr | core.ClosedJaxpr)


def opened_jaxpr(jaxpr: Any) -> Any:
    """Returns a jaxpr without its constants, which newer versions of JAX keep in the same type."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def held_jaxprs(equation: Any) -> Iterator[Any]:
    """Yields the jaxprs among the parameters of an equation, unopened."""
    for value in equation.params.values():
        yield from filter(is_jaxpr, value if isinstance(value, tuple | list) else (value,))


def all_equations(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of a jaxpr in order, including those inside kernels.

    Each equation precedes the equations that it holds.
    """
    for equation in opened_jaxpr(jaxpr).eqns:
        yield equation
        for inner in held_jaxprs(equation):
            yield from all_equations(inner)


# Fields of equations, and of their parameters, that only give an origin or a derivative rule, or, as "generation"
# (`Bindings`), differ between processes.
_SOURCE = frozenset(
    {"name", "name_and_src_info", "origin", "debug_info", "source_info", "logging_record", "generation"}
)
_DERIVATIVE = frozenset({"jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "jvp", "fwd", "out_trees"})
_UNSEEN = _SOURCE | _DERIVATIVE
_ADDRESS = re.compile(r" at 0x[0-9a-f]+|0x[0-9a-f]{6,}")
# Functions and types of these packages count by name.
_TOOLS = frozenset({"jax", "jaxlib", "numpy", "ml_dtypes", "builtins", "functools", "scheduler", "search_spaces"})


def fingerprint(function: Callable[..., Any], operands: Sequence[jax.ShapeDtypeStruct]) -> str:
    """Returns 16 hexadecimal digits, the same in every process with this version of JAX.

    The result depends on JAX's configuration only where the function reads it: flags that change every trace are set to
    their defaults, and 64-bit types are enabled if an operand has one. Call it in a thread that traces nothing else.

    Raises whatever `function` raises while it is traced.
    """
    wide = any(jnp.dtype(x.dtype).itemsize >= 8 and x.dtype != jnp.complex64 for x in operands)
    with (
        jax.enable_x64(wide),
        jax.default_matmul_precision(None),
        configuration.formulas(),
        jax.disable_jit(False),
    ):
        return digest(jax.make_jaxpr(function)(*operands))


def digest(value: Any) -> str:
    """Returns the fingerprint of a jaxpr, or of any value that a function may refer to."""
    found = hashlib.sha256()
    try:
        for part in _Reading().of(value):
            found.update(part.encode())
            found.update(b"\0")
    except Exception:  # some parameter cannot be read: its text is less precise, but better than nothing
        found = hashlib.sha256(_ADDRESS.sub("", str(value)).encode())
    return found.hexdigest()[:16]


class _Reading:
    """The content of a jaxpr as a stream of text. Variables are numbered in the order in which they occur."""

    def __init__(self) -> None:
        self._within: list[Any] = []  # the values being read, so that cycles end

    def of(self, value: Any) -> Iterator[str]:
        match value:
            case None | bool() | int() | float() | complex() | str() | bytes() | types.EllipsisType():
                yield f"{type(value).__name__} {value!r}"
            case enum.Enum():
                yield f"{type(value).__qualname__}.{value.name}"
            case np.dtype():
                yield f"dtype {value.name}"
            case slice():
                yield from self._items("slice", (value.start, value.stop, value.step))
            case tuple() | list():
                yield from self._items("sequence", value)
            case set() | frozenset():
                yield from self._items("set", sorted(_joined(self.of(item)) for item in value))
            case Mapping():
                pairs = sorted((_joined(self.of(key)), key) for key in value)
                yield from self._items("mapping", [(key, value[each]) for key, each in pairs])
            case type():
                yield f"type {_named(value)}"
            case types.ModuleType():
                yield f"module {value.__name__.partition('.')[0] if is_of_tools(value) else ''}"
            case types.CodeType():
                yield f"code {value.co_code.hex()} {value.co_names}"
                yield from self._items("code's", value.co_consts)
            case _ if is_jaxpr(value):
                yield from self._jaxpr(value)
            case jax.core.Tracer():  # in the closure of code that only lowering runs
                yield _aval(value)
            case _ if isinstance(value, np.ndarray | np.generic | jax.Array) or hasattr(value, "__array__"):
                yield from self._array(value)
            case _:
                if not any(value is other for other in self._within):
                    self._within.append(value)
                    yield from self._other(value)
                    self._within.pop()

    def _items(self, kind: str, items: Sequence[Any]) -> Iterator[str]:
        yield f"{kind} {len(items)}"
        for item in items:
            yield from self.of(item)

    def _jaxpr(self, closed: Any) -> Iterator[str]:
        jaxpr = opened_jaxpr(closed)
        number: dict[Any, int] = {}
        yield "jaxpr"
        yield from self._items("constants", getattr(closed, "consts", ()))
        for var in (*jaxpr.constvars, *jaxpr.invars):
            number[var] = len(number)
            yield _aval(var)
        for equation in jaxpr.eqns:
            yield equation.primitive.name
            for atom in equation.invars:
                yield from self._atom(atom, number)
            yield from self._equation(equation)
            for var in equation.outvars:
                number[var] = len(number)
                yield _aval(var)
        for atom in jaxpr.outvars:
            yield from self._atom(atom, number)

    def _atom(self, atom: Any, number: Mapping[Any, int]) -> Iterator[str]:
        if isinstance(atom, core.Literal):
            yield _aval(atom)
            yield from self.of(atom.val)
        else:
            yield f"var {number[atom]}"

    def _equation(self, equation: Any) -> Iterator[str]:
        params = equation.params
        if equation.primitive.name == "tuned_call":  # another operation, with an identity of its own
            yield f"{params['operation'].name} {params['problem'].canonical()}"
            params = {"params": params["params"]}
        for name in sorted(params.keys() - _UNSEEN):
            yield name
            yield from self.of(params[name])

    def _array(self, value: Any) -> Iterator[str]:
        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.extended):
            yield str(value.dtype)
            value = jax.random.key_data(value)
        content = np.asarray(value)
        yield f"array {content.dtype} {content.shape} {hashlib.sha256(content.tobytes()).hexdigest()}"

    def _other(self, value: Any) -> Iterator[str]:
        if isinstance(value, functools.partial):
            yield from self._items("partial", (value.func, value.args, value.keywords))
        elif isinstance(value, types.MethodType):
            yield from self._items("method", (value.__func__, value.__self__))
        elif callable(value) and (found := inspect.unwrap(value)) is not value:
            yield from self.of(found)
        elif isinstance(value, types.FunctionType):
            yield from self._function(value)
        elif dataclasses.is_dataclass(value):
            kept = [each.name for each in dataclasses.fields(value) if each.name not in _UNSEEN]
            yield from self._items(_named(type(value)), [(name, getattr(value, name, None)) for name in kept])
        else:
            text = repr(value)
            yield f"{_named(type(value))} {_ADDRESS.sub('', text)}"
            if _ADDRESS.search(text) and not is_of_tools(type(value)):
                yield from self.of(dict(getattr(value, "__dict__", {})))

    def _function(self, function: types.FunctionType) -> Iterator[str]:
        if is_of_tools(function):
            yield f"function {_named(function)}"
            return
        yield from self.of(function.__code__)
        cells = tuple(map(content, function.__closure__ or ()))
        read = sorted(set(names(function.__code__)) & function.__globals__.keys())
        globals_read = {name: function.__globals__[name] for name in read}
        yield from self._items("refers to", (function.__defaults__, function.__kwdefaults__, cells, globals_read))


def content(cell: types.CellType) -> Any:
    """Returns the content of a closure's cell; None if it is not bound yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def names(code: types.CodeType) -> Iterator[str]:
    """Yields every global and attribute name that a function, and the functions within it, read."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names(constant)


def _aval(atom: Any) -> str:
    return f"{type(atom.aval).__name__} {_ADDRESS.sub('', repr(atom.aval))}"


def _named(value: Any) -> str:
    """Returns the name of a type or function, with its package but not its module.

    The module of a script has another name in a worker.
    """
    package = f"{_package(value)}." if is_of_tools(value) else ""
    return f"{package}{value.__qualname__}"


def is_of_tools(value: Any) -> bool:
    """Returns whether a function or type belongs to JAX, NumPy or this package, and so counts by its name."""
    return _package(value) in _TOOLS


def _package(value: Any) -> str:
    return str(getattr(value, "__module__", None) or getattr(value, "__name__", "")).partition(".")[0]


def _joined(parts: Iterator[str]) -> str:
    return "\0".join(parts)
