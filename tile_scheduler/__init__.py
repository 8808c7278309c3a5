"""All public names of `scheduler` and `search_spaces`, as `import tile_scheduler as ts` and `ts.tuned_matmul`.

PyPI has another package named `scheduler`, and a file `scheduler.py` may lie in the directory of a script. This package
imports no other part of the project before a name is used, so it can report both cases.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scheduler import *  # noqa: F403
    from search_spaces import *  # noqa: F403

__version__ = "0.1.0"

# The newest minor version of JAX that the tests ran with (constraints/).
NEWEST_JAX = (0, 12)

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OWN = os.path.join(_ROOT, "scheduler", "__init__.py")


def installation_problem() -> str | None:
    """Returns what is wrong with this installation: the file, and what to do; None if nothing is."""
    if (reason := foreign_package()) is None and (other := _foreign_distribution(_ROOT)):
        reason = f"{other} is installed in {_ROOT}, too, its files mixed with those of tile-scheduler: {_repair(other)}"
    return reason


def foreign_package() -> str | None:
    """Returns why the package `scheduler` of this process is not this project's: the file, and what to do."""
    if not os.path.isdir(_ROOT):  # in an archive
        return None
    other = _foreign_distribution(_ROOT)
    if not os.path.isfile(_OWN):
        return f"{_OWN} is missing, as after another package named scheduler was uninstalled: {_repair(other)}"
    found = _file_of_scheduler()
    if found is not None and not (os.path.exists(found) and os.path.samefile(found, _OWN)):
        package = os.path.dirname(os.path.dirname(found))
        installed = os.path.isdir(package) and _foreign_distribution(package)
        advice = "pip uninstall scheduler" if installed else "rename that one"
        return f"{found} hides the package scheduler of tile-scheduler, {_OWN}: {advice}"
    with open(_OWN, "rb") as file:
        if b"tuned_matmul" not in file.read():
            replaced_by = other or "another package"
            return f"{_OWN} is of {replaced_by}, which was installed over tile-scheduler: {_repair(other)}"
    return None


def untried_jax() -> str | None:
    """Returns that the installed JAX is newer than the newest that was tried, and what to do; None if it is not."""
    try:
        found = importlib.metadata.version("jax")
        minor = tuple(map(int, found.split(".")[:2]))
    except (importlib.metadata.PackageNotFoundError, ValueError):  # a development version from a directory
        return None
    if minor <= NEWEST_JAX:
        return None
    following = f"{NEWEST_JAX[0]}.{NEWEST_JAX[1] + 1}"
    return (
        f"tile-scheduler {__version__} was tested with JAX below {following}, and this is {found}: if anything fails, "
        f"upgrade tile-scheduler, or: pip install 'jax<{following}'"
    )


def warn() -> None:
    """Warns of a problem of this installation and of a JAX that is too new, once in a process."""
    global _checked
    for reason in () if _checked else (installation_problem(), untried_jax()):
        if reason is not None:
            warnings.warn(reason, RuntimeWarning, stacklevel=3)
    _checked = True


_checked = False


def __getattr__(name: str) -> Any:
    """Returns a public name of `scheduler` or `search_spaces`, imported on first use.

    Raises:
      AttributeError: neither has it.
      ImportError: the package `scheduler` of this process is not this project's; the message has its file and what to
        do.
    """
    for package in _packages():
        if name in package.__all__:
            value = globals()[name] = getattr(package, name)
            return value
    raise AttributeError(f"module 'tile_scheduler' has no attribute {name!r} (it has: {', '.join(__dir__())})")


def __dir__() -> list[str]:
    return sorted({name for package in _packages() for name in package.__all__})


def _packages() -> tuple[Any, Any]:
    if (reason := foreign_package()) is not None:
        raise ImportError(reason)
    return importlib.import_module("scheduler"), importlib.import_module("search_spaces")


def _file_of_scheduler() -> str | None:
    """Returns the file of the package or module `scheduler` that Python has loaded, or would load."""
    if "scheduler" in sys.modules:
        return getattr(sys.modules["scheduler"], "__file__", None)
    spec = importlib.util.find_spec("scheduler")
    return spec.origin if spec is not None else None


def _foreign_distribution(directory: str) -> str | None:
    """Returns name and version of the distribution named scheduler that is installed in `directory`, or None."""
    endings = ".dist-info", ".egg-info"
    names = (name for name in os.listdir(directory) if name.startswith("scheduler-") and name.endswith(endings))
    return next((name.rpartition(".")[0].replace("-", " ") for name in names), None)


def _repair(other: str | None) -> str:
    """Returns the command that restores this installation."""
    return f"{'pip uninstall scheduler, then ' if other else ''}pip install --force-reinstall --no-deps tile-scheduler"
