"""The command `tile-scheduler`, under a name that nobody else has: is the package `scheduler` that Python finds ours?

A package of that name is on PyPI, too, and a file of that name may lie beside a script.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import warnings

__version__ = "0.1.0"

_ROOT = os.path.dirname(os.path.abspath(__file__))
OWN = os.path.join(_ROOT, "scheduler", "__init__.py")


def trouble() -> str | None:
    """What is wrong with the package `scheduler` of this process: the file, and what to do; None where nothing is."""
    if (reason := stranger()) is None and (other := _other(_ROOT)):
        reason = f"{other} is installed in {_ROOT}, too, its files mixed with those of tile-scheduler: {_mended(other)}"
    return reason


def stranger() -> str | None:
    """Why the package `scheduler` of this process is not this project's: the file, and what to do; None where it is."""
    if not os.path.isdir(_ROOT):  # in an archive
        return None
    other = _other(_ROOT)
    if not os.path.isfile(OWN):
        return f"{OWN} is missing, as after another package named scheduler was uninstalled: {_mended(other)}"
    found = _found()
    if found is not None and not (os.path.exists(found) and os.path.samefile(found, OWN)):
        package = os.path.dirname(os.path.dirname(found))
        away = "pip uninstall scheduler" if os.path.isdir(package) and _other(package) else "rename that one"
        return f"{found} hides the package scheduler of tile-scheduler, {OWN}: {away}"
    with open(OWN, "rb") as file:
        if b"tuned_matmul" not in file.read():
            return (
                f"{OWN} is of {other or 'another package'}, which was installed over tile-scheduler: {_mended(other)}"
            )
    return None


def warn() -> None:
    """Warns of what is wrong, once in a process."""
    global _asked
    if not _asked and (reason := trouble()) is not None:
        warnings.warn(reason, RuntimeWarning, stacklevel=3)
    _asked = True


_asked = False


def _found() -> str | None:
    """The file of the package or module `scheduler` that Python has loaded, or would load."""
    if "scheduler" in sys.modules:
        return getattr(sys.modules["scheduler"], "__file__", None)
    import importlib.util

    spec = importlib.util.find_spec("scheduler")
    return spec.origin if spec is not None else None


def _other(directory: str) -> str | None:
    """The distribution named scheduler that is installed there, with its version, or None."""
    endings = ".dist-info", ".egg-info"
    names = (name for name in os.listdir(directory) if name.startswith("scheduler-") and name.endswith(endings))
    return next((name.rpartition(".")[0].replace("-", " ") for name in names), None)


def _mended(other: str | None) -> str:
    return f"{'pip uninstall scheduler, then ' if other else ''}pip install --force-reinstall --no-deps tile-scheduler"


def main() -> None:
    import signal

    # Ctrl-C ends a command that begins or ends as it ends any program, without a traceback of the import under way.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if (reason := stranger()) is not None:
        raise SystemExit(f"tile-scheduler: {reason}")
    try:
        importlib.import_module("scheduler.cli.app").main()
    finally:
        # The process ends: the garbage collector need not search all objects of JAX once more, which takes 0.4 s.
        gc.disable()
        gc.freeze()


if __name__ == "__main__":
    main()
