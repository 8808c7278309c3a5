"""What a decorated function is called where schedules are stored: the same in a script, its workers and an import."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from search_spaces import LOADED_FILE, OPERATIONS
from search_spaces.errors import DeclarationError

# name -> the module, the file and the function within it that have taken it.
_taken: dict[str, tuple[str, str, str]] = {}


def name_of(function: Callable[..., Any], given: str | None) -> str:
    """``package.module.function``, or the name that its author gives it; taken by this function from now on.

    Raises:
      DeclarationError: the name is taken by another function, or by an operation that is here.
    """
    qualname = function.__qualname__.replace(".<locals>", "")
    name = given if given is not None else f"{_module(function)}.{qualname}"
    if not name or name in OPERATIONS or ":" in name:
        why = "is an operation of this package" if name in OPERATIONS else "cannot name an operation"
        raise DeclarationError(f"{name!r} {why}: give {function.__name__} another name=")
    file = os.path.realpath(function.__code__.co_filename)
    module, its_file, its_function = _taken.setdefault(name, (function.__module__, file, qualname))
    again = its_function == qualname and (its_file == file or module == function.__module__ == "__main__")
    if not again:
        raise DeclarationError(
            f"{name!r} already names {its_function} of {its_file}, and the schedules of both would be stored under it: "
            f'give {function.__name__} of {file} a name of its own, as in name="{function.__name__}_2"'
        )
    _taken[name] = function.__module__, file, qualname
    return name


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
