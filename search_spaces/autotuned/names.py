"""Names of decorated functions in stores of schedules: the same in a script, its workers and an import."""

from __future__ import annotations

import inspect
import os
import types
import weakref
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from search_spaces import LOADED_FILE, OPERATIONS
from search_spaces.autotuned.arguments import static_to_text
from search_spaces.fingerprint import content, digest, is_of_tools
from search_spaces.space import DeclarationError

# The functions that own a name, while they exist; and, for each, the state of its file at that time, and the values
# that it and its decorators captured.
_taken: weakref.WeakValueDictionary[str, Callable[..., Any]] = weakref.WeakValueDictionary()
_then: weakref.WeakKeyDictionary[Callable[..., Any], tuple[Any, str]] = weakref.WeakKeyDictionary()
# Code typed at a console has no useful location.
_CONSOLES = ("<stdin>", "<string>", "<console>")


def name_of(function: Callable[..., Any], given: str | None, captured: str) -> str:
    """Returns ``package.module.function``, or the name given by the author, and reserves it for this function.

    Args:
      captured: the values that the function and its decorators capture, as text. It distinguishes functions of one
        factory, and is part of their names.

    Raises:
      DeclarationError: the name belongs to another function, or to an operation of this package.
    """
    name = given if given is not None else f"{module_of(function)}.{_qualname(function)}"
    if not name or name in OPERATIONS or ":" in name:
        why = "is an operation of this package" if name in OPERATIONS else "cannot name an operation"
        raise DeclarationError(f"{name!r} {why}: give {function.__name__} another name=")
    if "<" in function.__qualname__:  # "make.<locals>.kernel", "<lambda>"
        name += captured
    other = _taken.get(name)
    if other is not None and not _is_again(function, other, captured):
        raise DeclarationError(
            f"{name!r} already names {_qualname(other)} of {_place(other)}, and the schedules of both would be stored "
            f"under it: give {function.__name__} of {_place(function)} a name of its own, as in "
            f'name="{function.__name__.strip("<>")}_2"'
        )
    _taken[name], _then[function] = function, (_stamp(function), captured)
    return name


def _is_again(function: Callable[..., Any], other: Callable[..., Any], captured: str) -> bool:
    """Returns whether both come from one definition that ran again: in a factory, a reload, or a notebook cell.

    Two positions in the same text are two definitions. If the text was edited in between, one definition may have
    moved.
    """
    if _qualname(function) != _qualname(other):
        return False
    if _file(function) != _file(other):
        return module_of(function) == module_of(other) == "__main__"  # two cells
    stamp, captured_then = _then[other]
    if list(function.__code__.co_positions()) == list(other.__code__.co_positions()) and captured == captured_then:
        return True
    return function.__code__.co_filename in _CONSOLES or _stamp(function) != stamp


def _stamp(function: Callable[..., Any]) -> tuple[int, int] | None:
    """Returns a value that changes if the file of a function is edited; None if there is no file."""
    try:
        found = os.stat(_file(function))
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _place(function: Callable[..., Any]) -> str:
    return f"{_file(function)}:{function.__code__.co_firstlineno}"


def _qualname(function: Callable[..., Any]) -> str:
    return function.__qualname__.replace(".<locals>", "")


def _file(function: Callable[..., Any]) -> str:
    return os.path.realpath(function.__code__.co_filename)


def module_of(function: Callable[..., Any]) -> str:
    """Returns the module name for imports.

    For a script, or a file loaded by its path, it is derived from the file's location. A function made by `exec` in a
    namespace without a name has no module, as one typed at a console.
    """
    module, file = function.__module__ or "__main__", Path(function.__code__.co_filename)
    if module != "__main__" and not module.startswith(LOADED_FILE):
        return module
    if not file.is_file() or file.suffix != ".py":  # a notebook, a console
        return "__main__"
    parts, folder = [file.stem], file.resolve().parent
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join(parts)


# ------------------------------------------------------------------------------
# The values that a function captures where it is defined, as text: part of the name of its stored schedules.

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
        module = str(function.__module__).partition(".")[0] if is_of_tools(function) else module_of(function)
        return f"{module}.{function.__qualname__}{within}".replace("<locals>.", "")
    try:
        text = static_to_text("", value)
    except TypeError:
        name = value.__qualname__ if isinstance(value, type) else type(value).__qualname__
        return f"{name}#{digest(value)[:8]}"
    plain = len(text) <= _LONGEST and text.isprintable() and not set(text) & set(" :'\"")
    return text if plain else f"#{digest(text)[:8]}"
