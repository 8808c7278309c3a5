"""Tests that need a GPU; elsewhere they are skipped, and pytest's summary says so."""

import pytest

from scheduler.workers import Gpu, Pool
from search_spaces import jax_compat


@pytest.fixture(scope="session")
def pool():
    gpu = Gpu.query() if jax_compat.cuda_wanted() else None
    if gpu is None:
        pytest.skip("needs an NVIDIA GPU and a jax with CUDA")
    with Pool(gpu) as pool:
        yield pool
