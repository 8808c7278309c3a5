"""JAX's own grouped product: right for any boundaries, and its on-chip memory as the footprint says."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper import H200, check_onchip_bytes, lower

from scheduler.model.cost import CostModel
from scheduler.model.pruning import prune
from search_spaces.jax_compat import HAS_GPU_INTERPRETER, gpu_interpreter
from search_spaces.ragged_dot.jax_kernels import JaxRaggedDot, JaxSchedule, zero_rows_of_no_group
from search_spaces.ragged_dot.problem import RaggedDotProblem, random_boundaries
from search_spaces.space import Columns

KERNEL = JaxRaggedDot()
SMALL = RaggedDotProblem(300, 4, 128, 128)
SCHEDULE = JaxSchedule(64, 128, 64, 2, 1)
pytestmark = pytest.mark.slow_but_first


@pytest.mark.skipif(not HAS_GPU_INTERPRETER, reason="JAX interprets GPU kernels from 0.11 on")
@pytest.mark.parametrize("transpose_rhs", [False, True])
@pytest.mark.parametrize(
    "boundaries", [[0, 100, 100, 160, 300], [37, 90, 90, 90, 250], [300] * 5, [0] * 5, [7, 8, 9, 10, 11]]
)
def test_it_is_right_for_any_boundaries(boundaries, transpose_rhs):
    problem = dataclasses.replace(SMALL, transpose_rhs=transpose_rhs)
    lhs, rhs, _ = problem.inputs(0)
    args = lhs, rhs, jnp.asarray(boundaries, jnp.int32)
    with gpu_interpreter():
        found = jax.jit(lambda *args: KERNEL.run(problem, SCHEDULE, dataclasses.replace(H200.target, cores=2), *args))(
            *args
        )
    tolerance = problem.tolerance()
    np.testing.assert_allclose(
        np.asarray(found, np.float32), problem.reference(*args), atol=tolerance.absolute, rtol=tolerance.relative
    )


def test_only_rows_of_no_group_become_zero():
    out = jnp.ones((300, 8))
    for seed in range(20):
        boundaries = random_boundaries(seed, 300, 3)
        row = np.arange(300)[:, None]
        kept = (row >= boundaries[0]) & (row < boundaries[-1])
        np.testing.assert_array_equal(zero_rows_of_no_group(out, jnp.asarray(boundaries)), np.where(kept, out, 0))


def test_its_footprint_has_the_bytes_that_mosaic_gpu_asks_for():
    problem = RaggedDotProblem(512, 8, 512, 1536)
    for schedule in (JaxSchedule(64, 128, 64, 4, 2), JaxSchedule(128, 192, 64, 6, 1), JaxSchedule(192, 64, 64, 2, 8)):
        footprint = KERNEL.footprint(problem, Columns.of([schedule]), H200.target)
        check_onchip_bytes(KERNEL, problem, schedule, int(footprint.onchip_bytes[0]))


def test_the_model_ranks_its_schedules():
    problem = RaggedDotProblem(8192, 8, 4096, 14336)
    assert KERNEL.supports(problem, H200.target) is None
    pruned = prune(KERNEL, problem, H200, CostModel(H200))
    assert len(pruned.candidates()) > 10
    lower(KERNEL, problem, pruned.space.decode(pruned.candidates()[0].schedule))


def test_it_refuses_what_it_cannot_multiply():
    for problem in (
        RaggedDotProblem(64, 4, 96, 128),
        RaggedDotProblem(64, 4, 128, 128, "float32"),
        RaggedDotProblem(64, 4, 128, 128, out_dtype="float32"),
    ):
        assert KERNEL.supports(problem, H200.target)
