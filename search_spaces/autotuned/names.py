"""What a decorated function is called where schedules are stored: the same in a script, its workers and an import."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from search_spaces import LOADED_FILE, OPERATIONS
from search_spaces.errors import DeclarationError

# The functions that have taken a name, as long as they are there; and, of each, what its file was then, and what it and
# its decorators captured.
_taken: weakref.WeakValueDictionary[str, Callable[..., Any]] = weakref.WeakValueDictionary()
_then: weakref.WeakKeyDictionary[Callable[..., Any], tuple[Any, str]] = weakref.WeakKeyDictionary()
# Of what is typed statement by statement nothing tells where it was typed.
_CONSOLES = ("<stdin>", "<string>", "<console>")


def name_of(function: Callable[..., Any], given: str | None, captured: str) -> str:
    """``package.module.function``, or the name that its author gives it; taken by this function from now on.

    Args:
      captured: what the function and its decorators capture, as text. It tells functions of one factory apart, and is
        part of their names.

    Raises:
      DeclarationError: the name is taken by another function, or by an operation that is here.
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
    """Whether both come from one definition, which ran again: in a factory, a reload, or a cell of a notebook.

    Two places in one text are two definitions. A text that was edited meanwhile may have moved the one.
    """
    if _qualname(function) != _qualname(other):
        return False
    if _file(function) != _file(other):
        return function.__module__ == other.__module__ == "__main__"  # two cells
    stamp, captured_then = _then[other]
    if list(function.__code__.co_positions()) == list(other.__code__.co_positions()) and captured == captured_then:
        return True
    return function.__code__.co_filename in _CONSOLES or _stamp(function) != stamp


def _stamp(function: Callable[..., Any]) -> tuple[int, int] | None:
    """What changes where the file of a function is edited; None where there is no file."""
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
