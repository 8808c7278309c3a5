"""The driver's side of a remote search: builds the order, and stores the results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from scheduler.contrib.fleet.messages import (
    Message,
    Order,
    SearchEnded,
    SearchFailed,
    TrialEnded,
    kernel_versions,
)
from scheduler.core import codec
from scheduler.core.errors import ExecutorLost, SchedulerError
from scheduler.core.hardware import Hardware
from scheduler.core.progress import Progress
from scheduler.core.records import Environment, Key, Record, key_of
from scheduler.search.baseline import similar_records
from scheduler.search.task import Task
from scheduler.search.trials import TrialStore, TrialWriter
from search_spaces import locate

if TYPE_CHECKING:
    from scheduler.store.studies import Described


def order(task: Task, hardware: Hardware, environment: Environment, store: TrialStore) -> Order:
    """Builds the order with which an agent on such a chip searches a problem as this process would.

    Raises:
      SchedulerError: no other process can load the operation, or the sampler is an object.
      StoreError: the store cannot be read.
    """
    operation, options = task.operation, task.options
    name = locate(operation)
    if name is None:
        raise SchedulerError(f"no other process can load {operation.name}: define it at the top level of a module")
    if not isinstance(options.sampler, str):
        raise SchedulerError("a sampler object cannot be sent to other processes: give it as module:NAME")
    key = key_of(operation, task.problem, hardware)
    similar = similar_records(operation, task.problem, hardware, store)
    return Order(
        operation=name,
        problem=key.problem,
        options=options,
        versions=kernel_versions(operation),
        near=tuple(map(codec.record_to_text, similar)),
        known=tuple(map(codec.trial_to_text, store.trials(key, environment, unfinished=True))),
        reference=task.problem.reference_text(),
    )


def received(
    messages: Iterable[Message],
    key: Key,
    environment: Environment,
    store: TrialStore,
    progress: Callable[[Progress], None],
    parameters: Described | None = None,
) -> Record:
    """Receives a remote search and returns its record; `store` receives each trial when it arrives, and the record.

    Args:
      parameters: returns the parameters of a trial for Optuna's dashboard.

    Raises:
      ExecutorLost: the device was lost, or the messages ended before the search did.
      SchedulerError: the search ended without a record; the message gives the reason.
    """
    with TrialWriter(store, key, environment, parameters) as writer:
        for message in messages:
            match message:
                case TrialEnded(text):
                    writer.add(codec.trial_from_text(text))
                    writer.flush()
                case Progress():
                    progress(message)
                case SearchEnded(text):
                    record = codec.record_from_text(text)
                    writer.finish(functools.partial(_put, record), "the record")
                    return record
                case SearchFailed(reason, finished, device):
                    if finished:
                        writer.finish(lambda store: store.finish(key), "the end of the search")
                    raise (ExecutorLost if device else SchedulerError)(reason)
    raise ExecutorLost("the search ended without a result")


def _put(record: Record, store: TrialStore) -> None:
    store.put(record)
