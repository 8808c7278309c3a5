"""Whose code an exception comes from: calls of libraries are told from those of a kernel, a user and this program."""

from __future__ import annotations

import dataclasses
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

Owner = Literal["library", "scheduler", "search_spaces", "user"]

_ROOT = Path(__file__).parents[2]
_INSTALLED = tuple(Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib"))
_STANDARD = tuple(Path(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib", "scripts"))
# What kernels and this program call. Whatever else is installed may be an operation of one's own.
_CALLED = frozenset(
    {"absl", "alembic", "click", "jax", "jaxlib", "ml_dtypes", "numpy", "opt_einsum", "optuna"}
    | {"platformdirs", "psycopg", "rich", "scipy", "sqlalchemy", "typer"}
)


@dataclasses.dataclass(frozen=True)
class Call:
    """One line of a traceback."""

    file: str
    line: int
    function: str
    owner: Owner


def calls(error: BaseException) -> Iterator[Call]:
    """The calls in the traceback of `error` that no library made, the innermost first.

    Libraries raise for whoever called them.
    """
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        code = frame.f_code
        if (owner := owner_of(code.co_filename)) != "library":
            yield Call(code.co_filename, line, code.co_name, owner)


def owner_of(file: str) -> Owner:
    """Whose code a file is; code without a file, which begins with "<", counts as a library's."""
    path = Path(file)
    if file.startswith("<") or path == _ROOT / "search_spaces" / "jax_compat.py":  # which speaks for JAX
        return "library"
    if path.is_relative_to(_ROOT / "scheduler"):
        return "scheduler"
    if path.is_relative_to(_ROOT / "search_spaces"):
        return "search_spaces"
    for place in _INSTALLED:
        if path.is_relative_to(place):
            return "library" if path.relative_to(place).parts[0].removesuffix(".py") in _CALLED else "user"
    return "library" if any(path.is_relative_to(place) for place in _STANDARD) else "user"
