"""The command `tune`: tunes one problem, a job, or cache misses."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scheduler.cli.arguments import (
    Address,
    AsJson,
    CompileTimeout,
    Device,
    Devices,
    Engine,
    Own,
    Part,
    RunTimeout,
    Seed,
    chosen,
    finite,
    fleet,
    named_tasks,
    no_store,
    read_text,
    usage_errors,
    user_store,
)
from scheduler.cli.terminal import console_here, output, print_json, say, shown_job, shown_progress
from scheduler.core.arguments import MOST
from scheduler.core.errors import SchedulerError, StoreError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from scheduler.core.hardware import Hardware
    from scheduler.core.progress import Progress
    from scheduler.measure.compilers import Processes
    from scheduler.measure.runner import Runner, RunnerOptions
    from scheduler.search.job_queue import DeviceExecutor as DeviceExecutor
    from scheduler.search.job_queue import Executor
    from scheduler.search.job_run import Step
    from scheduler.search.task import Malformed, Result, Task
    from scheduler.store.store import Store


def tune(
    context: typer.Context,
    operation: Annotated[
        str | None, typer.Argument(help="A name (matmul), package.module:NAME, or file.py:NAME.")
    ] = None,
    fields: Annotated[
        list[str] | None,
        typer.Argument(help="The problem, as name=value; one extent may be a range: m=1..8192."),
    ] = None,
    job: Annotated[Path | None, typer.Option(help="A TOML file that lists problems to tune.")] = None,
    missed: Annotated[
        bool,
        typer.Option("--missed", help="Tune the problems of calls on this chip that had no record (see misses)."),
    ] = False,
    minutes: Annotated[
        float | None, typer.Option(min=0.001, callback=finite, help="With --missed: total minutes for all searches.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="With --missed: include problems with almost no expected gain.")
    ] = False,
    budget: Annotated[int | None, typer.Option(min=1, max=MOST, help="Number of trials.  [default: 64]")] = None,
    effort: Annotated[
        str | None,
        typer.Option(help="Instead of --budget: quick (8 trials), default (64) or full (until nothing improves)."),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.001, callback=finite, help="Start no trial after this many seconds.")
    ] = None,
    backends: Annotated[
        str | None, typer.Option(help="Kernels to try in addition to XLA: comma-separated names, or pallas.")
    ] = None,
    device: Device = 0,
    devices: Devices = None,
    seed: Seed = 0,
    sampler: Annotated[
        str,
        typer.Option(
            help="Sampler of schedules: model (the cost model, then a surrogate), a sampler of Optuna (tpe, gp, "
            "cmaes, nsgaii, qmc, random), or module:NAME."
        ),
    ] = "model",
    replay: Annotated[Path | None, typer.Option(help="Search a recorded sweep; no device is needed.")] = None,
    keep: Annotated[bool, typer.Option("--store", help="With --replay: store the result in the cache.")] = False,
    l2: Annotated[
        str, typer.Option(help="L2 cache state before each run: cold (operands in memory) or warm.")
    ] = "cold",
    force: Annotated[bool, typer.Option("--force", help="Tune again even if a valid record exists.")] = False,
    first_error: Annotated[
        bool, typer.Option("--first-error", help="Stop at the first schedule that fails, and print its traceback.")
    ] = False,
    part: Part = None,
    own: Own = None,
    engine: Engine = None,
    address: Address = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            "--hardware",
            help="Part of a chip's name: v6e. For an absent chip, its compiler estimates times and nothing runs. "
            "With --engine: use only GPUs of this name.",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, max=MOST, help="Number of compile processes.  [default: one per core; on a CPU none]"),
    ] = None,
    compile_timeout: CompileTimeout = None,
    run_timeout: RunTimeout = None,
    as_json: AsJson = False,
) -> None:
    """Search for the fastest schedule of a problem, or of each problem of a job, by timing candidates on the device.

    For an absent chip (--hardware), its compiler estimates the times, if it is installed. Such a record is marked as
    estimated and never replaces a measured one.
    """
    if (operation is not None or replay is not None, job is not None, missed).count(True) != 1:
        raise typer.BadParameter("give one of: an operation with its fields, a job (--job job.toml), or --missed")
    if not missed and (minutes is not None or everything):
        raise typer.BadParameter("--minutes and --all need --missed")
    if missed and (backends is not None or first_error or l2 != "cold"):
        raise typer.BadParameter("--missed excludes --backends, --first-error and --l2 warm")
    if keep and replay is None:
        raise typer.BadParameter("--store needs --replay: measured results are always stored")
    if job is not None and (budget, effort, seconds, backends) != (None, None, None, None):
        raise typer.BadParameter("set budget, effort, seconds and backends of a job in its file")
    starts_early = operation is not None and (replay, engine, devices, hardware) == (None, None, None, None)
    processes = _start_processes(context, device, workers) if starts_early else None
    from scheduler.measure.runner import RunnerOptions

    options, opened = RunnerOptions(device, workers, compile_timeout, run_timeout), None
    if starts_early:
        opened = _open_runner(str(operation), options, processes)
        context.call_on_close(functools.partial(_close_runner, opened))
    from scheduler.cli.misses import tasks_missed
    from scheduler.core.hardware import find
    from scheduler.measure.replay import Replay
    from scheduler.search import job_queue, jobs
    from scheduler.search.named_samplers import sampler_of
    from scheduler.search.task import Malformed, Task, is_range, trials
    from search_spaces import OPERATIONS, load, load_known

    if part is not None and job is None and not missed:
        raise typer.BadParameter("--part needs --job or --missed")
    ranged = any(is_range(field.partition("=")[2]) for field in fields or [])
    if devices is not None and job is None and not missed and not ranged:
        raise typer.BadParameter("--devices needs --job, --missed or a range; for one problem use --device")
    if ranged and replay is not None:
        raise typer.BadParameter("a range excludes --replay")
    if devices is not None and (device or first_error):
        raise typer.BadParameter("--devices excludes --device and --first-error")
    if engine is None and address is not None:
        raise typer.BadParameter("--address needs --engine ray")
    if hardware is not None and (replay is not None or devices is not None):
        raise typer.BadParameter("--hardware excludes --replay and --devices")
    if engine is not None and (job is None or device or devices is not None or first_error):
        raise typer.BadParameter("--engine needs --job, and excludes --device, --devices and --first-error")
    if l2 not in ("cold", "warm"):
        raise typer.BadParameter(f"--l2 must be cold or warm, found {l2}")
    with usage_errors():
        sampler_of(sampler, seed)  # raises an error for an unknown sampler before any process starts
        wanted = trials(budget, effort)
    recording = None if replay is None else Replay(replay)
    store = user_store() if recording is None or keep else no_store()
    with usage_errors():
        if hardware is not None and engine is None:
            options = dataclasses.replace(options, hardware=find(hardware).kind)
    if missed:
        search = functools.partial(Task, budget=wanted, seconds=seconds)
        choose = functools.partial(tasks_missed, store, search=search, everything=everything, part=part, own=own or ())
        any_operation = load(OPERATIONS[0])
        local = (
            [job_queue.DeviceExecutor.for_operation(any_operation, options)]
            if devices is None
            else chosen(devices, any_operation, options)
        )
        _tune_missed(choose, store, local, minutes, seed=seed, sampler=sampler, force=force, as_json=as_json)
        return
    tasks: Sequence[Task | Malformed]
    with usage_errors():
        if job is not None:
            tasks = jobs.part(jobs.parse(read_text(job), own=own or ()), part or "1/1")
        else:
            if recording is not None:
                operation = operation or load_known(recording.sweep.operation).name
                fields = fields or [f"{name}={value}" for name, value in recording.fields.items()]
            op = load(str(operation))
            search_options = {"budget": wanted, "seconds": seconds, "backends": jobs.parse_backends(op, backends)}
            tasks = named_tasks(op, fields or [], search_options)
    first = next((task.operation for task in tasks if not isinstance(task, Malformed)), None)
    executors: Sequence[Executor] | None = None
    with contextlib.ExitStack() as stack:
        if engine is not None:
            executors = stack.enter_context(fleet(engine, address, hardware, options))
        elif devices is not None and first is not None:
            executors = chosen(devices, first, options)
        elif opened is not None:
            executors = [job_queue.DeviceExecutor(opened.result)]
        _tune(
            tasks,
            store,
            executors,
            runner=recording,
            options=options,
            alone=job is None and not ranged,
            seed=seed,
            sampler=sampler,
            l2="warm" if l2 == "warm" else "cold",
            force=force,
            first_error=first_error,
            as_json=as_json,
        )


def _start_processes(context: typer.Context, device: int, workers: int | None) -> Processes | None:
    """Starts the processes of a pool before this process imports JAX; returns None if no processes are needed."""
    from scheduler.measure.compilers import Processes
    from scheduler.measure.gpu import Gpu

    gpu = Gpu.wanted(device)
    if gpu is None and workers is None:
        return None
    processes = Processes(gpu or Gpu.none(), workers)
    context.call_on_close(processes.close)
    return processes


def _open_runner(operation: str, options: RunnerOptions, processes: Processes | None) -> Future[Runner]:
    """Starts a runner in a thread, so that it starts while this process imports its other modules."""
    from scheduler.core.interrupts import in_thread
    from scheduler.measure.pool import start_runner
    from search_spaces import load

    with usage_errors():
        loaded = load(operation)
    return in_thread(functools.partial(start_runner, loaded, options, processes=processes), "scheduler-start")


def _close_runner(opened: Future[Runner]) -> None:
    """Closes the runner, which is still open if the command ended before a search."""
    if opened.exception() is None:
        opened.result().close()


def _tune_missed(
    choose: Callable[[Hardware], Sequence[Task]],
    store: Store,
    executors: Sequence[DeviceExecutor],
    minutes: float | None,
    **options: Any,
) -> None:
    """Tunes the tasks that `choose` returns for the local chip, in this order."""
    from scheduler.search.missed import TimeBudget

    time_budget = TimeBudget(None if minutes is None else 60 * minutes)
    with contextlib.ExitStack() as stack:
        for executor in executors:
            stack.callback(executor.close)
        executors[0].open()
        _tune(choose(executors[0].hardware), store, executors, in_order=True, bound=time_budget, **options)
    if time_budget.left:
        say(f"{minutes:g} minutes are over, {time_budget.left} problems are left; run the same command to continue")


def _tune(
    tasks: Sequence[Task | Malformed],
    store: Store,
    executors: Sequence[Executor] | None,
    *,
    as_json: bool,
    alone: bool = False,
    **options: Any,
) -> None:
    """Runs the tasks and prints their results.

    Args:
      tasks: the tasks.
      store: the store for the records.
      executors: the executors.
      as_json: whether to print JSON.
      alone: whether there is only one task, printed in detail.
      options: further arguments of `jobs.run`.

    Raises:
      SchedulerError: a problem failed, all schedules of a backend failed, or a record could not be stored.
    """
    from scheduler.search import jobs

    results: list[Result] = []
    try:
        if alone:
            with shown_progress() as progress:
                report = functools.partial(_report_step, progress)
                results += jobs.run(tasks, executors, store=store, progress=report, **options)
        else:
            with (
                shown_job(several=executors is not None and len(executors) > 1) as shown,
                # Closed here, so that an interrupt of this loop ends the job before its results are printed.
                contextlib.closing(jobs.run(tasks, executors, store=store, progress=shown.step, **options)) as ended,
            ):
                for result in ended:
                    results.append(result)
                    shown.ended(result)
    finally:
        written = {id(task): number for number, task in enumerate(tasks)}
        results.sort(key=lambda result: written[id(result.task)])
        if not alone and results:
            _print_job(results, store, as_json)
    if alone:
        _print_tuned(results[0], store, as_json)
    failed = sum(result.state == "failed" for result in results)
    if failed and not alone:
        raise SchedulerError(f"{failed} of {len(results)} problems failed; each row gives the reason")
    if broken := [f"{result.task}: {lost}" for result in results for lost in result.broken]:
        raise SchedulerError("; ".join(broken))
    unstored = ", ".join(str(result.task) for result in results if not result.stored)
    if unstored:
        raise SchedulerError(f"results could not be stored in {store.location}: {unstored}")


def _report_step(progress: Callable[[Task, Progress], None], step: Step) -> None:
    progress(step.task, step.search)


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
        output(f"Already tuned on {record.environment.date[:10]}, and still valid; --force tunes it again.", "")
    else:
        if result.reason:
            output(f"Tuned again: {result.reason}.")
        earlier = f" ({result.resumed} of them from an earlier, interrupted run)" if result.resumed else ""
        output(f"{record.tried} trials{earlier} of {record.space} schedules in {result.elapsed_s:.1f} s.", "")
    output(*record_report.entries(record, problem, result.hardware, console_here().width), "", *verdict.verdict(record))
    with contextlib.suppress(StoreError):  # already reported by a warning
        output(*search_report.failure_lines(store.last_trials(record.key), record))
    if result.stored:
        output("Not stored: the store is in memory" if store.in_memory else f"Stored in {store.location}")


def _print_job(results: Sequence[Result], store: Store, as_json: bool) -> None:
    from scheduler.cli import search_report

    if as_json:
        print_json({"results": [search_report.result_json(result) for result in results], "cache": store.location})
    else:
        output(*search_report.results(results, console_here().width))
        if all(result.stored for result in results if result.record is not None) and any(r.stored for r in results):
            output(f"Stored in {store.location}")
