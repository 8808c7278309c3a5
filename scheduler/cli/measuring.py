"""Commands that measure: tune, sweep, calibrate, verify."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scheduler.cli.arguments import (
    AsJson,
    Chips,
    CompileTimeout,
    Device,
    HardwareName,
    OperationName,
    Own,
    Part,
    RunTimeout,
    field_texts,
    hardware_here,
    has_fields,
    problem_of,
    read_text,
    usage_errors,
)
from scheduler.cli.stores import ask_stores, no_store, records_of, user_store
from scheduler.cli.terminal import console_here, output, print_json, say, shown_progress
from scheduler.core.errors import SchedulerError, StoreError

if TYPE_CHECKING:
    from scheduler.search.jobs import Result
    from scheduler.store.store import Store


def tune(
    operation: Annotated[
        str | None, typer.Argument(help="A name (matmul), package.module:NAME, or file.py:NAME.")
    ] = None,
    fields: Annotated[list[str] | None, typer.Argument(help="The problem, as name=value.")] = None,
    job: Annotated[Path | None, typer.Option(help="A TOML file with a list of problems, in place of one.")] = None,
    budget: Annotated[int | None, typer.Option(min=1, help="Trials.  [default: 64]")] = None,
    seconds: Annotated[float | None, typer.Option(min=0.001, help="Propose no trial after so many seconds.")] = None,
    backends: Annotated[
        str | None, typer.Option(help="Kernels to try beside XLA: names with commas, or pallas.")
    ] = None,
    device: Device = 0,
    seed: Annotated[int, typer.Option(help="Of the search.")] = 0,
    replay: Annotated[Path | None, typer.Option(help="Search a recorded sweep; no device is needed.")] = None,
    keep: Annotated[bool, typer.Option("--store", help="Keep what a recorded sweep gave in the cache.")] = False,
    l2: Annotated[
        str, typer.Option(help="Where candidates find operands: cold (in memory) or warm (in the cache).")
    ] = "cold",
    force: Annotated[bool, typer.Option("--force", help="Also what is tuned already.")] = False,
    first_error: Annotated[
        bool, typer.Option("--first-error", help="Stop at the first schedule that fails, with its traceback.")
    ] = False,
    part: Part = None,
    own: Own = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Processes to measure in, on a CPU too.  [default: one per core; on a CPU none]"),
    ] = None,
    compile_timeout: CompileTimeout = None,
    run_timeout: RunTimeout = None,
    as_json: AsJson = False,
) -> None:
    """Search the schedules of a problem, or of every problem of a job, by timing them on the device."""
    if (operation is None and replay is None) == (job is None):
        raise typer.BadParameter("name either an operation with its fields, or a job: --job job.toml")
    if keep and replay is None:
        raise typer.BadParameter("--store goes with --replay: what is measured here is stored in any case")
    if job is not None and (budget, seconds, backends) != (None, None, None):
        raise typer.BadParameter("budget, seconds and backends of a job are written in its file")
    from scheduler.measure.replay import Replay
    from scheduler.measure.runner import RunnerOptions
    from scheduler.search import jobs
    from search_spaces import load_known

    if part is not None and job is None:
        raise typer.BadParameter("--part is of a job")
    if l2 not in ("cold", "warm"):
        raise typer.BadParameter(f"--l2 is cold or warm, not {l2}")
    recording = None if replay is None else Replay(replay)
    with usage_errors():
        if job is not None:
            tasks = jobs.part(jobs.parse(read_text(job), own=own or ()), part or "1/1")
        else:
            if recording is not None:
                operation = operation or load_known(recording.sweep.operation).name
                fields = fields or [f"{name}={value}" for name, value in recording.fields.items()]
            op, problem = problem_of(str(operation), fields or [])
            tasks = [jobs.Task(op, problem, budget or jobs.BUDGET, seconds, jobs.parse_backends(op, backends))]
    store = user_store() if recording is None or keep else no_store()
    results: list[Result] = []
    try:
        with shown_progress() as progress:
            for result in jobs.run(
                tasks,
                store=store,
                runner=recording,
                options=RunnerOptions(device, workers, compile_timeout, run_timeout),
                seed=seed,
                l2="warm" if l2 == "warm" else "cold",
                force=force,
                first_error=first_error,
                progress=progress,
            ):
                results.append(result)
    finally:
        if job is not None and results:
            _print_job(results, store, as_json)
    if job is None:
        _print_tuned(results[0], store, as_json)
    failed = sum(result.state == "failed" for result in results)
    if failed and job is not None:
        raise SchedulerError(f"{failed} of {len(results)} problems failed; each row says why")
    if broken := [f"{result.task}: {lost}" for result in results for lost in result.broken]:
        raise SchedulerError("; ".join(broken))
    unstored = ", ".join(str(result.task) for result in results if not result.stored)
    if unstored:
        raise SchedulerError(f"what was found could not be stored in {store.location}: {unstored}")


def sweep(
    out: Annotated[Path, typer.Option(help="The file to write (.jsonl.gz), or the directory for the files of a job.")],
    operation: Annotated[
        str | None, typer.Argument(help="A name (matmul), package.module:NAME, or file.py:NAME.")
    ] = None,
    fields: Annotated[list[str] | None, typer.Argument(help="The problem, as name=value.")] = None,
    job: Annotated[Path | None, typer.Option(help="A TOML file with a list of problems, in place of one.")] = None,
    sample: Annotated[
        int | None, typer.Option(min=1, help="So many schedules, drawn at random.  [default: all]")
    ] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Of each measurement.")] = 5,
    again: Annotated[
        int, typer.Option(min=0, help="So many of the fastest are measured once more at the end, in turns.")
    ] = 20,
    seed: Annotated[int, typer.Option(help="Of the sample and of the order.")] = 0,
    backends: Annotated[
        str | None, typer.Option(help="Kernels to sweep beside XLA: names with commas, or pallas.")
    ] = None,
    device: Device = 0,
    part: Part = None,
    own: Own = None,
    compile_timeout: CompileTimeout = None,
    run_timeout: RunTimeout = None,
) -> None:
    """Measure every legal schedule of a problem, or a sample, into a file that `tune --replay` searches anywhere.

    A sweep that is killed goes on when the same command is given again.
    """
    if (operation is None) == (job is None):
        raise typer.BadParameter("name either an operation with its fields, or a job: --job job.toml")
    if part is not None and job is None:
        raise typer.BadParameter("--part is of a job")
    if job is not None and backends is not None:
        raise typer.BadParameter("backends of a job are written in its file")
    from scheduler.cli import search_report
    from scheduler.measure.pool import start_runner
    from scheduler.measure.runner import RunnerOptions
    from scheduler.search import jobs
    from scheduler.search import sweep as sweeps

    with usage_errors():
        if job is not None:
            tasks = jobs.part(jobs.parse(read_text(job), own=own or ()), part or "1/1")
        else:
            op, problem = problem_of(str(operation), fields or [])
            tasks = [jobs.Task(op, problem, backends=jobs.parse_backends(op, backends))]
    failed = 0
    with contextlib.ExitStack() as stack:
        runner = None
        for task in tasks:
            if isinstance(task, jobs.Malformed):
                say(f"{task}: {task.reason}")
                failed += 1
                continue
            if runner is None:
                runner = start_runner(task.operation, RunnerOptions(device, None, compile_timeout, run_timeout))
                stack.callback(runner.close)
            path = out if job is None else out / sweeps.file_name(task.operation, task.problem)
            with shown_progress() as progress:
                head, trials = sweeps.sweep(
                    task.operation,
                    task.problem,
                    path,
                    runner,
                    backends=task.backends,
                    sample=sample,
                    seed=seed,
                    repetitions=repetitions,
                    again=again,
                    progress=functools.partial(progress, task),
                )
            output(
                *search_report.sweep_lines(head, trials), f"Written to {path} ({path.stat().st_size / 1000:.0f} kB)", ""
            )
    if failed:
        raise SchedulerError(f"{failed} of {len(tasks)} problems of the job cannot be read")


def calibrate(
    operation: OperationName,
    recordings: Annotated[list[Path] | None, typer.Argument(help="Recorded sweeps of it, all of one chip.")] = None,
    hardware: HardwareName = None,
    device: Device = 0,
    ship: Annotated[
        Path | None, typer.Option(help="Write to this directory of records, in place of the cache.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Fit the cost model's constants to what was measured on a chip: recorded sweeps, stored trials and records.

    Later predictions there use them; what is stored already is not touched.
    """
    from scheduler.cli import search_report
    from scheduler.core import hardware as chips
    from scheduler.model.calibration import calibrate as fit
    from scheduler.search import dataset
    from scheduler.store import text_files
    from search_spaces import load

    with usage_errors():
        op = load(operation)
        chip = chips.find(hardware) if hardware is not None else None
    if ship is None:
        user_store().require_writable()
    sweeps = [dataset.recorded(op, path) for path in recordings or []]
    chip = chip or (sweeps[0].hardware if sweeps else hardware_here(device))
    kept = [found for _, found in ask_stores(lambda store: dataset.stored(op, chip, store))]
    found = dataset.merged([*sweeps, *kept])
    fitted = fit(op, found.hardware, found.trials, found.environments)
    if ship is not None:
        where = ", ".join(map(str, text_files.add_calibrations(ship, fitted)))
    else:
        store = user_store()
        for calibration in fitted:
            store.put_calibration(calibration)
        where = store.location
    if as_json:
        print_json([search_report.calibration_json(calibration) for calibration in fitted])
        return
    output(f"{op.name} on {chip.id}", "", search_report.calibrations_table(fitted))
    output(f"Written to {where}" if ship is not None else f"Stored in {where}")


def verify(
    fields: Annotated[list[str] | None, typer.Argument(help="Only problems with these fields, as name=value.")] = None,
    operation: Annotated[
        str | None, typer.Option(help="Only this operation: a name, package.module:NAME, or file.py:NAME.")
    ] = None,
    hardware: Chips = None,
    shipped: Annotated[bool, typer.Option("--shipped", help="The records shipped with this package.")] = False,
    within: Annotated[float, typer.Option(min=0, help="By how many percent a winner may be behind.")] = 3.0,
    update: Annotated[bool, typer.Option("--update", help="Store today's times and order.")] = False,
    device: Device = 0,
    compile_timeout: CompileTimeout = None,
    run_timeout: RunTimeout = None,
    seed: Annotated[int, typer.Option(help="Of the order of timing.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Time stored winners again beside their rivals, and say which no longer hold: then the status is 1.

    Rivals are the other schedules of the record, XLA's among them, and the model's choice. Only records of the chip
    that is here can be timed.
    """
    from scheduler.cli import search_report
    from scheduler.measure.runner import RunnerOptions
    from scheduler.search.reverify import reverify
    from scheduler.store.store import shipped as shipped_store
    from search_spaces import load

    with usage_errors():
        op = load(operation) if operation is not None else None
        wanted = field_texts(fields or [])
    user = user_store()
    if update:
        user.require_writable()
    store = shipped_store() if shipped else user
    stored = records_of(store, op.name if op else None, hardware) if store is not None else []
    records = [record for record in stored if has_fields(record, op, wanted)]
    if not records:
        raise SchedulerError(f"nothing of that is {'shipped' if shipped else f'in {user.location}'}")
    verdicts = []
    for verdict in reverify(
        records,
        operation=op,
        options=RunnerOptions(device, None, compile_timeout, run_timeout),
        within=within / 100,
        seed=seed,
    ):
        verdicts.append(verdict)
        say(f"{len(verdicts)}/{len(records)}: {verdict.record.key}: {verdict.state}")
        if update and verdict.refreshed is not None:
            user.put(verdict.refreshed)
    if as_json:
        print_json([search_report.reverified_json(verdict) for verdict in verdicts])
    else:
        output(*search_report.reverified(verdicts, console_here().width))
        if update:
            renewed = sum(verdict.refreshed is not None for verdict in verdicts)
            output(f"{renewed} records with today's times are stored in {user.location}")
    lost = sum(verdict.state in ("slower", "broken") for verdict in verdicts)
    if lost:
        raise SchedulerError(
            f"{lost} of {len(verdicts)} records no longer hold; tune them again, or store with --update"
        )
    if all(verdict.state == "elsewhere" for verdict in verdicts):
        raise SchedulerError(f"none of {len(verdicts)} records could be timed: {verdicts[0].reason}")


def _print_tuned(result: Result, store: Store, as_json: bool) -> None:
    from scheduler.cli import record_report, search_report
    from scheduler.inspect import verdict

    if result.record is None:
        raise SchedulerError(result.reason)
    if as_json:
        print_json({**search_report.result_json(result), "cache": store.location})
        return
    record, problem = result.record, getattr(result.task, "problem", None)
    output(f"{result.task} on {record.key.hardware}")
    if result.state == "known":
        output(f"Already tuned on {record.environment.date[:10]}, and it still holds; --force tunes it again.", "")
    else:
        if result.reason:
            output(f"Tuned again: {result.reason}.")
        earlier = f" ({result.resumed} of them made before, in a run that was cut short)" if result.resumed else ""
        output(f"{record.tried} trials{earlier} of {record.space} schedules in {result.elapsed_s:.1f} s.", "")
    output(*record_report.entries(record, problem, result.hardware), "", *verdict.verdict(record))
    with contextlib.suppress(StoreError):  # a warning has said what could not be stored
        output(*search_report.failed_beside(store.last_trials(record.key), record))
    if result.stored:
        output("Nothing is stored of a replay without --store" if store.in_memory else f"Stored in {store.location}")


def _print_job(results: Sequence[Result], store: Store, as_json: bool) -> None:
    from scheduler.cli import search_report

    if as_json:
        print_json({"results": [search_report.result_json(result) for result in results], "cache": store.location})
    else:
        output(*search_report.results(results, console_here().width))
        if all(result.stored for result in results):
            output(f"Stored in {store.location}")
