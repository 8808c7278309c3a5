"""Commands that measure schedules and fit the cost model to measurements: `sweep`, `calibrate`."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Annotated

import typer

from scheduler.cli.arguments import (
    AsJson,
    CompileTimeout,
    Device,
    HardwareName,
    OperationName,
    Own,
    Part,
    RunTimeout,
    Seed,
    ask_stores,
    hardware_here,
    problem_of,
    read_text,
    require_directory,
    require_writable,
    usage_errors,
    user_store,
)
from scheduler.cli.terminal import output, print_json, say, shown_progress
from scheduler.core.arguments import MOST
from scheduler.core.errors import SchedulerError


def sweep(
    out: Annotated[Path, typer.Option(help="The file to write (.jsonl.gz), or the directory for the files of a job.")],
    operation: Annotated[
        str | None, typer.Argument(help="A name (matmul), package.module:NAME, or file.py:NAME.")
    ] = None,
    fields: Annotated[list[str] | None, typer.Argument(help="The problem, as name=value.")] = None,
    job: Annotated[Path | None, typer.Option(help="A TOML file that lists problems to measure.")] = None,
    sample: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Number of schedules, drawn at random.  [default: all]")
    ] = None,
    repetitions: Annotated[int, typer.Option(min=1, max=MOST, help="Repetitions of each measurement.")] = 5,
    again: Annotated[
        int, typer.Option(min=0, max=MOST, help="Number of fastest schedules to measure again at the end, interleaved.")
    ] = 20,
    seed: Seed = 0,
    backends: Annotated[
        str | None, typer.Option(help="Kernels to sweep in addition to XLA: comma-separated names, or pallas.")
    ] = None,
    device: Device = 0,
    part: Part = None,
    own: Own = None,
    compile_timeout: CompileTimeout = None,
    run_timeout: RunTimeout = None,
) -> None:
    """Measure every legal schedule of a problem, or a sample, and write a file that `tune --replay` searches anywhere.

    The same command resumes an interrupted sweep.
    """
    if (operation is None) == (job is None):
        raise typer.BadParameter("give either an operation with its fields, or a job: --job job.toml")
    if part is not None and job is None:
        raise typer.BadParameter("--part needs --job")
    if job is not None and backends is not None:
        raise typer.BadParameter("set backends of a job in its file")
    from scheduler.cli import search_report
    from scheduler.measure.pool import start_runner
    from scheduler.measure.runner import RunnerOptions
    from scheduler.search import jobs
    from scheduler.search import sweep as sweeps
    from scheduler.search.task import Task

    with usage_errors():
        if job is not None:
            tasks = jobs.part(jobs.parse(read_text(job), own=own or ()), part or "1/1")
        else:
            op, problem = problem_of(str(operation), fields or [])
            tasks = [Task(op, problem, backends=jobs.parse_backends(op, backends))]
    if job is None:
        require_writable(out)
    else:
        require_directory(out)
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
    recordings: Annotated[list[Path] | None, typer.Argument(help="Recorded sweeps, all of one chip.")] = None,
    hardware: HardwareName = None,
    device: Device = 0,
    ship: Annotated[Path | None, typer.Option(help="Write to this directory of records instead of the cache.")] = None,
    as_json: AsJson = False,
) -> None:
    """Fit the cost model's constants to measurements on a chip: recorded sweeps, stored trials and records.

    Later predictions for this chip use them. Stored records do not change.
    """
    from scheduler.cli import search_report
    from scheduler.core import hardware as chips
    from scheduler.model.calibration import calibrate as fit
    from scheduler.search.sweep import merged_measurements, recorded_measurements, stored_measurements
    from scheduler.store import text_files
    from search_spaces import load

    with usage_errors():
        op = load(operation)
        chip = chips.find(hardware) if hardware is not None else None
    if ship is None:
        user_store().require_writable()
    sweeps = [recorded_measurements(op, path) for path in recordings or []]
    chip = chip or (sweeps[0].hardware if sweeps else hardware_here(device))
    kept = [found for _, found in ask_stores(lambda store: stored_measurements(op, chip, store))]
    found = merged_measurements([*sweeps, *kept])
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
