"""Kernels that break the device for real: each fails at its stage, and the next one is measured."""

import sys
from pathlib import Path

import pytest

from scheduler.core.records import Failure, Measurement
from scheduler.measure.gpu import Gpu, cuda_wanted
from scheduler.measure.pool import Pool
from scheduler.measure.runner import RunnerOptions, Task

sys.path.insert(0, str(Path(__file__).parent))
from faulty_kernels import DOUBLE, DoubleProblem

PROBLEM = DoubleProblem(n=2**20)
RUN_TIMEOUT_S = 10.0


@pytest.fixture(scope="module")
def pool():
    gpu = Gpu.query() if cuda_wanted() else None
    if gpu is None:
        pytest.skip("needs an NVIDIA GPU and a jax with CUDA")
    with Pool(gpu, RunnerOptions(workers=2, run_timeout_s=RUN_TIMEOUT_S)) as pool:
        assert isinstance(pool.measure(task("right")), Measurement)
        yield pool


def task(behave):
    return Task(DOUBLE, PROBLEM, "mosaic_gpu", {"behave": behave}, 10)


@pytest.mark.parametrize(
    ("behave", "stage", "words"),
    [
        ("out_of_bounds", "verify", "ILLEGAL_ADDRESS"),
        ("endless", "timeout", f"run did not end within {RUN_TIMEOUT_S:.3g} s"),
        ("skips_a_tile", "verify", f"{256} of {2**20} elements are off"),
    ],
)
@pytest.mark.parametrize("attempt", [1, 2])
def test_a_kernel_that_breaks_the_device_fails_alone(pool, behave, stage, words, attempt):
    failed = pool.measure(task(behave))
    assert isinstance(failed, Failure)
    assert (failed.stage, words in failed.detail) == (stage, True), failed
    for _ in range(pool.slots):
        assert isinstance(pool.measure(task("right")), Measurement)
