"""The grouped products' GPU kernels, compiled and run: sampled legal schedules are right for many sizes of groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from samples import of_each_part, parts_without_any

from scheduler.model.cost import CostModel
from scheduler.model.pruning import prune
from search_spaces.matmul.hopper.schedule import PING_PONG
from search_spaces.ragged_dot import GATED_RAGGED_DOT, RAGGED_DOT, RAGGED_DOT_WEIGHTS
from search_spaces.ragged_dot.problem import (
    GatedRaggedDotProblem,
    RaggedDotProblem,
    RaggedDotWeightsProblem,
    random_boundaries,
)

ROWS = [
    RaggedDotProblem(4096, 8, 1024, 1024),
    RaggedDotProblem(3001, 16, 520, 264, "float16", "float32", transpose_rhs=True),
    RaggedDotProblem(256, 64, 1024, 768),
    RaggedDotProblem(40, 3, 2048, 512, transpose_rhs=True),
]
GATED = [GatedRaggedDotProblem(4096, 8, 1024, 1024), GatedRaggedDotProblem(100, 16, 768, 520, transpose_rhs=True)]
WEIGHTS = [
    RaggedDotWeightsProblem(4096, 8, 1024, 768),
    RaggedDotWeightsProblem(3001, 16, 520, 264, "float16", "float32"),
    RaggedDotWeightsProblem(200, 32, 512, 512),
]
PARTS = {
    "plain": lambda s: not ({"swap_ab", "delay_release"} & set(s)) and s["consumers"] not in ("one", *PING_PONG),
    "swap_ab": lambda s: "swap_ab" in s,
    "multicast": lambda s: s["cluster"] in ("m", "n"),
    "one consumer": lambda s: s["consumers"] == "one",
    "ping-pong": lambda s: s["consumers"] in PING_PONG,
    "most accumulators": lambda s: s["tile_m"] * s["tile_n"] > 128 * 128,
}
EACH = [
    *((RAGGED_DOT, p) for p in ROWS),
    *((GATED_RAGGED_DOT, p) for p in GATED),
    *((RAGGED_DOT_WEIGHTS, p) for p in WEIGHTS),
]


@pytest.mark.parametrize(("operation", "problem"), EACH, ids=str)
def test_sampled_schedules_agree_with_the_reference(pool, all_right, operation, problem):
    all_right(of_each_part(operation, problem, pool.hardware, PARTS, first=1, others=2))


def test_every_part_of_the_space_has_schedules_among_the_problems(pool):
    assert not parts_without_any(RAGGED_DOT, ROWS, pool.hardware, PARTS)


@pytest.mark.parametrize(("operation", "problem"), EACH, ids=str)
def test_a_hundred_random_size_vectors(pool, operation, problem):
    kernel = operation.kernel("mosaic_gpu")
    first, *_ = prune(kernel, problem, pool.hardware, CostModel(pool.hardware)).candidates()
    one = kernel.space(problem, pool.hardware.target).decode(first.schedule)
    *operands, _ = problem.inputs(0)
    run = jax.jit(lambda *args: kernel.run(problem, one, pool.hardware.target, *args))
    reference, tolerance = jax.jit(problem.reference), problem.tolerance()
    for seed in range(100):
        edges = jnp.asarray(random_boundaries(seed, problem.rows, problem.groups))
        found, wanted = (np.asarray(f(*operands, edges), np.float32) for f in (run, reference))
        np.testing.assert_allclose(
            found, wanted, atol=tolerance.absolute, rtol=tolerance.relative, err_msg=f"{one} {np.asarray(edges)}"
        )


@pytest.mark.parametrize("operation", [RAGGED_DOT, RAGGED_DOT_WEIGHTS], ids=str)
def test_more_elements_of_all_matrices_than_32_bit_indices_reach(pool, operation):
    rows, groups, k, n = 2048, 160, 7168, 2048
    problem = operation.problem(rows, groups, k, n)
    assert groups * k * n > 2**31
    first, *_ = prune(operation.kernel("mosaic_gpu"), problem, pool.hardware, CostModel(pool.hardware)).candidates()
    one = operation.kernel("mosaic_gpu").space(problem, pool.hardware.target).decode(first.schedule)
    lhs, rhs, _ = problem.inputs(0)
    edges = jnp.asarray(np.r_[np.full(groups, 0), rows], jnp.int32)  # all rows are in the last group
    out = operation.kernel("mosaic_gpu").run(problem, one, pool.hardware.target, lhs, rhs, edges)
    found, other = (out, rhs[-1]) if operation is RAGGED_DOT else (out[-1], rhs)
    wanted = jnp.dot(lhs if operation is RAGGED_DOT else lhs.T, other, preferred_element_type=jnp.float32)
    tolerance = problem.tolerance()
    np.testing.assert_allclose(np.asarray(found, np.float32), wanted, atol=tolerance.absolute, rtol=tolerance.relative)
