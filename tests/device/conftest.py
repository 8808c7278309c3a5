"""Tests that need a GPU; elsewhere they are skipped, and pytest's summary says so."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from scheduler.record import Measurement
from scheduler.workers import Gpu, Pool
from search_spaces import jax_compat


@pytest.fixture(scope="session")
def pool():
    gpu = Gpu.query() if jax_compat.cuda_wanted() else None
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
            (task.schedule, outcome)
            for task, outcome in zip(tasks, outcomes, strict=True)
            if not isinstance(outcome, Measurement)
        ]
        assert not failed
        assert all(outcome.clock == "cupti" for outcome in outcomes)

    return check
