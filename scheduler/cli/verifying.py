"""The command `verify`: measures stored winners, a plan's kernels, or its whole function again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from scheduler.cli.arguments import (
    AsJson,
    Chips,
    CompileTimeout,
    Device,
    RunTimeout,
    Seed,
    field_texts,
    finite,
    has_fields,
    records_of,
    usage_errors,
    user_store,
)
from scheduler.cli.extracting import untraceable
from scheduler.cli.terminal import console_here, labelled, output, print_json, say
from scheduler.core.errors import SchedulerError
from scheduler.core.plan import Plan
from scheduler.core.text import seconds_text


def verify(
    fields: Annotated[
        list[str] | None,
        typer.Argument(
            help="Only problems with these fields, as name=value; with --function, shapes of its arrays: f32[8,8]."
        ),
    ] = None,
    operation: Annotated[
        str | None, typer.Option(help="Only this operation: a name, package.module:NAME, or file.py:NAME.")
    ] = None,
    hardware: Chips = None,
    shipped: Annotated[bool, typer.Option("--shipped", help="Verify the records shipped with this package.")] = False,
    within: Annotated[
        float,
        typer.Option(min=0, callback=finite, help="Percent by which a winner may be slower than a rival."),
    ] = 3.0,
    update: Annotated[bool, typer.Option("--update", help="Store the new times and ranking.")] = False,
    device: Device = 0,
    compile_timeout: CompileTimeout = None,
    run_timeout: RunTimeout = None,
    seed: Seed = 0,
    plan: Annotated[Path | None, typer.Option(help="A plan's file, whose kernels to verify instead.")] = None,
    function: Annotated[
        str | None,
        typer.Option(help="With --plan: time this whole function under it, package.module:STEP or file.py:STEP."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time stored winners again against their rivals, and report those that are no longer valid, with exit status 1.

    Rivals are the other schedules of the record, including XLA's, and the model's choice. Only records of a chip of
    this host can be timed. The new times replace an imported record, which is then verified.
    """
    from scheduler.cli import search_report
    from scheduler.measure.runner import RunnerOptions
    from scheduler.search.reverify import reverify
    from scheduler.store.store import shipped as shipped_store
    from search_spaces import load

    with usage_errors():
        op = load(operation) if operation is not None else None
    options = RunnerOptions(device, None, compile_timeout, run_timeout)
    if function is not None and plan is None:
        raise typer.BadParameter("--function needs --plan")
    if plan is not None:
        if shipped or update or hardware or (fields and function is None):
            raise typer.BadParameter(
                "--plan verifies its whole file: omit fields and the options --shipped, --update and --hardware"
            )
        _verify_plan(plan, function, fields or [], within / 100, options, seed, as_json)
        return
    with usage_errors():
        wanted = field_texts(fields or [])
    user = user_store()
    store = shipped_store() if shipped else user
    stored = records_of(store, op.name if op else None, hardware) if store is not None else []
    records = [record for record in stored if has_fields(record, op, wanted)]
    if not records:
        raise SchedulerError(f"no such record is {'shipped' if shipped else f'in {user.location}'}")
    if update or any(record.imported for record in records):
        user.require_writable()
    verdicts, stored_count = [], 0
    for verdict in reverify(
        records,
        operation=op,
        options=options,
        within=within / 100,
        seed=seed,
    ):
        verdicts.append(verdict)
        say(f"{len(verdicts)}/{len(records)}: {verdict.record.key}: {verdict.state}")
        if verdict.refreshed is not None and (update or verdict.record.imported):
            user.put(verdict.refreshed)
            stored_count += 1
    verdicts.sort(key=lambda verdict: records.index(verdict.record))
    if as_json:
        print_json([search_report.reverified_json(verdict) for verdict in verdicts])
    else:
        output(*search_report.reverified(verdicts, console_here().width))
        if update or stored_count:
            output(f"{stored_count} records with today's times are stored in {user.location}")
    lost = sum(verdict.state in ("slower", "broken") for verdict in verdicts)
    if lost:
        raise SchedulerError(f"{lost} of {len(verdicts)} records are no longer valid; tune them again, or use --update")
    if all(verdict.state == "elsewhere" for verdict in verdicts):
        raise SchedulerError(f"none of {len(verdicts)} records could be timed: {verdicts[0].reason}")


def _verify_plan(
    file: Path, function: str | None, arrays: Sequence[str], within: float, options: Any, seed: int, as_json: bool
) -> None:
    """Verifies the plan in `file` by timing `function`, or only the plan's kernels if `function` is None."""
    plan = Plan.load(file)
    if function is not None:
        _verify_function(plan, function, arrays, as_json)
    else:
        _verify_kernels(plan, within, options, seed, as_json)


def _verify_function(plan: Plan, function: str, arrays: Sequence[str], as_json: bool) -> None:
    from scheduler.functions import named
    from scheduler.functions.plan import remeasure_plan

    with usage_errors():
        fn, args = named.to_time(function, arrays)
    with untraceable(function):
        found = remeasure_plan(plan, fn, args)
    margin = found.margin
    if as_json:
        print_json(
            {
                "plan": plan.digest,
                "plan_s": found.plan.median_s,
                "xla_s": found.xla.median_s,
                "rounds": found.plan.rounds,
                "gain": margin.middle,
                "gain_low": margin.low,
                "gain_high": margin.high,
                "wrong": found.wrong,
                "unplanned": found.unplanned,
            }
        )
    else:
        then = {str(figure.variant): seconds_text(figure.median_s) for figure in plan.figures}
        rows = [
            (
                label,
                f"{seconds_text(now.median_s)} +- {seconds_text(now.spread_s / 2)}, then {then.get(label, 'untimed')}",
            )
            for label, now in (("plan", found.plan), ("xla", found.xla))
        ]
        output(f"plan {plan.digest} of {plan.function}, a call:", labelled(rows))
        output(*found.unplanned)
        output(f"{1 + margin.middle:.3f}x as fast as XLA alone ({1 + margin.low:.3f} to {1 + margin.high:.3f})")
    if found.wrong:
        raise SchedulerError(f"the plan changes the results of the function: {found.wrong}")
    if margin.high < 0:
        raise SchedulerError("the function is faster without the plan: make it again with scheduler.tune_function")


def _verify_kernels(plan: Plan, within: float, options: Any, seed: int, as_json: bool) -> None:
    from scheduler.cli import search_report
    from scheduler.functions.plan import plan_records
    from scheduler.search.reverify import reverify

    records, verdicts = plan_records(plan), []
    for verdict in reverify(records, options=options, within=within, seed=seed):
        verdicts.append(verdict)
        say(f"{len(verdicts)}/{len(records)}: {verdict.record.key}: {verdict.state}")
    verdicts.sort(key=lambda verdict: records.index(verdict.record))
    if as_json:
        print_json([search_report.reverified_json(verdict) for verdict in verdicts])
    elif verdicts:
        output(*search_report.reverified(verdicts, console_here().width))
    libraries = len(plan.answers) - len(records)
    if libraries:
        say(f"{libraries} of {len(plan.answers)} answers of the plan use a library and need no verification")
    if lost := [verdict for verdict in verdicts if verdict.state != "holds"]:
        raise SchedulerError(
            f"{len(lost)} of {len(records)} kernels of the plan are invalid ({lost[0].record.key}: {lost[0].reason}); "
            "make it again with scheduler.tune_function"
        )
