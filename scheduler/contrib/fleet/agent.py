"""Runs searches on one host of a fleet, with a runner of its own and the driver's store."""

from __future__ import annotations

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
    SearchEnded,
    SearchFailed,
    TrialEnded,
    differences,
    kernel_versions,
    versions,
)
from scheduler.core import codec
from scheduler.core.errors import ExecutorLost, SchedulerError
from scheduler.core.neighbours import Near
from scheduler.core.records import Environment, Key, Record, Trial
from scheduler.measure.pool import open_runner
from scheduler.measure.runner import Runner, RunnerOptions
from scheduler.search.job_queue import DeviceExecutor
from scheduler.search.task import Task
from scheduler.store.lease import Lease
from search_spaces import load
from search_spaces.operation import Operation
from search_spaces.space import DeclarationError

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
        self._device = DeviceExecutor(self._start)
        self._environment: Environment

    def _start(self) -> Runner:
        runner = open_runner(self._options)
        self._environment = runner.environment
        return runner

    def describe(self) -> dict[str, Any]:
        """Describes where the agent runs.

        Drivers of any version can read the result, so that they can detect different versions.

        Returns:
          `host`, `node`, `visible` (the GPU as in CUDA_VISIBLE_DEVICES) and `versions`. Also `target` and `environment`
            as fields; or `unable`, the reason why the agent cannot measure.
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
        target, environment = vars(self._device.hardware.target), vars(self._environment)
        return description | {"target": target, "environment": environment}

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
            self._device.open()
            task = Task(operation, problem, order.options)
            record = self._device.search(task, relay, say)
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
            "of a runtime environment: ray job submit --working-dir DIRECTORY -- tile-scheduler tune-job ...)"
        ) from error
    if wrong := differences(order.versions, kernel_versions(operation)):
        raise SchedulerError(
            f"host {host} has other kernels of {operation.name}: version of {wrong}; install the same on every host"
        )
    return operation
