"""The command-line application: registration of commands, error reports and exit statuses."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperGroup

from scheduler.cli import extracting, inspecting, listing, measuring, misses, plotting, storing, tuning
from scheduler.cli.arguments import all_stores_read
from scheduler.core.errors import CandidateFailed, SchedulerError
from scheduler.core.frames import calls
from scheduler.core.interrupts import Watch, left_behind
from scheduler.core.text import printable
from search_spaces.space import DeclarationError
from tile_scheduler import __version__

# Errors of a full or missing disk if standard output is redirected to a file.
_OUTPUT_ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT)


class _Commands(TyperGroup):
    """Runs commands with the exit conventions of a shell.

    An error is one sentence on standard error, with status 1, as is a store that cannot be read. Ctrl-C exits with 130
    and SIGTERM with 143, after worker processes have ended and files are closed. A second signal exits at once.
    """

    def invoke(self, ctx: Any) -> Any:
        watch = Watch(command=True)
        try:
            with watch, all_stores_read():
                return super().invoke(ctx)
        except (SchedulerError, DeclarationError) as error:
            if isinstance(error, CandidateFailed) and error.__cause__ is not None:
                print(printable("".join(traceback.format_exception(error.__cause__))), end="", file=sys.stderr)
            print(printable(f"tile-scheduler: {error}"), file=sys.stderr)
            raise typer.Exit(1) from None
        except typer.BadParameter as error:
            error.message = printable(_number_wanted(error) or error.message)
            raise
        except Exception as error:
            if (place := _user_location(error)) is None:
                raise
            message = str(error).partition("\n")[0]  # JAX appends traceback notes to its messages
            print(printable(f"tile-scheduler: {place}: {type(error).__name__}: {message}"), file=sys.stderr)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            measures = ctx.invoked_subcommand in ("tune", "tune-job", "tune-missed", "sweep")
            kept = "; finished measurements are kept, and the same command resumes" if measures else ""
            print(f"tile-scheduler: interrupted{kept}", file=sys.stderr)
            raise typer.Exit(128 + (watch.number or signal.SIGINT)) from None


def _number_wanted(error: typer.BadParameter) -> str | None:
    """Returns the message for a number of another type or out of range; None for another error.

    Typer gives those of pydantic, as in "Input should be greater than or equal to 1", without the value.
    """
    found = next(iter(getattr(error.__cause__, "errors", list)()), None)
    if found is None:
        return None
    least, most, default = (getattr(error.param, name, None) for name in ("min", "max", "default"))
    kind = "a number" if any(isinstance(x, float) for x in (least, default)) else "an integer"
    bounds = f" from {least} to {most}" if most is not None else "" if least is None else f", {least} or more"
    return f"expected {kind}{bounds}, found {found['input']!r}"


def _user_location(error: BaseException) -> str | None:
    """Returns file, line and function of user code that raised `error`; None if the error is in this program."""
    innermost = next(calls(error), None)
    if innermost is None or innermost.owner != "user":
        return None
    return f"{innermost.file}:{innermost.line}, in {innermost.function}"


app = typer.Typer(
    cls=_Commands,
    help="Search, inspect and export the tile schedules of JAX Pallas kernels.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


_COMMANDS: Mapping[str, Callable[..., None]] = {
    "tune": tuning.tune,
    "tune-job": tuning.tune_job,
    "tune-missed": tuning.tune_missed,
    "replay": tuning.replay,
    "extract": extracting.extract,
    "shards": extracting.shards_command,
    "sweep": measuring.sweep,
    "calibrate": measuring.calibrate,
    "verify": measuring.verify,
    "misses": misses.misses,
    "list": listing.list_,
    "show": inspecting.show,
    "explain": inspecting.explain,
    "plot": plotting.plot,
    "report": listing.report,
    "export": storing.export,
    "import": storing.import_,
    "forget": storing.forget,
    "build-cache": storing.build_cache,
    "check-records": storing.check_records,
    "doctor": inspecting.doctor,
}
for _name, _command in _COMMANDS.items():
    app.command(_name)(_command)


def main(arguments: Sequence[str] | None = None) -> None:
    sys.stdout, sys.stderr = (stream or _devnull() for stream in (sys.stdout, sys.stderr))  # None if closed
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # for table rules on a terminal that supports only ASCII
    with contextlib.suppress(OSError):  # the working directory may have been deleted
        sys.path.append(str(Path.cwd()))  # as `python -m` does, for user operations in a package of this directory
    try:
        try:
            app(args=None if arguments is None else list(arguments), prog_name="tile-scheduler")
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in _OUTPUT_ERRORS or error.filename is not None:
            raise
        sys.stdout = _devnull()  # the rest of its buffer cannot be written either
        print(f"tile-scheduler: standard output cannot be written: {error.strerror}", file=sys.stderr)
        raise SystemExit(1) from None
    except SystemExit as end:
        if left_behind():  # at a normal exit, JAX would wait for an interrupted candidate of this process
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code if isinstance(end.code, int) else 1)
        raise


def _devnull() -> TextIO:
    return os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


def _print_version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def program(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Search, inspect and export the tile schedules of JAX Pallas kernels."""
