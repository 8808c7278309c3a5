"""The command `tile-scheduler`: checks the installation, then runs the command line of the package `scheduler`."""

from __future__ import annotations

import gc
import signal

import tile_scheduler


def main() -> None:
    # Ctrl-C ends a command that begins or ends as it ends any program, without a traceback of the import under way.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if (reason := tile_scheduler.foreign_package()) is not None:
        raise SystemExit(f"tile-scheduler: {reason}")
    try:
        # Only now: another package named scheduler has no such module.
        from scheduler.cli import app

        app.main()
    finally:
        # The process ends: the garbage collector need not search all objects of JAX once more, which takes 0.4 s.
        gc.disable()
        gc.freeze()


if __name__ == "__main__":
    main()
