"""Offline tuning jobs: a list of problems, each searched once. A failed task does not stop the others."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import queue
import tomllib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from scheduler.core import interrupts
from scheduler.core.arguments import named_backends
from scheduler.core.codec import DEEPEST, require_shallow
from scheduler.core.interrupts import WAKE_S, Threads
from scheduler.core.progress import JobPace
from scheduler.core.text import warn_safely
from scheduler.measure.runner import Runner, RunnerOptions
from scheduler.search.job_queue import DeviceExecutor, Executor
from scheduler.search.job_run import JobRun, Lost, Step
from scheduler.search.task import Malformed, Result, SearchOptions, Task, problems_of, trials, value_text
from scheduler.store.store import Store
from search_spaces import load, load_known
from search_spaces.operation import Operation
from search_spaces.space import unknown

T = TypeVar("T")


def parse(text: str, *, own: Sequence[str] = (), options: SearchOptions | None = None) -> list[Task | Malformed]:
    """Parses the tasks of a job written in TOML.

    Top-level keys are `operation` (a name; ``package.module:NAME`` or ``file.py:NAME`` only if `own` contains it) and
    the settings shared by all problems: `budget` or `effort`, `seconds`, `backends` (comma-separated names, or
    "pallas"), and a table `[fields]`. Each `[[problem]]` table has the problem's fields, and may override `operation`,
    `budget`, `effort`, `seconds` or `backends`. It may also have `count`, the number of calls with this problem in a
    function, unless the problem has a field of that name. One extent may be a range, ``m = [1, 8192]``: a task for each
    of its `task.points`.

    Args:
      options: of each search, apart from the settings of the job.

    Raises:
      ValueError: the text is not TOML, or several problems are all invalid for the same reason. Other invalid problems
        become `Malformed` instead.
    """
    try:
        job = tomllib.loads(text.removeprefix("\ufeff"))  # byte order mark of some editors
        require_shallow(job)
    except RecursionError:
        raise ValueError(f"a job must be TOML with at most {DEEPEST} nested levels, found more") from None
    except ValueError as error:
        raise ValueError(f"a job must be valid TOML: {error}") from error
    known = [*_SETTINGS, "fields", "problem"]
    for name in job:
        if name not in known:
            raise ValueError(f"a job has no {unknown(name, known)}")
    problems, fields = job.pop("problem", []), job.pop("fields", {})
    if not isinstance(problems, list) or not all(isinstance(table, dict) for table in problems) or not problems:
        raise ValueError("a job needs at least one table [[problem]]")
    if not isinstance(fields, dict):
        raise ValueError(f"[fields] of a job must be a table, found {fields!r}")
    options = options or SearchOptions()
    tasks = [task for table in problems for task in _tasks(job, fields, table, own, options)]
    reasons = {task.reason if isinstance(task, Malformed) else "" for task in tasks}
    if len(tasks) > 1 and len(reasons) == 1 and (shared := reasons.pop()):
        raise ValueError(shared)
    return tasks


def _operation(name: str, own: Sequence[str]) -> Operation[Any]:
    try:
        return load(name) if name in own else load_known(name)
    except ValueError as error:
        raise ValueError(f"{error} (--own {name})" if ":" in name and name not in own else str(error)) from None


def part(items: Sequence[T], text: str) -> list[T]:
    """Returns every n-th element from the i-th, for the text ``i/n``: the share of one of n GPUs or hosts.

    Raises:
      ValueError: the text does not have that form, or i is not between 1 and n.
    """
    words = text.split("/")
    if len(words) != 2 or not all(word.strip().isdecimal() for word in words):
        raise ValueError(f"a part must be i/n, as in 1/4, found {text!r}")
    number, count = (int(word) for word in words)
    if not 1 <= number <= count:
        raise ValueError(f"a part i/n must have 1 <= i <= n, found {number}/{count}")
    return list(items[number - 1 :: count])


def parse_backends(operation: Operation[Any], text: str | None) -> frozenset[str] | None:
    """Parses backends: None for all, "pallas" for all except the library's, else comma-separated names.

    Raises:
      ValueError: the operation has no such backend; the message lists the valid ones.
    """
    if not isinstance(text, str | None):
        raise ValueError(f'backends must be comma-separated names or "pallas", found {text!r}')
    names = [name.strip() for name in text.split(",")] if text is not None else None
    return named_backends(operation, names[0] if names and len(names) == 1 else names)


def run(
    tasks: Iterable[Task | Malformed],
    executors: Sequence[Executor] | None = None,
    *,
    store: Store,
    runner: Runner | None = None,
    options: RunnerOptions | None = None,
    in_order: bool = False,
    bound: Callable[[Task], Task | None] | None = None,
    progress: Callable[[Step], None] | None = None,
) -> Generator[Result]:
    """Tunes the tasks that are not tuned yet, and yields the result of each task as it ends.

    Malformed and already tuned tasks come first. Each executor takes the next of the remaining tasks as soon as it is
    free. The order is that of `tasks` if only one search runs at a time, else by expected duration, longest first, so
    that no long search is left to a single executor at the end. A problem that another live process sharing `store` is
    tuning is left to that process. Several processes may therefore run the same job, and each problem is tuned once.

    If an executor is lost, its problem is retried once, by another executor if there is one. An executor that can be
    restarted gets a second chance.

    Args:
      executors: where problems are tuned, all with the same kind of chip; closed at the end.
      store: has the existing records, and receives every trial and record, from this process alone.
      runner: runs the candidates, as the only executor, instead of `executors`; it is not closed.
      options: instead of both, options of a runner that is started for all tasks and closed at the end.
      in_order: keep the order of `tasks` even with several executors.
      bound: called from any thread when a search is about to start. Returns the task with its current limits, or None
        if no time is left: the task then has no result.
      progress: called before the first trial of each search and after every trial, from the calling thread.

    Raises:
      CandidateFailed: as `tuner.tune`.
      SchedulerError: no executor can be opened; with one executor, the original error. Other errors of a task are in
        its `Result`.
    """
    listed = list(tasks)
    wanted = [task for task in listed if not isinstance(task, Malformed)]
    if executors is None:
        executors = (
            [DeviceExecutor.of(runner)]
            if runner is not None
            else [DeviceExecutor.for_operation(task.operation, options) for task in wanted[:1]]
        )
    pace = JobPace(len(wanted))
    job = JobRun(wanted, executors, store, pace, in_order=in_order, bound=bound or (lambda task: task))

    def stop() -> None:
        job.end()
        for executor in executors:
            executor.close()

    with contextlib.ExitStack() as stack:
        stack.callback(job.release)
        stack.callback(stop)
        yield from (Result(task, "failed", task.reason) for task in listed if isinstance(task, Malformed))
        if not wanted:
            return
        threads = stack.enter_context(Threads[Executor, None](len(executors), stop))
        for executor in executors:
            threads.start(executor, functools.partial(job.serve, executor))
        serving = len(executors)
        try:
            while serving:
                interrupts.check()
                try:
                    event = job.events.get(timeout=WAKE_S)
                except queue.Empty:
                    continue
                match event:
                    case Result():
                        yield event
                    case Step() if progress is not None:
                        progress(event)
                    case Lost(executor_name, reason):
                        warn_safely(f"{executor_name} is no longer used: {reason}", stacklevel=3)
                    case BaseException():
                        raise event
                    case None:
                        serving -= 1
        except BaseException:
            stop()
            raise


_SETTINGS = ("operation", "budget", "effort", "seconds", "backends")


def _tasks(
    job: Mapping[str, Any],
    fields: Mapping[str, Any],
    table: Mapping[str, Any],
    own_names: Sequence[str],
    options: SearchOptions,
) -> Sequence[Task | Malformed]:
    limits = () if {"budget", "effort"}.isdisjoint(table) else ("budget", "effort")  # a problem's own replace both
    shared = {name: value for name, value in job.items() if name not in limits}
    settings = shared | {name: value for name, value in table.items() if name in _SETTINGS}
    own = {name: value for name, value in table.items() if name not in _SETTINGS}
    text = " ".join(f"{name}={value}" for name, value in own.items())
    try:
        name = settings.get("operation")
        if not isinstance(name, str):
            raise ValueError('no operation: add operation = "matmul" (or yours) at the top of the job')
        text = f"{name} {text}"
        operation = _operation(name, own_names)
        fields_of = [field.name for field in dataclasses.fields(operation.problem)]
        count = 1 if "count" in fields_of else own.pop("count", 1)
        known = [*fields_of, *_SETTINGS, "count"]
        for field in (both := {**fields, **own}):
            if field not in known:
                raise ValueError(f"no field {unknown(field, known)}")
        search = dataclasses.replace(
            options,
            budget=trials(settings.get("budget"), settings.get("effort")),
            seconds=settings.get("seconds"),
            backends=parse_backends(operation, settings.get("backends")),
        )
        return tasks_of(operation, {field: value_text(field, value) for field, value in both.items()}, search, count)
    except (TypeError, ValueError) as error:
        return [Malformed(text, str(error))]


def tasks_of(
    operation: Operation[Any], texts: Mapping[str, str], options: SearchOptions | None = None, count: int = 1
) -> list[Task]:
    """Returns the task of the problem given by field texts; one for each point of a range, ``lowest..highest``.

    Raises:
      ValueError: as `task.problems_of`.
    """
    options = options or SearchOptions()
    return [Task(operation, problem, options, count) for problem in problems_of(operation, texts)]
