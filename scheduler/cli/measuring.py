"""Commands that measure schedules again, or all of them, and fit the cost model: `sweep`, `calibrate`, `verify`."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scheduler.cli import arguments
from scheduler.cli.terminal import console_here, output, print_json, say
from scheduler.core.arguments import MOST
from scheduler.core.errors import SchedulerError
from scheduler.core.records import Failure
from scheduler.core.status_line import SearchStatus
from scheduler.core.text import seconds_text

if TYPE_CHECKING:
    from scheduler.core.records import Calibration, Outcome
    from search_spaces.problem import Problem


def sweep(
    out: Annotated[Path, typer.Option(help="The file to write (.jsonl.gz), or the directory for the files of a job.")],
    operation: arguments.OptionalOperation = None,
    fields: arguments.OptionalFields = None,
    job: arguments.JobFile = None,
    sample: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Number of schedules, drawn at random.  [default: all]")
    ] = None,
    repetitions: Annotated[int, typer.Option(min=1, max=MOST, help="Repetitions of each measurement.")] = 5,
    again: Annotated[
        int, typer.Option(min=0, max=MOST, help="Number of fastest schedules to measure again at the end, interleaved.")
    ] = 20,
    seed: arguments.Seed = 0,
    backends: arguments.Backends = None,
    device: arguments.Device = 0,
    part: arguments.Part = "1/1",
    own: arguments.Own = None,
    compile_timeout: arguments.CompileTimeout = None,
    run_timeout: arguments.RunTimeout = None,
) -> None:
    """Measure every legal schedule of a problem, or a sample, and write a file that `replay` searches anywhere.

    The same command resumes an interrupted sweep.
    """
    arguments.reject(
        {
            "give either an operation with its fields, or a job: --job job.toml": (operation is None) == (job is None),
            "--part needs --job": part != "1/1" and job is None,
            "set backends of a job in its file": job is not None and backends is not None,
        }
    )
    from scheduler.cli import record_report
    from scheduler.measure.pool import start_runner
    from scheduler.measure.runner import RunnerOptions
    from scheduler.search import jobs
    from scheduler.search import sweep as sweeps
    from scheduler.search.task import SearchOptions, Task

    with arguments.usage_errors():
        if job is not None:
            tasks = jobs.part(jobs.parse(arguments.read_text(job), own=own or ()), part)
        else:
            op, problem = arguments.problem_of(str(operation), fields or [])
            tasks = [Task(op, problem, SearchOptions(backends=jobs.parse_backends(op, backends)))]
    if job is None:
        arguments.require_writable(out)
    else:
        arguments.require_directory(out)
    failed = 0
    with contextlib.ExitStack() as stack:
        runner = None
        for task in tasks:
            if not isinstance(task, Task):
                say(f"{task}: {task.reason}")
                failed += 1
                continue
            if runner is None:
                runner = start_runner(task.operation, RunnerOptions(device, None, compile_timeout, run_timeout))
                stack.callback(runner.close)
            path = out if job is None else out / sweeps.file_name(task.operation, task.problem)
            status = SearchStatus()
            with status.shown(str(task)):
                head, trials = sweeps.sweep(
                    task.operation,
                    task.problem,
                    path,
                    runner,
                    backends=task.options.backends,
                    sample=sample,
                    seed=seed,
                    repetitions=repetitions,
                    again=again,
                    progress=status.search,
                )
            output(
                *record_report.sweep_lines(head, trials), f"Written to {path} ({path.stat().st_size / 1000:.0f} kB)", ""
            )
    if failed:
        raise SchedulerError(f"{failed} of {len(tasks)} problems of the job cannot be read")


def calibrate(
    operation: arguments.OptionalOperation = None,
    recordings: Annotated[list[Path] | None, typer.Argument(help="Recorded sweeps, all of one chip.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Instead, measure XLA on a few products on this chip, in a minute.")
    ] = False,
    hardware: arguments.HardwareName = None,
    device: arguments.Device = 0,
    ship: Annotated[Path | None, typer.Option(help="Write to this directory of records instead of the cache.")] = None,
    as_json: arguments.AsJson = False,
) -> None:
    """Fit the cost model's constants to measurements on a chip: recorded sweeps, stored trials and records.

    Later predictions for this chip use them. Stored records do not change.
    """
    arguments.reject(
        {
            "give either an operation, or --quick": (operation is None) != quick,
            "--quick measures the chip of this host: omit --hardware": quick and hardware is not None,
        }
    )
    from scheduler.cli import record_report
    from scheduler.core import hardware as chips
    from scheduler.model.calibration import calibrate as fit
    from scheduler.search.sweep import merged_measurements, recorded_measurements, stored_measurements
    from scheduler.store import text_files
    from search_spaces import load

    if ship is None:
        arguments.user_store().require_writable()
    if operation is None:
        fitted = [_quick(device)]
    else:
        with arguments.usage_errors():
            op = load(operation)
            chip = chips.find(hardware) if hardware is not None else None
        sweeps = [recorded_measurements(op, path) for path in recordings or []]
        chip = chip or (sweeps[0].hardware if sweeps else arguments.hardware_here(device))
        kept = [found for _, found in arguments.ask_stores(lambda store: stored_measurements(op, chip, store))]
        found = merged_measurements([*sweeps, *kept])
        fitted = fit(op, found.hardware, found.trials, found.environments)
    if ship is not None:
        where = ", ".join(map(str, text_files.add_calibrations(ship, fitted)))
    else:
        store = arguments.user_store()
        for calibration in fitted:
            store.put_calibration(calibration)
        where = store.location
    if as_json:
        print_json([dataclasses.asdict(calibration) for calibration in fitted])
        return
    output(f"{fitted[0].operation} on {fitted[0].hardware}", "", record_report.calibrations_table(fitted))
    output(f"Written to {where}" if ship is not None else f"Stored in {where}")


def _quick(device: int) -> Calibration:
    """Measures the constants of the library on the chip of this host, and says which ones change."""
    from scheduler.measure.pool import open_runner
    from scheduler.measure.runner import RunnerOptions
    from scheduler.search import quick

    def progress(problem: Problem, outcome: Outcome) -> None:
        say(f"{problem}: {outcome if isinstance(outcome, Failure) else seconds_text(outcome.median_s)}")

    with contextlib.closing(open_runner(RunnerOptions(device))) as runner:
        calibration, changes = quick.measured(runner, progress)
    for name, (before, after) in changes.items():
        say(f"{name}: {before:.3g} before, now {after:.3g}")
    return calibration


def verify(
    fields: Annotated[list[str] | None, typer.Argument(help="Only problems with these fields, as name=value.")] = None,
    operation: arguments.OnlyOperation = None,
    hardware: arguments.Chips = None,
    shipped: Annotated[bool, typer.Option("--shipped", help="Verify the records shipped with this package.")] = False,
    within: Annotated[
        float,
        typer.Option(min=0, callback=arguments.finite, help="Percent by which a winner may be slower than a rival."),
    ] = 3.0,
    update: Annotated[bool, typer.Option("--update", help="Store the new times and ranking.")] = False,
    device: arguments.Device = 0,
    compile_timeout: arguments.CompileTimeout = None,
    run_timeout: arguments.RunTimeout = None,
    seed: arguments.Seed = 0,
    as_json: arguments.AsJson = False,
) -> None:
    """Time stored winners again against their rivals, and report those that are no longer valid, with exit status 1.

    Rivals are the other schedules of the record, including XLA's, and the model's choice. Only records of a chip of
    this host can be timed. The new times replace an imported record, which is then verified.
    """
    from scheduler.cli import record_report
    from scheduler.measure.runner import RunnerOptions
    from scheduler.search.reverify import reverify
    from scheduler.store.store import shipped as shipped_store
    from search_spaces import load

    options = RunnerOptions(device, None, compile_timeout, run_timeout)
    with arguments.usage_errors():
        op = load(operation) if operation is not None else None
        wanted = arguments.field_texts(fields or [])
    user = arguments.user_store()
    store = shipped_store() if shipped else user
    stored = arguments.records_of(store, op.name if op else None, hardware) if store is not None else []
    records = [record for record in stored if arguments.has_fields(record, op, wanted)]
    if not records:
        raise SchedulerError(f"no such record is {'shipped' if shipped else f'in {user.location}'}")
    if update or any(record.imported for record in records):
        user.require_writable()
    verdicts, stored_count = [], 0
    for verdict in reverify(records, operation=op, options=options, within=within / 100, seed=seed):
        verdicts.append(verdict)
        say(f"{len(verdicts)}/{len(records)}: {verdict.record.key}: {verdict.state}")
        if verdict.refreshed is not None and (update or verdict.record.imported):
            user.put(verdict.refreshed)
            stored_count += 1
    verdicts.sort(key=lambda verdict: records.index(verdict.record))
    if as_json:
        print_json([record_report.reverified_json(verdict) for verdict in verdicts])
    else:
        output(*record_report.reverified(verdicts, console_here().width))
        if update or stored_count:
            output(f"{stored_count} records with today's times are stored in {user.location}")
    lost = sum(verdict.state in ("slower", "broken") for verdict in verdicts)
    if lost:
        raise SchedulerError(f"{lost} of {len(verdicts)} records are no longer valid; tune them again, or use --update")
    if all(verdict.state == "elsewhere" for verdict in verdicts):
        raise SchedulerError(f"none of {len(verdicts)} records could be timed: {verdicts[0].reason}")
