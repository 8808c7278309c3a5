"""Attribution of frames and exceptions to code: a library's, a kernel's, the user's or this program's."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

Owner = Literal["library", "scheduler", "search_spaces", "user"]
# File, line and function.
Place = tuple[str, int, str]

_ROOT = Path(__file__).parents[2]
# Directory names of installed packages: of this environment, a nested one, a distribution, or the user's home.
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_STANDARD = tuple(Path(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib", "scripts"))
# Packages that kernels and this program call. Other installed packages may contain a user's operations.
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
    """Yields the calls in the traceback of `error`, innermost first, without calls made by libraries.

    Libraries are skipped because they raise on behalf of their callers.
    """
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        code = frame.f_code
        if (owner := owner_of(code.co_filename)) != "library":
            yield Call(code.co_filename, line, code.co_name, owner)


def asked_by(places: Iterable[Place]) -> Call | None:
    """Returns the first of these places that is in user code, or None.

    Code that is not installed has priority over installed code, for example a library of models.

    Args:
      places: innermost first.
    """
    installed = None
    for file, line, function in places:
        if owner_of(file) == "user":
            call = Call(file, line, function, "user")
            if not _is_installed(file):
                return call
            installed = installed or call
    return installed


def traced(traceback: Any) -> Iterator[Place]:
    """Yields the calls in a traceback that JAX kept while tracing; nothing for None."""
    if traceback is not None:
        for code, instruction in zip(*traceback.raw_frames(), strict=True):
            first_line, *_ = traceback.code_addr2location(code, instruction)  # as in JAX
            yield code.co_filename, first_line, code.co_name


@functools.cache
def _libraries() -> tuple[Path, ...]:
    """Returns the directories of the packages in `_CALLED`."""
    found = map(importlib.util.find_spec, _CALLED)
    return tuple(Path(folder) for spec in found if spec for folder in spec.submodule_search_locations or ())


@functools.lru_cache(maxsize=4096)
def _is_installed(file: str) -> bool:
    path = Path(file)
    folder_files = any(path.is_relative_to(folder.parent) for folder in _libraries())
    return folder_files or not _INSTALLED.isdisjoint(path.parts)


@functools.lru_cache(maxsize=4096)
def owner_of(file: str) -> Owner:
    """Returns the owner of a file; code without a file (its name begins with "<") counts as library code."""
    path = Path(file)
    if file.startswith("<") or path == _ROOT / "search_spaces" / "jax_compat.py":  # which wraps JAX
        return "library"
    if path.is_relative_to(_ROOT / "scheduler"):
        return "scheduler"
    if path.is_relative_to(_ROOT / "search_spaces"):
        return "search_spaces"
    if any(path.is_relative_to(folder) for folder in _libraries()):
        return "library"
    standard = any(path.is_relative_to(place) for place in _STANDARD)
    return "library" if standard and _INSTALLED.isdisjoint(path.parts) else "user"
