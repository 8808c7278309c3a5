"""The command `shards`: shows a problem sharded over the devices of a mesh, as the problems of one device."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from scheduler.cli.arguments import AsJson, Fields, OperationName, problem_of, usage_errors
from scheduler.cli.mesh_words import letters_of, mesh_of, mesh_text, specs_of
from scheduler.cli.terminal import console_beside, console_here, print_json


def shards(
    operation: OperationName,
    fields: Fields,
    mesh: Annotated[str, typer.Option(help="Names of its axes with their extents: data=2,model=4.")],
    divide: Annotated[
        list[str] | None,
        typer.Option(help="What is divided over which axes: m=data, or m=data,model. Repeatable."),
    ] = None,
    in_specs: Annotated[
        str | None, typer.Option(help="Or a spec of each operand: \"P('data', None), P(None, 'model')\".")
    ] = None,
    out_specs: Annotated[
        str | None, typer.Option(help="And of each result; without it, it lies as the operands make it.")
    ] = None,
    as_job: Annotated[bool, typer.Option("--job", help="Write what devices ask as a job for `tune --job`.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what each device of a mesh asks where a problem is divided: in the usual ways, or as it is said.

    No device is needed. With --job the job goes to standard output, everything else to standard error.
    """
    from scheduler.cli import shards_report
    from scheduler.inspect import shards as ways

    with usage_errors():
        op, problem = problem_of(operation, fields)
        over, letters = mesh_of(mesh), letters_of(divide or ())
        if letters and (in_specs or out_specs):
            raise ValueError("--divide says where operands and results lie: give either that or their specs")
        sharding = ways.sharding_of(op, problem)
        if letters:
            found = [ways.by_letters(sharding, problem, over, letters)]
        elif in_specs or out_specs:
            found = [ways.by_specs(sharding, problem, over, specs_of(in_specs or ""), specs_of(out_specs or ""))]
        else:
            found = ways.usual_ways(sharding, problem, over)
    if as_json:
        print_json(shards_report.to_json(op, found))
        return
    title = f"{op.name} {problem} over {mesh_text(over)}"
    console, to = (console_beside(), sys.stderr) if as_job else (console_here(), sys.stdout)
    print(f"{title}; {sharding.rule}\n", file=to)
    for line in shards_report.lines(op, found, console.width):
        print(line, file=to)
    if whole := ways.whole(sharding):
        print(f"Whole on each device: {', '.join(whole)}.", file=to)
    if as_job:
        sys.stdout.write(shards_report.job(op, found, f"What each device asks of {title}"))
