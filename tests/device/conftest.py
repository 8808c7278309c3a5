"""Tests that need a GPU; elsewhere they are skipped, and pytest's summary says so."""

import itertools
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from scheduler.core.records import Measurement
from scheduler.measure.gpu import Gpu, cuda_wanted
from scheduler.measure.pool import Pool


def _take_a_share() -> None:
    """Of several processes of pytest-xdist, each takes a GPU and its part of the cores."""
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    gpus = sum(1 for _ in itertools.takewhile(lambda n: Gpu.query(n) is not None, itertools.count()))
    if processes > 1 and gpus > 0:
        number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[number % gpus]
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[number::processes])


_take_a_share()


@pytest.fixture(scope="session")
def pool():
    gpu = Gpu.query() if cuda_wanted() else None
    if gpu is None:
        pytest.skip("needs an NVIDIA GPU and a jax with CUDA")
    with Pool(gpu) as pool:
        yield pool


@pytest.fixture
def all_right(pool):
    """Runs tasks beside each other, and fails unless each was verified and timed by the device's own clock."""

    def check(tasks):
        with ThreadPoolExecutor(pool.slots) as threads:
            outcomes = list(threads.map(pool.measure, tasks))
        failed = [
            (task.operation.name, str(task.problem), task.schedule, outcome)
            for task, outcome in zip(tasks, outcomes, strict=True)
            if not isinstance(outcome, Measurement)
        ]
        assert not failed
        assert all(outcome.clock == "cupti" for outcome in outcomes)

    return check
