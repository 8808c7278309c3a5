"""The command `extract`: writes the problems of a function as a job."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scheduler.cli.arguments import AsJson, HardwareName, usage_errors
from scheduler.cli.mesh_words import MeshName, mesh_of
from scheduler.cli.terminal import console_beside, print_json
from scheduler.core import frames
from scheduler.core.errors import SchedulerError

if TYPE_CHECKING:
    from jax.sharding import Mesh


def extract(
    function: Annotated[str, typer.Argument(help="package.module:NAME or file.py:NAME; it is imported and traced.")],
    arrays: Annotated[
        list[str] | None,
        typer.Argument(
            help="Shapes of its arrays: bfloat16[4096,512], bf16[4096@data,512]. Without any it takes none."
        ),
    ] = None,
    mesh: MeshName = None,
    hardware: HardwareName = None,
    as_json: AsJson = False,
) -> None:
    """Write the tuned problems of a function as a job for `tune --job`; say what is not tuned and could be.

    The job goes to standard output, everything else to standard error. With --mesh devices are made up on the CPU, and
    the problems are those of one of them.
    """
    from scheduler.functions import named
    from scheduler.functions.problems import problems

    with usage_errors():
        over = _mesh(mesh)
        fn, given = named.function(function, arrays or (), over)
        chip = _chip(hardware)
    with _set(over), chip, _untraceable(function):
        found = problems(fn, *given)
    if as_json:
        from scheduler.functions.as_json import to_json

        print_json(to_json(found))
        return
    from scheduler.cli import extract_report

    console = console_beside()
    for one in extract_report.lines(found):
        console.print(one, markup=False)
    if found.tuned:
        sys.stdout.write(found.job())


def _mesh(text: str | None) -> Mesh | None:
    if text is None:
        return None
    from scheduler.functions import made_up

    return made_up.mesh(mesh_of(text))


def _set(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """Sets `mesh` as the context mesh, for sharding constraints in the function that do not name a mesh."""
    if mesh is None:
        return contextlib.nullcontext()
    import jax

    return jax.set_mesh(mesh)


def _chip(name: str | None) -> contextlib.AbstractContextManager[Any]:
    if name is None:
        return contextlib.nullcontext()
    from scheduler.core import hardware
    from scheduler.dispatch import calls

    return calls.target(hardware.find(name).kind)


@contextlib.contextmanager
def _untraceable(name: str) -> Iterator[None]:
    """Converts JAX's TypeError about the function as a whole to one sentence.

    Errors raised by a line of user code are not converted. They are reported with that line.
    """
    try:
        yield
    except TypeError as error:
        if any(call.owner == "user" for call in frames.calls(error)):
            raise
        raise SchedulerError(f"{name} cannot be traced: {str(error).partition(chr(10))[0]}") from error
