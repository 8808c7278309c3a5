"""What a decorated function is called where schedules are stored: the same in a script, its workers and an import."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from search_spaces import LOADED_FILE, OPERATIONS
from search_spaces.errors import DeclarationError

# The functions that have taken a name, as long as they are there.
_taken: weakref.WeakValueDictionary[str, Callable[..., Any]] = weakref.WeakValueDictionary()


def name_of(function: Callable[..., Any], given: str | None) -> str:
    """``package.module.function``, or the name that its author gives it; taken by this function from now on.

    Raises:
      DeclarationError: the name is taken by another function, or by an operation that is here.
    """
    name = given if given is not None else f"{_module(function)}.{_qualname(function)}"
    if not name or name in OPERATIONS or ":" in name:
        why = "is an operation of this package" if name in OPERATIONS else "cannot name an operation"
        raise DeclarationError(f"{name!r} {why}: give {function.__name__} another name=")
    other = _taken.get(name, function)
    if not _is_again(function, other):
        raise DeclarationError(
            f"{name!r} already names {_qualname(other)} of {_file(other)}, and the schedules of both would be stored "
            f"under it: give {function.__name__} of {_file(function)} a name of its own, as in "
            f'name="{function.__name__}_2"'
        )
    _taken[name] = function
    return name


def _is_again(function: Callable[..., Any], other: Callable[..., Any]) -> bool:
    """Whether they are one function: loaded under two names of its module, or run again as a notebook's cell is."""
    in_notebook = function.__module__ == other.__module__ == "__main__"
    return _qualname(function) == _qualname(other) and (in_notebook or _file(function) == _file(other))


def _qualname(function: Callable[..., Any]) -> str:
    return function.__qualname__.replace(".<locals>", "")


def _file(function: Callable[..., Any]) -> str:
    return os.path.realpath(function.__code__.co_filename)


def _module(function: Callable[..., Any]) -> str:
    """The module as others import it: of a script, and of a file loaded by its path, by where the file lies."""
    module, file = function.__module__, Path(function.__code__.co_filename)
    if module != "__main__" and not module.startswith(LOADED_FILE):
        return module
    if not file.is_file() or file.suffix != ".py":  # a notebook, a console
        return "__main__"
    parts, folder = [file.stem], file.resolve().parent
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join(parts)
