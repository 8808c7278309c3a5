"""Runs searches on one host of a fleet, with a runner of its own and the driver's store."""

from __future__ import annotations

import functools
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from scheduler.contrib.fleet.messages import (
    Message,
    Order,
    ProgressReport,
    SearchEnded,
    SearchFailed,
    TrialEnded,
    differences,
    kernel_versions,
    versions,
)
from scheduler.core import codec
from scheduler.core import hardware as chips
from scheduler.core.errors import ExecutorLost, SchedulerError
from scheduler.core.neighbours import Near
from scheduler.core.progress import Progress
from scheduler.core.records import Environment, Failure, Key, Record, Trial
from scheduler.measure.compilers import Compilers, Transport, count_of, read_files, write_files
from scheduler.measure.conversation import Timeouts, reply_of
from scheduler.measure.pool import Pool, open_runner
from scheduler.measure.protocol import Answer, Request, decode, encode
from scheduler.measure.runner import Runner, RunnerOptions
from scheduler.measure.runner import Task as MeasureTask
from scheduler.search.job_queue import DeviceExecutor
from scheduler.search.task import SearchOptions, Task
from scheduler.store.lease import Lease
from search_spaces import load
from search_spaces.operation import Operation
from search_spaces.space import DeclarationError
from search_spaces.target import Target

if TYPE_CHECKING:
    from scheduler.store.studies import Described


Say = Callable[[Message], None]


class Agent:
    """Searches problems one after another on the one visible device.

    Args:
      options: the options of the runner, which is started on first use and restarted after it is lost.
      node: distinguishes hosts with the same name.
    """

    def __init__(self, options: RunnerOptions, node: str = "") -> None:
        self._options, self._node = options, node
        self._helpers: list[Transport] = []
        self._pool: Pool | None = None
        self._device = DeviceExecutor(self._start)
        self._environment: Environment

    def _start(self) -> Runner:
        runner = open_runner(self._options)
        self._environment = runner.environment
        self._pool = runner if isinstance(runner, Pool) else None
        if self._pool is not None:
            self._pool.help(self._helpers)
        return runner

    def help(self, helpers: Sequence[Transport]) -> None:
        """Adds compile processes of other hosts to the searches here, one for each transport."""
        self._helpers += helpers
        if self._pool is not None:
            self._pool.help(helpers)

    def describe(self) -> dict[str, Any]:
        """Describes where the agent runs.

        Drivers of any version can read the result, so that they can detect different versions.

        Returns:
          `host`, `node`, `visible` (the GPU as in CUDA_VISIBLE_DEVICES) and `versions`. Also `target` and `environment`
            as fields, and `slots` (the maximum number of concurrent candidates); or `unable`, the reason why the agent
            cannot measure.
        """
        description: dict[str, Any] = {
            "host": socket.gethostname(),
            "node": self._node,
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            "versions": versions(),
        }
        try:
            self._device.open()
        except SchedulerError as error:
            return description | {"unable": str(error)}
        slots = 1 if self._pool is None else self._pool.slots
        target, environment = vars(self._device.hardware.target), vars(self._environment)
        return description | {"target": target, "environment": environment, "slots": slots}

    def search(self, order: Order) -> Iterator[Message]:
        """Searches `order`; yields messages about its progress; the last is `SearchEnded` or `SearchFailed`."""
        messages: queue.SimpleQueue[Message | BaseException] = queue.SimpleQueue()

        def work() -> None:
            try:
                messages.put(self._searched(order, messages.put))
            except BaseException as error:
                messages.put(error)

        threading.Thread(target=work, name="scheduler-search", daemon=True).start()
        while True:
            message = messages.get()
            if isinstance(message, BaseException):
                raise message
            yield message
            if isinstance(message, SearchEnded | SearchFailed):
                return

    def _searched(self, order: Order, say: Say) -> SearchEnded | SearchFailed:
        relay = Relay(order, say)
        try:
            operation = _loaded(order)
            problem = operation.problem.from_canonical(order.problem, order.reference)
            backends = frozenset(order.backends) or None
            task = Task(operation, problem, order.budget, order.seconds, backends)
            how = SearchOptions(order.seed, order.l2, sampler=order.sampler)
            self._device.open()
            record = self._device.search(task, how, relay, lambda step: say(_progress_report(step)))
        except ExecutorLost as error:
            return SearchFailed(str(error), device=True)
        except (SchedulerError, DeclarationError) as error:
            return SearchFailed(str(error), finished=relay.finished)
        return SearchEnded(codec.record_to_text(record))


class Relay:
    """The driver's store, as seen by a remote search.

    Reads return data that was sent with the order; writes are sent back as messages.
    """

    def __init__(self, order: Order, say: Say) -> None:
        self._order, self._say = order, say
        self._sent: dict[int, Trial] = {}
        self.finished = False

    def lease(self, key: Key, owner: str, seconds: float, *, expired: Lease | None = None) -> Lease:
        return Lease(owner, time.time() + seconds)  # the driver holds the effective lease

    def release(self, key: Key, owner: str) -> None:
        pass

    def get(self, key: Key) -> Record | None:
        return None

    def put(self, record: Record) -> None:
        pass  # the search returns the record

    def finish(self, key: Key) -> None:
        self.finished = True

    def prepare_trials(self) -> None:
        pass  # the driver writes them

    def nearest(self, near: Near) -> list[Record]:
        return [codec.record_from_text(line) for line in self._order.near]

    def trials(self, key: Key, environment: Environment, *, unfinished: bool) -> list[Trial]:
        return [codec.trial_from_text(line) for line in self._order.known]

    def save_trials(
        self, key: Key, trials: Sequence[Trial], environment: Environment, parameters: Described | None = None
    ) -> None:
        for trial in trials:
            if self._sent.get(trial.number) != trial:
                self._sent[trial.number] = trial
                self._say(TrialEnded(codec.trial_to_text(trial)))


def _loaded(order: Order) -> Operation[Any]:
    """Loads the operation of an order, and checks that its kernels match the driver's.

    Raises:
      SchedulerError: it cannot be loaded here, or has other versions.
    """
    host = socket.gethostname()
    try:
        operation = load(order.operation)
    except ValueError as error:
        raise SchedulerError(
            f"host {host}: {error}. Every host of a fleet must find the module of an operation: install it there, "
            "start Ray there with its directory on PYTHONPATH, or send the directory along (working_dir or py_modules "
            "of a runtime environment: ray job submit --working-dir DIRECTORY -- tile-scheduler tune ...)"
        ) from error
    if wrong := differences(order.versions, kernel_versions(operation)):
        raise SchedulerError(
            f"host {host} has other kernels of {operation.name}: version of {wrong}; install the same on every host"
        )
    return operation


def _progress_report(step: Progress) -> ProgressReport:
    def text(trial: Trial | None) -> str | None:
        return None if trial is None else codec.trial_to_text(trial)

    return ProgressReport(
        step.done, step.budget, text(step.best), text(step.last), step.elapsed_s, step.eta_s, step.resumed
    )


# ------------------------------------------------------------------------------
# A host of a fleet without a GPU, which compiles candidates for the GPUs of other hosts.


class CompileAgent:
    """Compile processes of one host, used by the measuring processes of other hosts.

    Args:
      options: the number of processes, and their timeouts.
    """

    def __init__(self, options: RunnerOptions) -> None:
        self._options = options
        self._compilers = Compilers(count_of(options.workers))
        self._timeouts: Timeouts | None = None

    def describe(self) -> dict[str, Any]:
        """Returns `host`, `versions`, and the `count` of processes."""
        return {"host": socket.gethostname(), "versions": versions(), "count": self._compilers.count}

    def begin(self, target: Target) -> None:
        """Starts the processes, which compile for `target`."""
        self._timeouts = Timeouts(self._options, chips.describe(target))
        self._compilers.start()
        self._compilers.set_target(target)

    def compile(self, message: bytes, files: dict[str, bytes]) -> tuple[bytes, dict[str, bytes]]:
        """Serves an encoded request; returns the encoded reply and the content of its files, by name.

        `files` holds the files that the request names. May be called from any thread.
        """
        request = decode(message)
        assert isinstance(request, Request)
        assert self._timeouts is not None, "`begin` comes first"
        write_files(files, self._compilers.directory)
        reply = reply_of(functools.partial(self._answer, request, self._timeouts), request.raising)
        if not isinstance(reply, Answer) or reply.programs is None:
            return encode(reply), {}
        made = read_files(reply.programs, self._compilers.directory)
        self._compilers.forget(reply.programs)
        return encode(reply), made

    def _answer(self, request: Request, timeouts: Timeouts) -> Answer:
        operation = load(request.operation)
        task = MeasureTask(
            operation,
            operation.problem.from_canonical(request.problem, request.reference),
            request.backend,
            request.schedule,
            request.repetitions,
            request.l2,
            raising=request.raising,
            fingerprint=request.fingerprint,
        )
        found = self._compilers.compile(task, request.do, timeouts, request.programs)
        return Answer(found) if isinstance(found, Failure) else Answer(None, programs=found)
