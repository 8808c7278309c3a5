"""Shell commands that error messages suggest, quoted for a shell."""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from search_spaces import locate

if TYPE_CHECKING:
    from scheduler.core.chip_table import Hardware
    from search_spaces.operation import Operation
    from search_spaces.problem import Problem


def tune(operation: Operation[Any], problem: Problem, chip: Hardware | None = None) -> str:
    """Returns the command that tunes `problem`, valid in the current directory.

    Args:
      chip: the target chip, which need not be present: its compiler estimates times.
    """
    return typed(name(operation), _FIELD.split(str(problem)), chip)


# Between two fields of a problem's text: a value may contain spaces.
_FIELD = re.compile(r" (?=[A-Za-z_]\w*=)")


def typed(operation: str, fields: Sequence[str], chip: Hardware | None = None) -> str:
    """Returns the command that tunes a problem as it was typed; arguments as in `tune`."""
    on = f" --hardware {shlex.quote(chip.kind)}" if chip is not None and chip.static_cycles else ""
    return f"tile-scheduler tune {shlex.join([operation, *fields])}{on}"


def name(operation: Operation[Any]) -> str:
    """Returns the command-line name of an operation: its own name if it is built in, otherwise where it is defined.

    A standalone module that is not installed is named by its file, because it can be imported only from its directory.
    A module in a package is named as a module, because it may import its siblings; the command line looks for it in the
    current directory.
    """
    place = locate(operation)
    if place is None or place.startswith("search_spaces."):
        return operation.name
    module, _, attribute = place.rpartition(":")
    file = Path(module) if module.endswith(".py") else _file(module)
    if file is None:
        return place
    with contextlib.suppress(OSError, ValueError):  # the directory is gone, or the file lies elsewhere
        file = file.relative_to(Path.cwd())
    return f"{file}:{attribute}"


def _file(module: str) -> Path | None:
    """Returns the file of a top-level module that is not installed, or None."""
    origin = getattr(sys.modules[module], "__file__", None)
    if "." in module or origin is None:
        return None
    file, installed = Path(origin).resolve(), sysconfig.get_paths()
    return None if any(file.is_relative_to(installed[kind]) for kind in ("purelib", "platlib", "stdlib")) else file
