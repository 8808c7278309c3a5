"""Commands that search: `tune`, `tune-job`, `tune-missed` and `replay`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scheduler.cli import arguments
from scheduler.cli.terminal import console_here, output, print_json, say
from scheduler.core.errors import SchedulerError, StoreError
from scheduler.core.status_line import SearchStatus

if TYPE_CHECKING:
    from concurrent.futures import Future

    from scheduler.measure.runner import Runner
    from scheduler.search.job_queue import Executor
    from scheduler.search.jobs import Step
    from scheduler.search.task import Malformed, Result, Task
    from scheduler.store.store import Store


def tune(
    context: typer.Context,
    operation: arguments.OperationName,
    fields: Annotated[
        list[str] | None, typer.Argument(help="The problem, as name=value; one extent may be a range: m=1..8192.")
    ] = None,
    budget: arguments.Budget = 64,
    seconds: arguments.Seconds = None,
    backends: arguments.Backends = None,
    sampler: arguments.SamplerName = "model",
    seed: arguments.Seed = 0,
    l2: arguments.L2State = "cold",
    force: arguments.Force = False,
    first_error: Annotated[
        bool, typer.Option("--first-error", help="Stop at the first schedule that fails, and print its traceback.")
    ] = False,
    hardware: arguments.TargetChip = None,
    device: arguments.Device = 0,
    workers: arguments.Workers = None,
    compile_timeout: arguments.CompileTimeout = None,
    run_timeout: arguments.RunTimeout = None,
    as_json: arguments.AsJson = False,
) -> None:
    """Search for the fastest schedule of a problem by timing candidates on the device.

    For an absent chip (--hardware), its compiler estimates the times, if it is installed. Such a record is marked as
    estimated and never replaces a measured one.
    """
    where = device, workers, compile_timeout, run_timeout
    opened = _open_runner(context, operation, *where) if hardware is None else None
    from scheduler.search import jobs
    from scheduler.search.job_queue import DeviceExecutor
    from scheduler.search.task import SearchOptions, Task

    with arguments.usage_errors():
        op, problems = arguments.problems_of(operation, fields or [])
        search = SearchOptions(
            budget, seconds, jobs.parse_backends(op, backends), seed, l2, force, first_error, sampler,
        )  # fmt: skip
    tasks = [Task(op, problem, search) for problem in problems]
    executor = (
        DeviceExecutor.for_operation(op, arguments.runner_options(*where, hardware))
        if opened is None
        else DeviceExecutor(opened.result)
    )
    _search(tasks, arguments.user_store(), [executor], alone=len(tasks) == 1, as_json=as_json)


def tune_job(
    job: Annotated[Path, typer.Argument(help="A TOML file that lists problems.")],
    own: arguments.Own = None,
    part: arguments.Part = "1/1",
    sampler: arguments.SamplerName = "model",
    seed: arguments.Seed = 0,
    l2: arguments.L2State = "cold",
    force: arguments.Force = False,
    hardware: arguments.TargetChip = None,
    devices: arguments.Devices = None,
    workers: arguments.Workers = None,
    compile_timeout: arguments.CompileTimeout = None,
    run_timeout: arguments.RunTimeout = None,
    as_json: arguments.AsJson = False,
) -> None:
    """Tune each problem of a file that has no valid record.

    The file also sets the budget, seconds and backends of its searches.
    """
    options = arguments.runner_options(0, workers, compile_timeout, run_timeout, hardware)
    from scheduler.search import jobs
    from scheduler.search.task import SearchOptions, Task

    with arguments.usage_errors():
        search = SearchOptions(seed=seed, l2=l2, force=force, sampler=sampler)
        tasks = jobs.part(jobs.parse(arguments.read_text(job), own=own or (), options=search), part)
    store, first = arguments.user_store(), next((task.operation for task in tasks if isinstance(task, Task)), None)
    with arguments.executors(devices, first, options) as executors:
        _search(tasks, store, executors, as_json=as_json)


def tune_missed(
    minutes: Annotated[
        float | None,
        typer.Option(min=0.001, callback=arguments.finite, help="Total minutes for all searches."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Include problems with almost no expected gain.")] = False,
    budget: arguments.Budget = 64,
    seconds: arguments.Seconds = None,
    own: arguments.Own = None,
    part: arguments.Part = "1/1",
    seed: arguments.Seed = 0,
    hardware: arguments.TargetChip = None,
    devices: arguments.Devices = None,
    workers: arguments.Workers = None,
    compile_timeout: arguments.CompileTimeout = None,
    run_timeout: arguments.RunTimeout = None,
    as_json: arguments.AsJson = False,
) -> None:
    """Tune the problems of calls on this chip that had no record (see misses), largest expected gain first."""
    options = arguments.runner_options(0, workers, compile_timeout, run_timeout, hardware)
    from scheduler.cli.misses import tasks_missed
    from scheduler.search.missed import TimeBudget
    from scheduler.search.task import SearchOptions
    from search_spaces import OPERATIONS, load

    with arguments.usage_errors():
        search = SearchOptions(budget, seconds, seed=seed)
    store, time_budget = arguments.user_store(), TimeBudget(None if minutes is None else 60 * minutes)
    with arguments.executors(devices, load(OPERATIONS[0]), options) as executors:
        executors[0].open()
        tasks = tasks_missed(store, executors[0].hardware, search, everything=everything, part=part)
        if tasks:
            _search(tasks, store, executors, in_order=True, bound=time_budget, as_json=as_json)
    if time_budget.left:
        say(f"{minutes:g} minutes are over, {time_budget.left} problems are left; run the same command to continue")


def replay(
    recording: Annotated[Path, typer.Argument(help="A recorded sweep (.jsonl.gz).")],
    budget: arguments.Budget = 64,
    seconds: arguments.Seconds = None,
    backends: arguments.Backends = None,
    sampler: arguments.SamplerName = "model",
    seed: arguments.Seed = 0,
    own: arguments.Own = None,
    keep: Annotated[bool, typer.Option("--store", help="Store the result in the cache.")] = False,
    as_json: arguments.AsJson = False,
) -> None:
    """Search a recorded sweep instead of a device, to try samplers and budgets anywhere."""
    from scheduler.measure.replay import Replay
    from scheduler.search import jobs
    from scheduler.search.job_queue import DeviceExecutor
    from scheduler.search.task import SearchOptions, Task
    from scheduler.store.store import Store
    from search_spaces import load_known

    recorded = Replay(recording)
    with arguments.usage_errors():
        op = load_known(recorded.sweep.operation)
        search = SearchOptions(
            budget, seconds, jobs.parse_backends(op, backends), seed, force=True, sampler=sampler,
        )  # fmt: skip
        task = Task(op, op.problem.from_canonical(recorded.sweep.problem), search)
    store = arguments.user_store() if keep else Store(":memory:")
    _search([task], store, [DeviceExecutor.of(recorded)], alone=True, as_json=as_json)


def _open_runner(
    context: typer.Context,
    operation: str,
    device: int,
    workers: int | None,
    compile_timeout: float | None,
    run_timeout: float | None,
) -> Future[Runner]:
    """Starts a runner in a thread, so that it starts while this process imports its other modules.

    The processes of a pool start even before this process imports JAX. The command closes them and the runner, which
    are still open if the command ends before a search.
    """
    from scheduler.measure.compilers import Processes
    from scheduler.measure.gpu import Gpu

    processes = None
    if (gpu := Gpu.wanted(device)) is not None or workers is not None:
        processes = Processes(gpu or Gpu.none(), workers)
        context.call_on_close(processes.close)
    options = arguments.runner_options(device, workers, compile_timeout, run_timeout)
    from scheduler.core.interrupts import in_thread
    from scheduler.measure.pool import start_runner
    from search_spaces import load

    with arguments.usage_errors():
        loaded = load(operation)
    opened = in_thread(functools.partial(start_runner, loaded, options, processes=processes), "scheduler-start")
    context.call_on_close(lambda: opened.result().close() if opened.exception() is None else None)
    return opened


def _search(
    tasks: Sequence[Task | Malformed],
    store: Store,
    executors: Sequence[Executor],
    *,
    alone: bool = False,
    in_order: bool = False,
    bound: Callable[[Task], Task | None] | None = None,
    as_json: bool,
) -> None:
    """Runs the tasks and prints their results.

    Args:
      alone: whether there is only one task, printed in detail.
      in_order, bound: as in `jobs.run`.

    Raises:
      SchedulerError: a problem failed, all schedules of a backend failed, or a record could not be stored.
    """
    from scheduler.search import jobs

    results: list[Result] = []
    status, several = SearchStatus(), len(executors) > 1

    def progress(step: Step) -> None:
        problem = f"{step.executor}: {step.task}" if several else str(step.task)
        status.search(step.search, problem, None if alone else step.job)

    try:
        # The job is closed here, so that an interrupt of this loop ends it before its results are printed.
        with (
            status.shown(str(tasks[0]) if alone else f"{len(tasks)} problems"),
            contextlib.closing(
                jobs.run(tasks, executors, store=store, in_order=in_order, bound=bound, progress=progress)
            ) as ended,
        ):
            for result in ended:
                results.append(result)
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
    output(*filter(None, [record_report.cost_text([result])]))
    if result.stored:
        output("Not stored: the store is in memory" if store.in_memory else f"Stored in {store.location}")


def _print_job(results: Sequence[Result], store: Store, as_json: bool) -> None:
    from scheduler.cli import record_report

    if as_json:
        print_json({"results": [record_report.result_json(result) for result in results], "cache": store.location})
    else:
        output(*record_report.results(results, console_here().width), *filter(None, [record_report.cost_text(results)]))
        if all(result.stored for result in results if result.record is not None) and any(r.stored for r in results):
            output(f"Stored in {store.location}")
