"""The commands `extract` and `shards`: list the problems of a function, and of one device of a mesh."""

from __future__ import annotations

import contextlib
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scheduler.cli.arguments import AsJson, Fields, HardwareName, OperationName, problem_of, usage_errors
from scheduler.cli.mesh_arguments import MeshName, letters_of, mesh_of, specs_of
from scheduler.cli.terminal import Json, console_beside, console_here, print_json, say
from scheduler.core import codec, frames, hints
from scheduler.core.errors import SchedulerError
from scheduler.core.text import mesh_text

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from scheduler.inspect.shards import Way
    from search_spaces.operation import Operation


def extract(
    function: Annotated[str, typer.Argument(help="package.module:NAME or file.py:NAME; imported and traced.")],
    arrays: Annotated[
        list[str] | None,
        typer.Argument(help="Shapes of its arguments, if it has any: bfloat16[4096,512], bf16[4096@data,512]."),
    ] = None,
    mesh: MeshName = None,
    optimized: Annotated[
        bool, typer.Option("--optimize", help="The job also has what scheduler.optimize replaces.")
    ] = False,
    hardware: HardwareName = None,
    as_json: AsJson = False,
) -> None:
    """Write the tuned calls of a function as a job for `tune --job`, and list what scheduler.optimize would replace.

    The job goes to standard output, everything else to standard error. --mesh simulates devices on the CPU; the
    problems are those of one device.
    """
    from scheduler.functions import named
    from scheduler.functions.optimize import optimize
    from scheduler.functions.problems import problems, to_json

    with usage_errors():
        over = _mesh(mesh)
        fn, given = named.function(function, arrays or (), over)
        chip = _target_context(hardware)
    with _context_mesh(over), chip, untraceable(function):
        found = problems(optimize(fn) if optimized else fn, *given)
    if as_json:
        print_json(to_json(found))
        return
    say(repr(found))
    if found.tuned:
        sys.stdout.write(found.job())


def _mesh(text: str | None) -> Mesh | None:
    if text is None:
        return None
    from scheduler.functions.problems import fake_mesh

    return fake_mesh(mesh_of(text))


def _context_mesh(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """Sets `mesh` as the context mesh, for sharding constraints in the function that do not name a mesh."""
    if mesh is None:
        return contextlib.nullcontext()
    import jax

    return jax.set_mesh(mesh)


def _target_context(name: str | None) -> contextlib.AbstractContextManager[Any]:
    if name is None:
        return contextlib.nullcontext()
    from scheduler.core import hardware
    from scheduler.dispatch import calls

    return calls.target(hardware.find(name).kind)


@contextlib.contextmanager
def untraceable(name: str) -> Iterator[None]:
    """Converts an error of a user's function, such as wrong shapes in a call, to a sentence with the user's line."""
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        if isinstance(error, SchedulerError):
            raise
        line = next((call for call in frames.calls(error) if call.owner == "user"), None)
        where = f"{name} cannot be traced"
        if line is not None:
            where = f"{line.file}:{line.line}, in {line.function}: {type(error).__name__}"
        raise SchedulerError(f"{where}: {str(error).partition(chr(10))[0]}") from error


# ------------------------------------------------------------------------------
# The command `shards`: shows a problem sharded over the devices of a mesh, as the problems of one device.


def shards_command(
    operation: OperationName,
    fields: Fields,
    mesh: Annotated[str, typer.Option(help="The mesh: its axes and their extents, data=2,model=4.")],
    divide: Annotated[
        list[str] | None,
        typer.Option(help="A letter and the mesh axes that shard it: m=data, or m=data,model. Repeatable."),
    ] = None,
    in_specs: Annotated[
        str | None, typer.Option(help="Or a partition spec per operand: \"P('data', None), P(None, 'model')\".")
    ] = None,
    out_specs: Annotated[
        str | None, typer.Option(help="A partition spec per result. By default it follows from the operands.")
    ] = None,
    as_job: Annotated[bool, typer.Option("--job", help="Write the problems as a job for `tune --job`.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the problem on each device of a mesh for the usual shardings of a problem, or for a given sharding.

    No device is needed. With --job the job goes to standard output, everything else to standard error.
    """
    from scheduler.inspect import shards as ways

    with usage_errors():
        op, problem = problem_of(operation, fields)
        over, letters = mesh_of(mesh), letters_of(divide or ())
        if letters and (in_specs or out_specs):
            raise ValueError("--divide excludes --in-specs and --out-specs: it determines both")
        sharding = ways.sharding_of(op, problem)
        if letters:
            found = [ways.by_letters(sharding, problem, over, letters)]
        elif in_specs or out_specs:
            found = [ways.by_specs(sharding, problem, over, specs_of(in_specs or ""), specs_of(out_specs or ""))]
        else:
            found = ways.usual_ways(sharding, problem, over)
    if as_json:
        print_json(shards_json(op, found))
        return
    title = f"{op.name} {problem} over {mesh_text(over)}"
    console, to = (console_beside(), sys.stderr) if as_job else (console_here(), sys.stdout)
    print(f"{title}; {sharding.rule}\n", file=to)
    for line in shards_lines(op, found, console.width):
        print(line, file=to)
    if whole := ways.whole(sharding):
        print(f"Replicated on each device: {', '.join(whole)}.", file=to)
    if as_job:
        sys.stdout.write(shards_job(op, found, f"The problems of each device for {title}"))


# ------------------------------------------------------------------------------
# Output of `shards`: for each sharding of a problem, the problem of one device, the sums, and the gathered arrays.


def shards_lines(operation: Operation[Any], ways: Sequence[Way], width: int) -> Iterator[str]:
    """Yields the lines of each sharding, folded to `width`. Commands are not folded, so that they can be copied."""
    for way in ways:
        operands, results = (", ".join(specs) for specs in _specs(way))
        yield from textwrap.wrap(f"{way.description}: {operands} -> {results}", width, subsequent_indent="  ")
        for line in _way_lines(way):
            yield from textwrap.wrap(line, width, initial_indent="  ", subsequent_indent="    ")
        yield f"  {hints.tune(operation, way.divided.problem)}"
        yield ""


def _way_lines(way: Way) -> Iterator[str]:
    divided = way.divided
    yield f"each device: {divided.problem}"
    if axes := _summed(way):
        rest = "" if divided.problem == divided.local else "; the epilogue is a separate pass after the sum"
        scattered = " and scattered" if divided.scatters else ""
        yield f"results are summed over {', '.join(axes)}{scattered}{rest}"
    yield from (f"gathered: {each}" for each in divided.gathered)


def _specs(way: Way) -> tuple[list[str], list[str]]:
    from scheduler.inspect import shards

    return [*map(shards.spec_text, way.divided.operands)], [*map(shards.spec_text, way.divided.results)]


def shards_json(operation: Operation[Any], ways: Sequence[Way]) -> list[Json]:
    return [
        {
            "divided": way.description,
            "operands": _specs(way)[0],
            "results": _specs(way)[1],
            "problem": codec.problem_to_json(way.divided.problem.canonical()),
            "sums": _summed(way),
            "gathered": list(way.divided.gathered),
            "command": hints.tune(operation, way.divided.problem),
        }
        for way in ways
    ]


def shards_job(operation: Operation[Any], ways: Sequence[Way], of: str) -> str:
    """Returns the distinct problems of one device as a job."""
    from scheduler.functions import problem_report
    from scheduler.functions.equations import ProblemCount

    problems = dict.fromkeys(way.divided.problem for way in ways)
    return problem_report.job_text([ProblemCount(operation, problem, 1, (), 0.0) for problem in problems], of)


def _summed(way: Way) -> list[str]:
    """Returns the mesh axes over which results are summed."""
    return list(dict.fromkeys(axis for axes in way.divided.sums for axis in axes))
