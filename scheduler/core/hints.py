"""Commands that messages tell to run, as a shell takes them."""

from __future__ import annotations

import contextlib
import shlex
import sys
import sysconfig
from pathlib import Path
from typing import Any

from scheduler.core.chip import Hardware
from search_spaces import locate
from search_spaces.operation import Operation
from search_spaces.problem import Problem


def tune(operation: Operation[Any], problem: Problem, chip: Hardware | None = None) -> str:
    """The command that searches `problem`, to be given where this process runs.

    Args:
      chip: the one that is meant, where it need not be here: its compiler estimates times.
    """
    on = f" --hardware {shlex.quote(chip.kind)}" if chip is not None and chip.static_cycles else ""
    return f"tile-scheduler tune {shlex.quote(name(operation))} {shlex.join(str(problem).split())}{on}"


def name(operation: Operation[Any]) -> str:
    """How a command line names an operation: one of those here by its own name, any other by where it is defined.

    A module that is not installed is named by its file, because it is found only from where it lies. One of a package,
    which may import its siblings, is named as a module: the command line looks for it in the directory it is given in.
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
    """The file of a module that lies alone and is not installed."""
    origin = getattr(sys.modules[module], "__file__", None)
    if "." in module or origin is None:
        return None
    file, installed = Path(origin).resolve(), sysconfig.get_paths()
    return None if any(file.is_relative_to(installed[kind]) for kind in ("purelib", "platlib", "stdlib")) else file
