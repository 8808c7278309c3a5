"""The kernels that break a GPU on purpose do get as far as the GPU: they lower for CUDA here, where there is none."""

import sys
from pathlib import Path

import hopper
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "device"))
from faulty_kernels import DOUBLE, DoubleProblem, DoubleSchedule

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("behave", ["right", "out_of_bounds", "endless", "skips_a_tile"])
def test_a_kernel_that_breaks_a_gpu_lowers_for_cuda(behave):
    lowered = hopper.lower(DOUBLE.kernel("mosaic_gpu"), DoubleProblem(n=1024), DoubleSchedule(behave))
    assert "mosaic_gpu" in lowered.as_text()
