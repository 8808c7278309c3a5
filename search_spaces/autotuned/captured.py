"""The values that a function captures where it is defined, as text: part of the name of its stored schedules."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any

from search_spaces.autotuned.names import module_of
from search_spaces.autotuned.statics import spelled
from search_spaces.fingerprint import content, digest, is_of_tools

# Longer text, or text that is awkward on a command line, is replaced by a digest.
_LONGEST = 40


def captured(function: Callable[..., Any], reference: Callable[..., Any], choices: Collection[str]) -> str:
    """Formats the closure values of a function, its decorators and its reference: ``(scale=3.0)``, "" for none.

    A lambda, or a function defined within another, also captures the defaults of its static parameters, which may
    differ between instances.
    """
    found: dict[str, str] = {}
    for each in (*_layers(function), *_layers(reference)):
        for name, value in _values(each, choices):
            text = _text(value)
            same = [known for known in found if known.rstrip("'") == name]
            if text not in (found[known] for known in same):
                found[name + "'" * len(same)] = text
    return f"({','.join(f'{name}={text}' for name, text in sorted(found.items()))})" if found else ""


def _layers(function: Any) -> Iterator[types.FunctionType]:
    """Yields a function and the functions that its decorators wrap, outermost first."""
    while function is not None:
        if isinstance(function, types.FunctionType):
            yield function
        function = getattr(function, "__wrapped__", None)


def _values(function: types.FunctionType, choices: Collection[str]) -> Iterator[tuple[str, Any]]:
    own = [inspect.unwrap(layer) for layer in _layers(function)]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        value = content(cell)
        if value is not None and not any(inspect.unwrap(value) is each for each in own if callable(value)):
            yield name, value
    if "<" in function.__qualname__:  # "make.<locals>.kernel", "<lambda>"
        for name, value in (function.__kwdefaults__ or {}).items():
            if name not in choices:
                yield name, value


def _text(value: Any) -> str:
    if callable(value) and isinstance(function := inspect.unwrap(value), types.FunctionType):
        within = captured(function, function, ())
        if function.__name__ == "<lambda>":
            return f"lambda#{digest(function.__code__)[:8]}{within}"
        # JAX moves its own functions between modules from version to version.
        module = function.__module__.partition(".")[0] if is_of_tools(function) else module_of(function)
        return f"{module}.{function.__qualname__}{within}".replace("<locals>.", "")
    try:
        text = spelled("", value)
    except TypeError:
        name = value.__qualname__ if isinstance(value, type) else type(value).__qualname__
        return f"{name}#{digest(value)[:8]}"
    plain = len(text) <= _LONGEST and text.isprintable() and not set(text) & set(" :'\"")
    return text if plain else f"#{digest(text)[:8]}"
