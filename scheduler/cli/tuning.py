"""The command `tune`: tunes one problem, a job, or cache misses."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scheduler.cli import arguments
from scheduler.cli.terminal import console_here, output, print_json, say, shown_searches
from scheduler.core.arguments import MOST
from scheduler.core.errors import SchedulerError, StoreError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from scheduler.measure.compilers import Processes
    from scheduler.measure.runner import Runner, RunnerOptions
    from scheduler.search.job_queue import Executor
    from scheduler.search.task import Malformed, Result, Task
    from scheduler.store.store import Store

_DEVICES_OF_ONE = "--devices needs --job, --missed or a range; for one problem use --device"


def tune(
    context: typer.Context,
    operation: arguments.OptionalOperation = None,
    fields: Annotated[
        list[str] | None, typer.Argument(help="The problem, as name=value; one extent may be a range: m=1..8192.")
    ] = None,
    job: arguments.JobFile = None,
    missed: Annotated[
        bool, typer.Option("--missed", help="Tune the problems of calls on this chip that had no record (see misses).")
    ] = False,
    minutes: Annotated[
        float | None,
        typer.Option(min=0.001, callback=arguments.finite, help="With --missed: total minutes for all searches."),
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
        float | None, typer.Option(min=0.001, callback=arguments.finite, help="Start no trial after this many seconds.")
    ] = None,
    backends: arguments.Backends = None,
    device: arguments.Device = 0,
    devices: arguments.Devices = None,
    seed: arguments.Seed = 0,
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
    part: arguments.Part = None,
    own: arguments.Own = None,
    engine: arguments.Engine = None,
    address: arguments.Address = None,
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
    compile_timeout: arguments.CompileTimeout = None,
    run_timeout: arguments.RunTimeout = None,
    as_json: arguments.AsJson = False,
) -> None:
    """Search for the fastest schedule of a problem, or of each problem of a job, by timing candidates on the device.

    For an absent chip (--hardware), its compiler estimates the times, if it is installed. Such a record is marked as
    estimated and never replaces a measured one.
    """
    arguments.reject(
        {
            "give one of: an operation with its fields, a job (--job job.toml), or --missed": (
                (operation is not None or replay is not None, job is not None, missed).count(True) != 1
            ),
            "--minutes and --all need --missed": not missed and (minutes is not None or everything),
            "--missed excludes --backends, --first-error and --l2 warm": (
                missed and (backends is not None or first_error or l2 != "cold")
            ),
            "--store needs --replay: measured results are always stored": keep and replay is None,
            "set budget, effort, seconds and backends of a job in its file": (
                job is not None and (budget, effort, seconds, backends) != (None, None, None, None)
            ),
            "--part needs --job or --missed": part is not None and job is None and not missed,
            "--devices excludes --device and --first-error": devices is not None and (device > 0 or first_error),
            _DEVICES_OF_ONE: devices is not None and replay is not None,
            f"--engine must be ray, found {engine}": engine not in (None, "ray"),
            "--address needs --engine ray": engine is None and address is not None,
            "--hardware excludes --replay and --devices": (
                hardware is not None and (replay is not None or devices is not None)
            ),
            "--engine needs --job, and excludes --device, --devices and --first-error": (
                engine is not None and (job is None or device > 0 or devices is not None or first_error)
            ),
        }
    )
    starts_early = operation is not None and (replay, engine, devices, hardware) == (None, None, None, None)
    processes = _start_processes(context, device, workers) if starts_early else None
    from scheduler.measure.runner import RunnerOptions

    options = RunnerOptions(device, workers, compile_timeout, run_timeout)
    opened = _open_runner(context, str(operation), options, processes) if starts_early else None
    from scheduler.cli.misses import tasks_missed
    from scheduler.core.hardware import find
    from scheduler.measure.replay import Replay
    from scheduler.search import jobs
    from scheduler.search.job_queue import DeviceExecutor
    from scheduler.search.missed import TimeBudget
    from scheduler.search.task import Malformed, SearchOptions
    from scheduler.store.store import Store
    from search_spaces import OPERATIONS, load, load_known, value_of

    with arguments.usage_errors():
        search = SearchOptions.of(
            budget=budget, effort=effort, seconds=seconds, seed=seed, l2=l2, force=force, first_error=first_error,
            sampler=sampler,
        )  # fmt: skip
        if hardware is not None and engine is None:
            options = dataclasses.replace(options, hardware=find(hardware).kind)
    recording = None if replay is None else Replay(replay)
    store = arguments.user_store() if recording is None or keep else Store(":memory:")
    time_budget = TimeBudget(None if minutes is None else 60 * minutes)
    tasks: Sequence[Task | Malformed]
    executors: Sequence[Executor] | None = None
    with contextlib.ExitStack() as stack:
        if missed:
            executors = here = arguments.chosen(devices, load(OPERATIONS[0]), options)
            for executor in here:
                stack.callback(executor.close)
            here[0].open()
            tasks = tasks_missed(store, here[0].hardware, search, everything=everything, part=part)
        elif job is not None:
            with arguments.usage_errors():
                tasks = jobs.part(jobs.parse(arguments.read_text(job), own=own or (), options=search), part or "1/1")
        else:
            with arguments.usage_errors():
                if recording is not None:
                    operation = operation or load_known(recording.sweep.operation).name
                    fields = fields or [f"{name}={value}" for name, value in recording.fields.items()]
                op = load(str(operation))
                search = dataclasses.replace(search, backends=jobs.parse_backends(op, backends))
                tasks = arguments.named_tasks(op, fields or [], search)
        alone = job is None and not missed and len(tasks) == 1
        arguments.reject(
            {
                _DEVICES_OF_ONE: devices is not None and alone,
                "a range excludes --replay": recording is not None and not alone,
            }
        )
        first = next((task.operation for task in tasks if not isinstance(task, Malformed)), None)
        if engine is not None:
            of_cluster = value_of("scheduler.contrib.fleet.ray_cluster:executors")
            executors = stack.enter_context(of_cluster(address or "auto", options, hardware=hardware))
        elif executors is None and devices is not None and first is not None:
            executors = arguments.chosen(devices, first, options)
        elif opened is not None:
            executors = [DeviceExecutor(opened.result)]
        how = {"runner": recording, "options": options, "in_order": missed, "bound": time_budget}
        _tune(tasks, store, executors, alone=alone, as_json=as_json, **how)
    if time_budget.left:
        say(f"{minutes:g} minutes are over, {time_budget.left} problems are left; run the same command to continue")


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


def _open_runner(
    context: typer.Context, operation: str, options: RunnerOptions, processes: Processes | None
) -> Future[Runner]:
    """Starts a runner in a thread, so that it starts while this process imports its other modules.

    The command closes the runner, which is still open if the command ends before a search.
    """
    from scheduler.core.interrupts import in_thread
    from scheduler.measure.pool import start_runner
    from search_spaces import load

    with arguments.usage_errors():
        loaded = load(operation)
    opened = in_thread(functools.partial(start_runner, loaded, options, processes=processes), "scheduler-start")
    context.call_on_close(lambda: opened.result().close() if opened.exception() is None else None)
    return opened


def _tune(
    tasks: Sequence[Task | Malformed],
    store: Store,
    executors: Sequence[Executor] | None,
    *,
    alone: bool,
    as_json: bool,
    **how: Any,
) -> None:
    """Runs the tasks and prints their results.

    Args:
      alone: whether there is only one task, printed in detail.
      how: further arguments of `jobs.run`.

    Raises:
      SchedulerError: a problem failed, all schedules of a backend failed, or a record could not be stored.
    """
    from scheduler.search import jobs

    results: list[Result] = []
    try:
        # The job is closed here, so that an interrupt of this loop ends it before its results are printed.
        with (
            shown_searches(several=executors is not None and len(executors) > 1) as shown,
            contextlib.closing(
                jobs.run(
                    tasks,
                    executors,
                    store=store,
                    progress=(lambda step: shown.search(step.task, step.search)) if alone else shown.step,
                    **how,
                )
            ) as ended,
        ):
            for result in ended:
                results.append(result)
                if not alone:
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


def _print_tuned(result: Result, store: Store, as_json: bool) -> None:
    from scheduler.cli import record_report
    from scheduler.inspect import verdict

    if result.record is None:
        raise SchedulerError(result.reason)
    if as_json:
        print_json({**record_report.result_json(result), "cache": store.location})
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
        output(*record_report.failure_lines(store.last_trials(record.key), record))
    if result.stored:
        output("Not stored: the store is in memory" if store.in_memory else f"Stored in {store.location}")


def _print_job(results: Sequence[Result], store: Store, as_json: bool) -> None:
    from scheduler.cli import record_report

    if as_json:
        print_json({"results": [record_report.result_json(result) for result in results], "cache": store.location})
    else:
        output(*record_report.results(results, console_here().width))
        if all(result.stored for result in results if result.record is not None) and any(r.stored for r in results):
            output(f"Stored in {store.location}")
