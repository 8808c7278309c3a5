"""Ray actors on which problems are tuned, one for each GPU of a cluster; only this module uses Ray."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from scheduler.contrib.fleet.agent import Agent
from scheduler.contrib.fleet.driver import order, received
from scheduler.contrib.fleet.messages import differences, versions
from scheduler.core import hardware as chips
from scheduler.core.errors import ExecutorLost, MissingPackage, SchedulerError
from scheduler.core.hardware import Hardware
from scheduler.core.progress import Progress
from scheduler.core.records import Environment, Record, key_of
from scheduler.measure.runner import RunnerOptions
from scheduler.search.task import Task
from scheduler.search.trials import TrialParameters, TrialStore
from search_spaces.target import Target

# How often an agent process is restarted. An agent that dies more often has a permanent fault.
RESTARTS = 2
CONNECT_S = 5.0
# The time in which an agent imports JAX, perhaps from a network file system, and starts its workers.
START_S = 180.0
# How long to wait for agents that seemed to have no free GPU: resources of work that has just ended may still be
# reserved.
LATE_S = 10.0
# After this time without a network connection, a host counts as lost. Ray itself takes half a minute to give a host up.
RETURN_S = 60.0
# How long a thread may take to notice that its actor was killed.
RETIRE_S = 10.0

_log = logging.getLogger("scheduler")


class RayExecutor:
    """An actor of a cluster that tunes problems of a job (`job_queue.Executor`).

    Args:
      description: the description of the actor (`Agent.describe`).
    """

    searches = 1

    def __init__(self, actor: Any, description: Mapping[str, Any]) -> None:
        self.name: str
        self.hardware: Hardware
        self._environment: Environment
        self._actor, self._lost = actor, False
        self._using = threading.Lock()
        self._set_description(description)

    def _set_description(self, description: Mapping[str, Any]) -> None:
        self.name = (
            f"{description['host']} GPU {description['visible']}"
            if description["visible"]
            else f"{description['host']} {description['node']}"
        )
        self.hardware = chips.describe(Target(**description["target"]))
        self._environment = Environment(**description["environment"])

    def tracer(self, task: Task) -> None:
        return None

    def open(self) -> None:
        """Waits for a lost actor; Ray restarts it up to `RESTARTS` times if its host is still there."""
        until = time.monotonic() + RETURN_S
        with self._using:
            while self._lost:
                self._reopen(until)

    def _reopen(self, until: float) -> None:
        ray = _ray()
        try:
            description = ray.get(self._actor.describe.remote(), timeout=max(0.0, until - time.monotonic()))
        except ray.exceptions.ActorUnavailableError as error:
            if time.monotonic() > until:
                raise SchedulerError(f"it was unreachable for {RETURN_S:g} s") from error
            time.sleep(1.0)
        except ray.exceptions.RayError as error:
            raise SchedulerError(f"it does not restart ({_reason(error)})") from error
        else:
            if "unable" in description:
                raise SchedulerError(description["unable"])
            self._set_description(description)
            self._lost = False

    def search(self, task: Task, store: TrialStore, progress: Callable[[Progress], None]) -> Record:
        with self._using:
            ray = _ray()
            key = key_of(task.operation, task.problem, self.hardware)
            try:
                ordered = order(task, self.hardware, self._environment, store)
                stream = self._actor.search.options(num_returns="streaming").remote(ordered)
                parameters = TrialParameters(task.operation, task.problem, self.hardware.target)
                return received(map(ray.get, stream), key, self._environment, store, progress, parameters)
            except ExecutorLost:
                self._lost = True
                raise
            except ray.exceptions.RayTaskError:
                raise  # a defect of this package, with its traceback
            except ray.exceptions.RayError as error:
                self._lost = True
                raise ExecutorLost(f"it was lost ({_reason(error)})") from error

    def close(self) -> None:
        with contextlib.suppress(Exception):  # the actor or the cluster may be gone
            _ray().kill(self._actor)

    def retire(self) -> None:
        """Waits until no thread uses the killed actor; a thread that was abandoned (Ctrl-C) then never uses Ray again.

        A call of Ray after its shutdown ends this process with status 1.
        """
        self._using.acquire(timeout=RETIRE_S)


@contextlib.contextmanager
def executors(address: str = "auto", options: RunnerOptions | None = None) -> Iterator[list[RayExecutor]]:
    """Starts an actor for each free GPU of a cluster, of one kind of chip; without GPUs, one for each host.

    The context manager reserves the GPUs and hosts. Actors stop when the
    context ends, or when this process ends, however that happens.

    Args:
      address: the cluster, as `ray.init` takes it: "auto" finds the running cluster on this host or the one in
        RAY_ADDRESS; "local" starts a cluster on this host only.
      options: the options of the runners; `device` is ignored, because an actor sees one GPU. `hardware` selects the
        chips to use, if the cluster has several kinds.

    Raises:
      MissingPackage: Ray is not installed.
      SchedulerError: there is no cluster, none of its GPUs is free, its versions differ, or it has several kinds of
        chips.
    """
    ray = _ray()
    starts_ray = not ray.is_initialized()
    if starts_ray:
        _connect(address)
    actors: list[Any] = []
    found: list[RayExecutor] = []
    try:
        options = options or RunnerOptions()
        room = _start_actors(options, actors)
        found = of_one_kind(_described(actors, room), options.hardware)
        yield found
    finally:
        for actor in actors:
            with contextlib.suppress(Exception):
                ray.kill(actor)
        for executor in found:
            executor.retire()
        if starts_ray:
            ray.shutdown()


def _ray() -> Any:
    # Ray reads this variable once, on import. Ray prints a page to standard output for each lost actor, whatever its
    # log settings. Standard output is for results, and this module reports losses itself.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    try:
        import ray
    except ImportError:
        raise MissingPackage(
            "a fleet needs Ray, which is not installed: pip install 'tile-scheduler[ray]' on every host"
        ) from None
    return ray


def _connect(address: str) -> None:
    to = os.environ.get("RAY_ADDRESS", "auto") if address == "auto" else address
    if to not in ("auto", "local"):
        _require_reachable(to)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray prints a page for each loss; this module reports losses itself.
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    if address == "local":
        quiet["include_dashboard"] = False
    terminate = signal.getsignal(signal.SIGTERM)
    try:
        _ray().init(address=to, **quiet)
    except ConnectionError as error:
        raise _no_cluster(to, _reason(error)) from error
    except (RuntimeError, ValueError, TimeoutError, _ray().exceptions.RayError) as error:
        raise SchedulerError(f"the Ray cluster at {to} cannot be used: {_reason(error)}") from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, terminate)  # Ray replaces the handler


def _require_reachable(address: str) -> None:
    """Raises an error if the address cannot be reached; Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        raise SchedulerError(f"the address of a Ray cluster must be HOST:PORT, auto or local, found {address!r}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise _no_cluster(address, str(error)) from error


def _no_cluster(address: str, reason: str) -> SchedulerError:
    return SchedulerError(
        f"no Ray cluster at {address} ({reason}); start one: ray start --head --port=6379 here, and ray start "
        "--address=HERE:6379 on the other hosts, or use --devices ray:local for this host alone; if a token protects "
        "the cluster, copy ~/.ray/auth_token to this host and set RAY_AUTH_MODE=token"
    )


def _start_actors(options: RunnerOptions, into: list[Any]) -> int:
    """Starts an actor for each GPU with its share of the host's cores, or for each host if there are no GPUs.

    Returns:
      how many can start now; the others wait for GPUs that other work uses.
    """
    ray = _ray()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    with_gpus = [node for node in nodes if node["Resources"].get("GPU", 0) >= 1]
    free = ray.available_resources().get("GPU", 0)
    for node in with_gpus or [node for node in nodes if node["Resources"].get("CPU", 0) >= 1]:
        gpus, cores = int(node["Resources"].get("GPU", 0)), int(node["Resources"].get("CPU", 0))
        share = cores // max(1, gpus)
        # Ray does not enforce `num_cpus`, so the number of workers is limited here. Otherwise each actor would use
        # every core of its host.
        workers = options.workers or (max(1, share - 1) if gpus else None)
        actor = ray.remote(Agent).options(
            num_cpus=share,
            num_gpus=1 if gpus else 0,
            max_restarts=RESTARTS,
            max_task_retries=0,  # the driver retries the search elsewhere, from the stored trials
            scheduling_strategy=_on(node),
        )
        settings = dataclasses.replace(options, device=0, workers=workers, hardware="")
        into += [actor.remote(settings, node["NodeID"][:6]) for _ in range(max(1, gpus))]
    return int(free) if with_gpus else len(into)


def _on(node: Mapping[str, Any]) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)


def _described(actors: Sequence[Any], room: int) -> list[RayExecutor]:
    """Returns the actors that started and can measure; a warning reports the others.

    Args:
      room: how many can start.

    Raises:
      SchedulerError: no actor is left, or versions differ.
    """
    ray = _ray()
    answers = {actor.describe.remote(): actor for actor in actors}
    if answers:
        ray.wait(list(answers), num_returns=min(len(answers), max(1, room)), timeout=START_S)
        ray.wait(list(answers), num_returns=len(answers), timeout=LATE_S)
    descriptions: list[tuple[Any, Mapping[str, Any]]] = []
    excluded: list[str] = []
    for answer, actor in answers.items():
        try:
            descriptions.append((actor, ray.get(answer, timeout=0)))
        except ray.exceptions.GetTimeoutError:
            excluded.append("other work uses its resources, or it does not start")
            ray.kill(actor)
        except ray.exceptions.RayError as error:
            excluded.append(f"no agent starts there; is tile-scheduler installed? ({_reason(error)})")
    here = versions()
    if others := [
        f"{description['host']}: {wrong}"
        for _, description in descriptions
        if (wrong := differences(here, description["versions"]))
    ]:
        raise SchedulerError(
            f"all hosts of a fleet need the same versions; others are on {'; '.join(dict.fromkeys(others))}"
        )
    excluded += [
        f"{description['host']}: {description['unable']}" for _, description in descriptions if "unable" in description
    ]
    found = [RayExecutor(actor, description) for actor, description in descriptions if "unable" not in description]
    reasons = "; ".join(f"{count} x {why}" for why, count in collections.Counter(excluded).items())
    if not found:
        raise SchedulerError(
            f"none of {len(actors)} actors of the cluster can measure: {reasons or 'it has neither GPUs nor cores'}"
        )
    if excluded:
        _log.warning("%d of %d actors of the cluster are left out: %s", len(excluded), len(actors), reasons)
    return found


def of_one_kind(found: Sequence[RayExecutor], wanted: str) -> list[RayExecutor]:
    """Selects the actors on the chips that `wanted` names.

    Raises:
      SchedulerError: there are none, or they have several kinds of chips: a record is of one kind.
    """
    kinds = collections.Counter(place.hardware.id for place in found)
    there = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    meant = chips.named(wanted, kinds)
    if len(meant) != 1:
        reason = f"{wanted or 'the cluster'} matches several" if meant else f"the cluster has no {wanted}"
        raise SchedulerError(f"a job needs one kind of chip, but {reason} ({there}); select one: --hardware h200")
    return [place for place in found if place.hardware.id == meant[0]]


def _reason(error: BaseException) -> str:
    """Returns the first line of an error of Ray.

    For an actor that did not start, Ray quotes a traceback. Its last line is returned, which has the reason.
    """
    lines = [line for line in str(error).strip().splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1 if "Traceback" in str(error) else 0].strip()
