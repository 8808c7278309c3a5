"""What runs at each place of a fleet: a runner, and searches whose store is the driver's."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from scheduler.core import codec
from scheduler.core.errors import PlaceLost, SchedulerError
from scheduler.core.progress import Progress
from scheduler.core.records import Environment, Key, Record, Trial
from scheduler.core.similar import Near
from scheduler.fleet.messages import (
    Failed,
    Found,
    Message,
    Order,
    Reached,
    Tried,
    differences,
    kernel_versions,
    versions,
)
from scheduler.measure.compilers import Transport
from scheduler.measure.pool import Pool, open_runner
from scheduler.measure.runner import Runner, RunnerOptions
from scheduler.search.places import Device
from scheduler.search.task import How, Task
from scheduler.store.lease import Lease
from search_spaces import load
from search_spaces.errors import DeclarationError
from search_spaces.operation import Operation

if TYPE_CHECKING:
    from scheduler.store.studies import Described

Say = Callable[[Message], None]


class Agent:
    """Searches problems on the one device that it sees, one after the other.

    Args:
      options: of its runner, which is started when it is first needed, and anew after one that was lost.
      node: what tells hosts of one name apart.
    """

    def __init__(self, options: RunnerOptions, node: str = "") -> None:
        self._options, self._node = options, node
        self._helpers: list[Transport] = []
        self._pool: Pool | None = None
        self._device = Device(self._start)
        self._environment: Environment

    def _start(self) -> Runner:
        runner = open_runner(self._options)
        self._environment = runner.environment
        self._pool = runner if isinstance(runner, Pool) else None
        if self._pool is not None:
            self._pool.help(self._helpers)
        return runner

    def help(self, helpers: Sequence[Transport]) -> None:
        """Compile processes of other hosts take part in searches here from now on, one for each transport."""
        self._helpers += helpers
        if self._pool is not None:
            self._pool.help(helpers)

    def describe(self) -> dict[str, Any]:
        """Where it runs: what any version of the driver can read, so that it can tell that versions differ.

        Returns:
          `host`, `node`, `visible` (the GPU as CUDA_VISIBLE_DEVICES names it), `versions`; `target` and `environment`
          by their fields, and `slots` (how many candidates may be under way), or `unable`: why nothing can be measured
          here.
        """
        said: dict[str, Any] = {
            "host": socket.gethostname(),
            "node": self._node,
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            "versions": versions(),
        }
        try:
            self._device.open()
        except SchedulerError as error:
            return said | {"unable": str(error)}
        slots = 1 if self._pool is None else self._pool.slots
        target, environment = vars(self._device.hardware.target), vars(self._environment)
        return said | {"target": target, "environment": environment, "slots": slots}

    def search(self, order: Order) -> Iterator[Message]:
        """What happens while `order` is searched, as it happens; the last is `Found` or `Failed`."""
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
            if isinstance(message, Found | Failed):
                return

    def _searched(self, order: Order, say: Say) -> Found | Failed:
        relay = Relay(order, say)
        try:
            operation = _loaded(order)
            problem = operation.problem.from_canonical(order.problem)
            backends = frozenset(order.backends) or None
            first, brief = order.first, order.brief
            task = Task(operation, problem, order.budget, order.seconds, backends, first=first, brief=brief)
            how = How(order.seed, order.l2, sampler=order.sampler)
            self._device.open()
            record = self._device.search(task, how, relay, lambda step: say(_reached(step)))
        except PlaceLost as error:
            return Failed(str(error), device=True)
        except (SchedulerError, DeclarationError) as error:
            return Failed(str(error), finished=relay.finished)
        return Found(codec.record_to_text(record))


class Relay:
    """The driver's store as a search elsewhere sees it: what it asks for was sent along, what it tells is sent back."""

    def __init__(self, order: Order, say: Say) -> None:
        self._order, self._say = order, say
        self.finished = False

    def lease(self, key: Key, owner: str, seconds: float, *, silent: Lease | None = None) -> Lease:
        return Lease(owner, time.time() + seconds)  # the driver holds the one that counts

    def release(self, key: Key, owner: str) -> None:
        pass

    def get(self, key: Key) -> Record | None:
        return None

    def put(self, record: Record) -> None:
        pass  # it is what the search returns

    def finish(self, key: Key) -> None:
        self.finished = True

    def prepare_trials(self) -> None:
        pass  # the driver writes them

    def nearest(self, near: Near) -> list[Record]:
        return [codec.record_from_text(line) for line in self._order.near]

    def trials(self, key: Key, environment: Environment, *, unfinished: bool) -> list[Trial]:
        return [codec.trial_from_text(line) for line in self._order.known]

    def add_trial(self, key: Key, trial: Trial, environment: Environment, described: Described | None = None) -> None:
        self._say(Tried(codec.trial_to_text(trial)))

    def replace_trial(self, key: Key, trial: Trial) -> None:
        self._say(Tried(codec.trial_to_text(trial), refuted=True))


def _loaded(order: Order) -> Operation[Any]:
    """The operation of an order, if it is the driver's.

    Raises:
      SchedulerError: it cannot be loaded here, or is another version.
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


def _reached(step: Progress) -> Reached:
    def text(trial: Trial | None) -> str | None:
        return None if trial is None else codec.trial_to_text(trial)

    return Reached(step.done, step.budget, text(step.best), text(step.last), step.elapsed_s, step.eta_s, step.resumed)
