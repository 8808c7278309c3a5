"""The command line: parse, call, print."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import signal
import sys
import sysconfig
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from typer.core import TyperGroup

from scheduler.core.errors import CandidateFailed, SchedulerError, StoreError
from scheduler.core.threads import left_behind
from search_spaces.errors import DeclarationError
from tile_scheduler import __version__

if TYPE_CHECKING:
    from rich.console import RenderableType

    from scheduler.core.hardware import Hardware
    from scheduler.core.progress import Progress
    from scheduler.core.records import Key, Record, Trial
    from scheduler.search.jobs import Result, Task
    from scheduler.store.store import Store
    from search_spaces.kernel import Operation, Problem

# Everything that takes long to import (JAX, SQLAlchemy, Optuna) is imported by the commands that need it.

T = TypeVar("T")


class _Terminated(KeyboardInterrupt):
    """SIGTERM, where Ctrl-C may come as well."""


class _Commands(TyperGroup):
    """Ends every command as a shell expects: an error is one sentence on standard error and status 1.

    Ctrl-C ends with 130 and SIGTERM with 143, once worker processes are gone and files closed.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            with _terminable():
                return super().invoke(ctx)
        except (SchedulerError, DeclarationError) as error:
            if isinstance(error, CandidateFailed) and error.__cause__ is not None:
                traceback.print_exception(error.__cause__)
            print(f"tile-scheduler: {error}", file=sys.stderr)
            raise typer.Exit(1) from None
        except Exception as error:
            if (place := _of_a_user(error)) is None:
                raise
            said = str(error).partition("\n")[0]  # more is for a traceback, which JAX's messages come with
            print(f"tile-scheduler: {place}: {type(error).__name__}: {said}", file=sys.stderr)
            raise typer.Exit(1) from None
        except KeyboardInterrupt as interrupt:
            kept = "what was measured so far is kept, and the same command goes on from there"
            print(f"tile-scheduler: interrupted; {kept}", file=sys.stderr)
            raise typer.Exit(143 if isinstance(interrupt, _Terminated) else 130) from None


def _of_a_user(error: BaseException) -> str | None:
    """File, line and function of an operation of one's own that raised this; None where it is a defect of this program.

    Libraries raise for whoever called them: to blame is the innermost function that is in none of them.
    """
    root = Path(__file__).parents[2]
    ours = [root / "scheduler", root / "search_spaces"]
    libraries = [Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib", "stdlib", "platstdlib", "scripts")]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if any(file.is_relative_to(package) for package in ours):
            return None
        if not frame.filename.startswith("<") and not any(file.is_relative_to(library) for library in libraries):
            return f"{frame.filename}:{frame.lineno}, in {frame.name}"
    return None


app = typer.Typer(
    cls=_Commands,
    help="Search, inspect and carry the tile schedules of JAX Pallas kernels.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

OperationName = Annotated[str, typer.Argument(help="A name (matmul), package.module:NAME, or file.py:NAME.")]
Fields = Annotated[list[str], typer.Argument(help="The problem, as name=value: m=4096 n=4096 k=4096 dtype=bfloat16.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]
HardwareName = Annotated[str | None, typer.Option("--hardware", help="A chip by a part of its name: h200.")]
Chips = Annotated[str | None, typer.Option("--hardware", help="Only chips whose name contains this, in any case.")]
Device = Annotated[int, typer.Option(min=0, help="Which GPU, by its index among the visible ones.")]
Part = Annotated[
    str | None,
    typer.Option(help="i/n: every n-th problem of the job from the i-th, for GPUs or hosts that share it."),
]
CompileTimeout = Annotated[
    float | None, typer.Option(min=0.001, help="Seconds a worker may take to build one candidate.  [default: adapts]")
]
RunTimeout = Annotated[
    float | None,
    typer.Option(min=0.001, help="Seconds a worker may hold the device for one candidate.  [default: adapts]"),
]


def main(arguments: Sequence[str] | None = None) -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # rules of tables, where a terminal has no letters but ASCII's
    sys.path.append(str(Path.cwd()))  # as `python -m` does: an operation of one's own may lie in a package here
    try:
        app(args=None if arguments is None else list(arguments), prog_name="tile-scheduler")
    except SystemExit as end:
        if left_behind():  # an interrupted candidate of this process: JAX would wait for it
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code if isinstance(end.code, int) else 1)
        raise


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
    """Search, inspect and carry the tile schedules of JAX Pallas kernels."""


@app.command()
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
    from scheduler.search import jobs

    if part is not None and job is None:
        raise typer.BadParameter("--part is of a job")
    if l2 not in ("cold", "warm"):
        raise typer.BadParameter(f"--l2 is cold or warm, not {l2}")
    recording = None if replay is None else Replay(replay)
    with _usage_errors():
        if job is not None:
            tasks = jobs.part(jobs.parse(_read(job)), part or "1/1")
        else:
            if recording is not None:
                operation = operation or recording.sweep.operation
                fields = fields or [f"{name}={value}" for name, value in recording.fields.items()]
            op, problem = _problem(str(operation), fields or [])
            tasks = [jobs.Task(op, problem, budget or jobs.BUDGET, seconds, jobs.parse_backends(op, backends))]
    store = _user_store() if recording is None or keep else _no_store()
    results: list[Result] = []
    try:
        with _progress() as progress:
            for result in jobs.run(
                tasks,
                store=store,
                runner=recording,
                device=device,
                seed=seed,
                l2="warm" if l2 == "warm" else "cold",
                force=force,
                first_error=first_error,
                workers=workers,
                compile_timeout_s=compile_timeout,
                run_timeout_s=run_timeout,
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


@app.command()
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
    from scheduler.cli import report
    from scheduler.search import jobs
    from scheduler.search import sweep as sweeps
    from scheduler.search.tuner import start_runner

    with _usage_errors():
        if job is not None:
            tasks = jobs.part(jobs.parse(_read(job)), part or "1/1")
        else:
            op, problem = _problem(str(operation), fields or [])
            tasks = [jobs.Task(op, problem, backends=jobs.parse_backends(op, backends))]
    failed = 0
    with contextlib.ExitStack() as stack:
        runner = None
        for task in tasks:
            if isinstance(task, jobs.Malformed):
                _say(f"{task}: {task.reason}")
                failed += 1
                continue
            if runner is None:
                runner = start_runner(
                    task.operation, device=device, compile_timeout_s=compile_timeout, run_timeout_s=run_timeout
                )
                stack.callback(runner.close)
            path = out if job is None else out / sweeps.file_name(task.operation, task.problem)
            with _progress() as progress:
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
            _print(*report.sweep_lines(head, trials), f"Written to {path} ({path.stat().st_size / 1000:.0f} kB)", "")
    if failed:
        raise SchedulerError(f"{failed} of {len(tasks)} problems of the job cannot be read")


@app.command()
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
    from scheduler.cli import report
    from scheduler.core import codec
    from scheduler.core import hardware as chips
    from scheduler.model.calibration import calibrate as fit
    from scheduler.search import dataset
    from search_spaces import load

    with _usage_errors():
        op = load(operation)
        chip = chips.find(hardware) if hardware is not None else None
    if ship is None:
        _user_store().require_writable()
    sweeps = [dataset.recorded(op, path) for path in recordings or []]
    chip = chip or (sweeps[0].hardware if sweeps else _hardware_here(device))
    kept = [found for _, found in _ask_stores(lambda store: dataset.stored(op, chip, store))]
    found = dataset.merged([*sweeps, *kept])
    fitted = fit(op, found.hardware, found.trials, found.environments)
    if ship is not None:
        where = ", ".join(map(str, codec.add_calibrations(ship, fitted)))
    else:
        store = _user_store()
        for calibration in fitted:
            store.put_calibration(calibration)
        where = store.location
    if as_json:
        _print_json([report.calibration_json(calibration) for calibration in fitted])
        return
    _print(f"{op.name} on {chip.id}", "", report.calibrations_table(fitted))
    _print(f"Written to {where}" if ship is not None else f"Stored in {where}")


@app.command()
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
    from scheduler.cli import report
    from scheduler.search.reverify import reverify
    from scheduler.store.store import shipped as shipped_store
    from search_spaces import load

    with _usage_errors():
        op = load(operation) if operation is not None else None
        wanted = _texts(fields or [])
    user = _user_store()
    if update:
        user.require_writable()
    store = shipped_store() if shipped else user
    stored = _records(store, op.name if op else None, hardware) if store is not None else []
    records = [record for record in stored if _has(record, op, wanted)]
    if not records:
        raise SchedulerError(f"nothing of that is {'shipped' if shipped else f'in {user.location}'}")
    verdicts = []
    for verdict in reverify(
        records,
        operation=op,
        device=device,
        compile_timeout_s=compile_timeout,
        run_timeout_s=run_timeout,
        within=within / 100,
        seed=seed,
    ):
        verdicts.append(verdict)
        _say(f"{len(verdicts)}/{len(records)}: {verdict.record.key}: {verdict.state}")
        if update and verdict.refreshed is not None:
            user.put(verdict.refreshed)
    if as_json:
        _print_json([report.reverified_json(verdict) for verdict in verdicts])
    else:
        _print(*report.reverified(verdicts, _console().width))
        if update:
            renewed = sum(verdict.refreshed is not None for verdict in verdicts)
            _print(f"{renewed} records with today's times are stored in {user.location}")
    lost = sum(verdict.state in ("slower", "broken") for verdict in verdicts)
    if lost:
        raise SchedulerError(
            f"{lost} of {len(verdicts)} records no longer hold; tune them again, or store with --update"
        )
    if all(verdict.state == "elsewhere" for verdict in verdicts):
        raise SchedulerError(f"none of {len(verdicts)} records could be timed: {verdicts[0].reason}")


@app.command("list")
def list_(
    operation: Annotated[str | None, typer.Option(help="Only this operation.")] = None,
    hardware: Chips = None,
    as_json: AsJson = False,
) -> None:
    """List the stored schedules, the user's own and those shipped with this package, and searches cut short."""
    from scheduler.cli import report

    kept = list(_ask_stores(lambda store: (list(store.records()), store.unfinished())))
    keys = [key for _, (records, cut) in kept for key in (*(record.key for record in records), *cut)]
    wanted = _wanted(keys, operation, hardware)
    rows = [(where, record) for where, (records, _) in kept for record in records if wanted(record.key)]
    if as_json:
        _print_json([{"where": where, **report.record_json(record)} for where, record in rows])
        return
    if rows:
        _print(*report.records(rows, _console().width))
    for where, (_, cut) in kept:
        for key, trials in cut.items():
            if wanted(key):
                _print("", f"{key}, {where}: {report.unfinished_text(trials)}")
                _print_goes_on(key)
    if not any(map(wanted, keys)):
        from scheduler.core import hints
        from scheduler.inspect import doctor
        from scheduler.store.store import default_url
        from search_spaces import OPERATIONS, load

        op = load(operation if operation in OPERATIONS else OPERATIONS[0])
        small = doctor.example(op, 256)
        assert small is not None, "of the operations here, all that has no default is an extent"
        _print(f"nothing of that is in {default_url()} or shipped; to search a problem, for example:")
        _print_command(hints.tune(op, small))


@app.command()
def show(operation: OperationName, fields: Fields, hardware: Chips = None, as_json: AsJson = False) -> None:
    """Show one problem's record on each chip, with its trials, and those of a search that was cut short."""
    from scheduler.cli import report
    from scheduler.core import hints

    with _usage_errors():
        op, problem = _problem(operation, fields)
    command, canonical = hints.tune(op, problem), problem.canonical()

    def ask(store: Store) -> list[tuple[Key, Record | None, list[Trial], list[Trial]]]:
        cut = store.unfinished(op.name)
        records = {record.key: record for record in store.records(operation=op.name)}
        keys = [key for key in dict.fromkeys((*records, *cut)) if key.problem == canonical]
        return [(key, records.get(key), store.last_trials(key), cut.get(key, [])) for key in keys]

    kept = [(where, *row) for where, rows in _ask_stores(ask) for row in rows]
    wanted = _wanted([key for _, key, *_ in kept], None, hardware)
    found = [row for row in kept if wanted(row[1])]
    if not found:
        on = f" on {hardware}" if hardware else ""
        raise SchedulerError(f"nothing is stored for {op.name} {problem}{on}; run: {command}")
    if as_json:
        _print_json([report.kept_json(*row, problem, _row(row[1].hardware)) for row in found])
        return
    for where, key, record, trials, cut in found:
        if record is not None:
            _print(f"{key}, {where}", *report.record_head(record, trials_kept=bool(trials)), "")
            _print(*report.entries(record, problem, _row(key.hardware)), "", *report.verdict(record))
        if cut:
            _print(*([""] * (record is not None)), f"{key}, {where}: {report.unfinished_text(cut)}")
            _print_goes_on(key, command)
        if trials:
            _print("", *report.trials_told(trials, record, _console().width))


@app.command()
def explain(
    operation: OperationName,
    fields: Fields,
    hardware: HardwareName = None,
    device: Device = 0,
    top: Annotated[int, typer.Option(min=1, help="How many of the model's first to show.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Account for every schedule, from the size of the space down to the winner."""
    from scheduler import front_end
    from scheduler.cli import report
    from scheduler.core import hardware as chips
    from scheduler.core import hints
    from scheduler.core.identity import key_of
    from scheduler.core.records import choice_text
    from scheduler.inspect import explain as accounts
    from scheduler.prediction import predict, validation

    with _usage_errors():
        op, problem = _problem(operation, fields)
        chip = chips.find(hardware) if hardware is not None else None
    chip = chip or _hardware_here(device)
    key = key_of(op, problem, chip)
    asked = list(_ask_stores(lambda store: (store.get(key), store.trials(key))))
    found = [(where, record, tried) for where, (record, tried) in asked if record is not None]
    trials = [trial for _, (_, tried) in asked for trial in tried]
    explained = accounts.explain(op, problem, chip, trials, top=top)
    stored = _ask_stores(lambda store: list(store.records(operation=op.name, hardware=chip.id)))
    model = predict.predict(op, problem, chip, records=[record for _, records in stored for record in records])
    record = found[0][1] if found else None
    held = validation.recheck(op, problem, chip, record) if record is not None else "nothing is stored"
    if as_json:
        _print_json(report.explanation_json(explained, model, record, held, problem, chip))
        return
    _print(f"{op.name} {problem} on {chip.id}", "")
    kept = record is None or bool(trials)
    for account in explained:
        _print(*report.account_parts(account, _console().width, trials_kept=kept), "")
    if isinstance(held, str) or record is None:
        choice = choice_text(model.backend, model.schedule)
        why = str(held) if record is None else f"the stored schedule no longer holds ({held})"
        _print(f"Without measuring, a call gets {choice}: {model.reason}.")
        _print(f"{why[0].upper()}{why[1:]}; run:")
        _print_command(hints.tune(op, problem))
    else:
        _print(f"Winner, from {found[0][0]}:", *report.record_head(record, trials_kept=bool(found[0][2])), "")
        _print(*report.entries(record, problem, chip), "", *report.verdict(record))
    _print("", front_end.NOT_EVERY_CALL)


@app.command()
def export(
    file: Annotated[
        Path | None, typer.Argument(help="A file, or a directory such as records/; standard output.")
    ] = None,
    operation: Annotated[str | None, typer.Option(help="Only this operation.")] = None,
    hardware: Chips = None,
) -> None:
    """Write the user's own records as text, a JSON object a line; into a directory, a file per chip and operation."""
    from scheduler.core import codec

    records = _records(_user_store(), operation, hardware)
    if file is None:
        sys.stdout.write(codec.export_text(records))
    elif file.is_dir():
        for path in codec.add_records(file, records):
            _say(f"wrote {path}")
    else:
        with _file_errors(file):
            file.write_text(codec.export_text(records), encoding="utf-8")
        _say(f"wrote {len(records)} records to {file}")


@app.command("import")
def import_(file: Annotated[Path, typer.Argument(help="What export wrote; - is standard input.")]) -> None:
    """Put exported records into the user's own cache, in place of those of the same problems."""
    from scheduler.core import codec

    with _file_errors(file):
        content = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    records = codec.import_text(content, source=str(file))
    store = _user_store()
    for record in records:
        store.put(record)
    _say(f"put {len(records)} records into {store.location}")


@app.command()
def forget(
    operation: Annotated[str | None, typer.Argument(help="A name, package.module:NAME, or file.py:NAME.")] = None,
    fields: Annotated[list[str] | None, typer.Argument(help="The problem, as name=value.")] = None,
    hardware: Chips = None,
    everything: Annotated[bool, typer.Option("--all", help="Every problem (of the operation, on the chip).")] = False,
) -> None:
    """Delete records and trials from the user's own cache, those of searches that were cut short among them."""
    problem = None
    if not everything:
        if operation is None or not fields:
            raise typer.BadParameter("name a problem, or say --all")
        with _usage_errors():
            op, parsed = _problem(operation, fields)
        operation, problem = op.name, parsed.canonical()
    elif fields:
        raise typer.BadParameter("--all and the fields of one problem exclude each other")
    store = _user_store()
    keys = store.keys()
    wanted = _wanted(keys, operation, hardware)
    gone = [key for key in keys if wanted(key) and problem in (None, key.problem)]
    for key in gone:
        store.forget(key)
        _say(f"forgot {key}")
    if not gone:
        raise SchedulerError(f"nothing of that is in {store.location}")


@app.command("build-cache")
def build_cache(
    records: Annotated[Path, typer.Argument(help="The directory of records as text.")] = Path("records"),
    cache: Annotated[Path, typer.Argument(help="The file to write.")] = Path("cache.db"),
) -> None:
    """Make the shipped cache.db anew from its records."""
    from scheduler.store.store import build_shipped

    _say(f"wrote {build_shipped(records, cache)} records to {cache}")


@app.command()
def doctor(device: Device = 0, as_json: AsJson = False) -> None:
    """Say what is here: the chip, the backends, the caches, the versions, and what is missing."""
    from scheduler.cli import report
    from scheduler.inspect import doctor as checks

    findings = list(checks.examine(lambda: _hardware_here(device), device))
    if as_json:
        _print_json([{"what": f.what, "state": f.state, "detail": f.detail} for f in findings])
    else:
        _print(report.labelled((finding.state, f"{finding.what}: {finding.detail}") for finding in findings))
    if any(finding.state == "broken" for finding in findings):
        raise typer.Exit(1)


def _problem(name: str, fields: Sequence[str]) -> tuple[Operation[Any], Problem]:
    from search_spaces import load

    operation = load(name)
    try:
        return operation, operation.problem.parse(_texts(fields))
    except ValueError as error:
        raise ValueError(f"{operation.name}: {error}") from error


def _texts(fields: Sequence[str]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for field in fields:
        key, equals, value = field.partition("=")
        if not equals:
            raise ValueError(f"a field is name=value, not {field!r}")
        if key in texts:
            raise ValueError(f"{key} is given twice")
        texts[key] = value
    return texts


def _has(record: Record, operation: Operation[Any] | None, fields: Mapping[str, str]) -> bool:
    """Whether a record's problem has these values."""
    from search_spaces import load

    if not fields:
        return True
    values = json.loads(record.key.problem)
    with contextlib.suppress(ValueError):  # without its operation, what is at its default is not known
        values = vars((operation or load(record.key.operation)).problem.from_canonical(record.key.problem))
    return all(str(values.get(name)).lower() == text.lower() for name, text in fields.items())


def _hardware_here(device: int) -> Hardware:
    """The chip, learnt from another process where it is a GPU, which this one then need not hold."""
    from scheduler.core import hardware as chips
    from scheduler.measure.pool import Gpu, Pool

    if (gpu := Gpu.wanted(device)) is not None:
        with Pool(gpu, slots=1) as pool:
            return pool.hardware
    return chips.detect()


def _row(identity: str) -> Hardware | None:
    """The chip of a record, where the table has it."""
    from scheduler.core.hardware import CHIPS

    return next((row for row in CHIPS if row.id == identity), None)


def _user_store() -> Store:
    from scheduler.store.store import Store, default_url

    return Store(default_url())


def _no_store() -> Store:
    from scheduler.store.store import Store

    return Store(":memory:")


def _stores() -> Iterator[tuple[str, Store]]:
    from scheduler.store.store import shipped

    store = _user_store()
    yield store.location, store
    if (other := shipped()) is not None:
        yield "shipped", other


def _ask_stores(ask: Callable[[Store], T]) -> Iterator[tuple[str, T]]:
    """What each store answers, as calls see them: one that cannot be read is said, and left out."""
    for where, store in _stores():
        try:
            answer = ask(store)
        except StoreError as error:
            _say(f"tile-scheduler: {error} (going on without it)")
        else:
            yield where, answer


def _records(store: Store, operation: str | None, hardware: str | None) -> list[Record]:
    """Those of a store that the words of a command line name."""
    records = list(store.records())
    wanted = _wanted([record.key for record in records], operation, hardware)
    return [record for record in records if wanted(record.key)]


def _wanted(keys: Sequence[Key], operation: str | None, hardware: str | None) -> Callable[[Key], bool]:
    """Whether a key is of that operation, and on a chip that `hardware` may mean; None leaves either open.

    Raises:
      BadParameter: neither `keys` nor this program know an operation or a chip of that name.
    """
    from search_spaces import OPERATIONS, load
    from search_spaces.space import unknown

    if operation is not None:
        if ":" in operation:
            with _usage_errors():
                operation = load(operation).name
        elif operation not in (known := dict.fromkeys((*OPERATIONS, *(key.operation for key in keys)))):
            raise typer.BadParameter(f"no operation {unknown(operation, known)}")
    if hardware is None:
        return lambda key: operation in (None, key.operation)
    from scheduler.core.hardware import CHIPS, named

    kinds = dict.fromkeys((*(row.kind for row in CHIPS), *(key.hardware for key in keys)))
    if not named(hardware, kinds):
        raise typer.BadParameter(f"no hardware {unknown(hardware, kinds)}")
    return lambda key: operation in (None, key.operation) and bool(named(hardware, [key.hardware]))


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Within, SIGTERM is raised as Ctrl-C is; a second one ends the process at once, and its workers with it."""

    def terminate(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise _Terminated

    if threading.current_thread() is not threading.main_thread():  # where no handler may be set
        yield
        return
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _usage_errors() -> Iterator[None]:
    """What is wrong with the words of a command line, said as such: status 2."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


@contextlib.contextmanager
def _file_errors(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SchedulerError(f"{file}: {reason}") from error


def _read(file: Path) -> str:
    with _file_errors(file):
        return file.read_text(encoding="utf-8")


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[Task, Progress], None]]:
    """Shows how far a search is on standard error: a bar on a terminal, else a line whenever there is a new best."""
    from scheduler.cli import report
    from scheduler.core.records import choice_text

    def said(progress: Progress) -> str:
        best = progress.best
        if best is None:
            return "building and checking the first" if progress.last is None else "nothing ran yet"
        time_s = getattr(best.outcome, "median_s", float("nan"))
        return f"best {report.seconds_text(time_s)}: {choice_text(best.backend, best.schedule)}"

    if not sys.stderr.isatty():
        shown: dict[Task, str] = {}

        def line(task: Task, progress: Progress) -> None:
            if progress.done == progress.budget or shown.get(task) != said(progress):
                shown[task] = said(progress)
                left = "" if progress.eta_s is None else f", {progress.eta_s:.0f} s left"
                _say(f"{task}: {progress.done}/{progress.budget} trials{left}, {said(progress)}")

        yield line
        return

    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bars

    columns = [TextColumn("{task.fields[label]}", markup=False), BarColumn(bar_width=12), MofNCompleteColumn()]
    columns += [TextColumn("{task.fields[left]}"), TextColumn("{task.fields[best]}", markup=False)]
    with Bars(*columns, console=Console(stderr=True)) as bars:
        rows: dict[Task, Any] = {}

        def draw(task: Task, progress: Progress) -> None:
            if task not in rows:
                rows[task] = bars.add_task("", total=progress.budget, label=str(task), left="", best="")
            left = "" if progress.eta_s is None else f"{progress.eta_s:.0f} s left"
            short = said(progress).partition(":")[0]  # without the schedule it fits a line
            bars.update(rows[task], completed=progress.done, total=progress.budget, left=left, best=short)

        yield draw


def _print_tuned(result: Result, store: Store, as_json: bool) -> None:
    from scheduler.cli import report

    if result.record is None:
        raise SchedulerError(result.reason)
    if as_json:
        _print_json({**report.result_json(result), "cache": store.location})
        return
    record, problem = result.record, getattr(result.task, "problem", None)
    _print(f"{result.task} on {record.key.hardware}")
    if result.state == "known":
        _print(f"Already tuned on {record.environment.date[:10]}, and it still holds; --force tunes it again.", "")
    else:
        if result.reason:
            _print(f"Tuned again: {result.reason}.")
        earlier = f" ({result.resumed} of them made before, in a run that was cut short)" if result.resumed else ""
        _print(f"{record.tried} trials{earlier} of {record.space} schedules in {result.elapsed_s:.1f} s.", "")
    _print(*report.entries(record, problem, result.hardware), "", *report.verdict(record))
    with contextlib.suppress(StoreError):  # what could not be stored has been told
        _print(*report.failed_beside(store.last_trials(record.key), record))
    if result.stored:
        _print("Nothing is stored of a replay without --store" if store.in_memory else f"Stored in {store.location}")


def _print_job(results: Sequence[Result], store: Store, as_json: bool) -> None:
    from scheduler.cli import report

    if as_json:
        _print_json({"results": [report.result_json(result) for result in results], "cache": store.location})
    else:
        _print(*report.results(results, _console().width))
        if all(result.stored for result in results):
            _print(f"Stored in {store.location}")


def _print_goes_on(key: Key, command: str | None = None) -> None:
    """How an unfinished search goes on; where its operation is defined, only whoever began it knows."""
    from scheduler.core import hints
    from search_spaces import OPERATIONS, load

    if command is None and key.operation in OPERATIONS:
        op = load(key.operation)
        command = hints.tune(op, op.problem.from_canonical(key.problem))
    if command is None:
        _print("the command that began it goes on from there")
    else:
        if (chip := _row(key.hardware)) is not None and chip.platform == "cpu":
            from scheduler.search.tuner import LONGEST_INTERPRETED_S

            command += f" --seconds {LONGEST_INTERPRETED_S:.0f}"  # one that takes longer may have been begun so only
        _print("it goes on from there with:")
        _print_command(command)


def _console() -> Console:
    """As wide as the terminal or as COLUMNS says; where neither is there, as most terminals can be."""
    told = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal()
    return Console(highlight=False, width=None if told else 120)


def _print(*what: RenderableType) -> None:
    """Sentences and tables, folded between words to the width of the console."""
    console = _console()
    for one in what:
        if isinstance(one, str):
            lines = textwrap.wrap(one, console.width, break_long_words=False, break_on_hyphens=False) or [""]
            console.print("\n".join(lines), markup=False, soft_wrap=True)
        else:
            console.print(one, markup=False)


def _print_command(command: str) -> None:
    """On a line of its own, which is not folded: it is there to be copied."""
    print(f"  {command}")


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, allow_nan=False))


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
