"""The commands `extract` and `shards`: list the problems of a function, and of one device of a mesh."""

from __future__ import annotations

import ast
import contextlib
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scheduler.cli.arguments import AsJson, Fields, HardwareName, OperationName, problem_of, usage_errors
from scheduler.cli.terminal import Json, console_beside, console_here, print_json, say
from scheduler.core import codec, frames, hints
from scheduler.core.errors import SchedulerError
from scheduler.core.text import mesh_text

if TYPE_CHECKING:
    from scheduler.inspect.shards import Way
    from search_spaces.operation import Operation


def extract(
    function: Annotated[str, typer.Argument(help="package.module:NAME or file.py:NAME; imported and traced.")],
    arrays: Annotated[
        list[str] | None,
        typer.Argument(help="Shapes of its arguments, if it has any: bfloat16[4096,512], bf16[4096@data,512]."),
    ] = None,
    mesh: Annotated[str | None, typer.Option(help="A mesh: its axes and their extents, data=2,model=4.")] = None,
    optimized: Annotated[
        bool, typer.Option("--optimize", help="The job also has what scheduler.optimize replaces.")
    ] = False,
    hardware: HardwareName = None,
    as_json: AsJson = False,
) -> None:
    """Write the tuned calls of a function as a job for `tune-job`, and list what scheduler.optimize would replace.

    The job goes to standard output, everything else to standard error. --mesh simulates devices on the CPU; the
    problems are those of one device.
    """
    import jax

    from scheduler.core.hardware import find
    from scheduler.dispatch import calls
    from scheduler.rewriting import named
    from scheduler.rewriting.optimize import optimize
    from scheduler.rewriting.problems import fake_mesh, problems, to_json

    with contextlib.ExitStack() as contexts:
        with usage_errors():
            over = None if mesh is None else fake_mesh(mesh_of(mesh))
            fn, given = named.function(function, arrays or (), over)
            if hardware is not None:
                contexts.enter_context(calls.target(find(hardware).kind))
        if over is not None:  # for sharding constraints in the function that do not name a mesh
            contexts.enter_context(jax.set_mesh(over))
        contexts.enter_context(untraceable(function))
        found = problems(optimize(fn) if optimized else fn, *given)
    if as_json:
        print_json(to_json(found))
        return
    say(repr(found))
    if found.tuned:
        sys.stdout.write(found.job())


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
    as_job: Annotated[bool, typer.Option("--job", help="Write the problems as a job for `tune-job`.")] = False,
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
    for way, row in zip(ways, shards_json(operation, ways), strict=True):
        operands, results = ", ".join(row["operands"]), ", ".join(row["results"])
        lines = [f"each device: {way.divided.problem}"]
        if row["sums"]:
            rest = "" if way.divided.problem == way.divided.local else "; the epilogue is a separate pass after the sum"
            scattered = " and scattered" if way.divided.scatters else ""
            lines.append(f"results are summed over {', '.join(row['sums'])}{scattered}{rest}")
        lines += [f"gathered: {each}" for each in row["gathered"]]
        yield from textwrap.wrap(f"{way.description}: {operands} -> {results}", width, subsequent_indent="  ")
        for line in lines:
            yield from textwrap.wrap(line, width, initial_indent="  ", subsequent_indent="    ")
        yield f"  {row['command']}"
        yield ""


def shards_json(operation: Operation[Any], ways: Sequence[Way]) -> list[Json]:
    from scheduler.inspect.shards import spec_text

    return [
        {
            "divided": way.description,
            "operands": [*map(spec_text, way.divided.operands)],
            "results": [*map(spec_text, way.divided.results)],
            "problem": codec.problem_to_json(way.divided.problem.canonical()),
            "sums": list(dict.fromkeys(axis for axes in way.divided.sums for axis in axes)),
            "gathered": list(way.divided.gathered),
            "command": hints.tune(operation, way.divided.problem),
        }
        for way in ways
    ]


def shards_job(operation: Operation[Any], ways: Sequence[Way], of: str) -> str:
    """Returns the distinct problems of one device as a job."""
    from scheduler.rewriting.equations import ProblemCount
    from scheduler.rewriting.problems import job_text

    problems = dict.fromkeys(way.divided.problem for way in ways)
    return job_text([ProblemCount(operation, problem, 1, (), 0.0) for problem in problems], of)


# ------------------------------------------------------------------------------
# Parsers of meshes and partition specs.

# For each axis of an array in the spec, the mesh axes that shard it.
Spec = tuple[tuple[str, ...], ...]


def mesh_of(text: str) -> dict[str, int]:
    """Parses a mesh such as ``data=2,model=4``.

    Raises:
      ValueError: the text is not a mesh.
    """
    found: dict[str, int] = {}
    for each in text.split(","):
        name, _, extent = (part.strip() for part in each.partition("="))
        if not name.isidentifier() or not extent.isdecimal() or not int(extent):
            raise ValueError(f"expected a mesh such as data=2,model=4, found {text!r}")
        if name in found:
            raise ValueError(f"the mesh {text!r} has the axis {name} twice")
        found[name] = int(extent)
    return found


def letters_of(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Parses texts such as ``m=data`` or ``m=data,model`` to the mesh axes that shard each letter.

    Raises:
      ValueError: a text is malformed, or repeats a letter.
    """
    found: dict[str, tuple[str, ...]] = {}
    for text in texts:
        letter, _, axes = (part.strip() for part in text.partition("="))
        names = tuple(name.strip() for name in axes.split(","))
        if not letter or not all(names):
            raise ValueError(f"expected a letter and its mesh axes, as in m=data,model, found {text!r}")
        if letter in found:
            raise ValueError(f"{letter} is sharded twice")
        found[letter] = names
    return found


def specs_of(text: str) -> list[Spec]:
    """Parses partition specs such as ``P('data', None), P(None, ('x', 'y'))``; quotes around names are optional.

    Raises:
      ValueError: the text is not a list of partition specs.
    """
    try:
        (statement,) = ast.parse(f"[{text}]").body
        assert isinstance(statement, ast.Expr)
        assert isinstance(statement.value, ast.List)
        return [_spec(each) for each in statement.value.elts]
    except (SyntaxError, AssertionError, ValueError):
        raise ValueError(
            f"expected a partition spec per array, as in P('data', None), P(None, 'model'), found {text!r}"
        ) from None


def _spec(node: ast.expr) -> Spec:
    if not isinstance(node, ast.Call) or node.keywords or ast.unparse(node.func).split(".")[-1] not in _CALLED:
        raise ValueError
    return tuple(map(_axes, node.args))


_CALLED = ("P", "PartitionSpec")


def _axes(node: ast.expr) -> tuple[str, ...]:
    match node:
        case ast.Constant(value=None):
            return ()
        case ast.Name(id=name) | ast.Constant(value=str(name)):
            return (name,)
        case ast.Tuple(elts=several):
            return tuple(axis for each in several for axis in _axes(each))
    raise ValueError
