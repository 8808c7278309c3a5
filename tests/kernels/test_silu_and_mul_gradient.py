"""The gradient of SiLU-and-mul: an operation of its own, in every order and mode of derivatives."""

import functools
import random

import hopper
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper_matmul import interpreted

import scheduler
from scheduler import tuned_gated_matmul, tuned_silu_and_mul
from scheduler.core.hardware import find
from scheduler.model.cost import CostModel
from scheduler.model.pruning import prune
from scheduler.prediction.predict import predict
from scheduler.store.store import shipped
from search_spaces.rows.formulas import SILU_AND_MUL_BACKWARD, SiluAndMulBackwardProblem, SiluAndMulJvpProblem

pytestmark = pytest.mark.slow_but_first

KERNEL = SILU_AND_MUL_BACKWARD.kernel("mosaic_gpu")
TARGET = hopper.H200.target
X = jax.random.normal(jax.random.key(0), (6, 32))


@pytest.fixture(autouse=True)
def _no_answers(_own_cache):
    scheduler.reload()


def written(x):
    gate, up = jnp.split(x, 2, axis=-1)
    return jax.nn.silu(gate) * up


DERIVATIVES = {
    "gradient": jax.grad,
    "forward mode": jax.jacfwd,
    "Hessian": jax.hessian,
    "gradient of a gradient": lambda f: jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2)),
    "batch of gradients": lambda f: jax.vmap(jax.grad(f), in_axes=0),
}


@pytest.mark.parametrize("backends", [None, "interpret"])
@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
def test_derivatives_are_those_of_the_formula(derivative, backends):
    tuned = functools.partial(tuned_silu_and_mul, backends=backends)
    ours, right = (derivative(lambda x, f=f: jnp.sum(jnp.sin(f(x))))(X) for f in (tuned, written))
    np.testing.assert_allclose(ours, right, rtol=1e-5, atol=1e-5)


def test_every_kernel_computes_the_gradient():
    problem = SiluAndMulBackwardProblem(24, 40)
    x, d_out = problem.inputs(seed=0)
    right = jax.vjp(written, x.astype(jnp.float32))[1](d_out.astype(jnp.float32))[0]
    for backend in ("interpret", "xla"):
        kernel = SILU_AND_MUL_BACKWARD.kernel(backend)
        space = kernel.space(problem, TARGET)
        for schedule in space.schedules(space.legal()[0]):
            found = kernel.run(problem, schedule, TARGET, x, d_out)
            assert found.dtype == jnp.bfloat16
            np.testing.assert_allclose(found.astype(jnp.float32), right, rtol=2**-7, atol=2**-13)


def test_a_backward_pass_poses_the_gradient_and_a_gated_product_its_passes():
    def posed(fn, *args):
        found = scheduler.problems(jax.grad(fn), *args).tuned
        return {f"{row.operation.name} {row.problem}" for row in found}

    x, w = jnp.zeros((8, 16), jnp.bfloat16), jnp.zeros((16, 24), jnp.bfloat16)
    forward, backward = (f"silu_and_mul{end} rows=8 columns=12 dtype=bfloat16" for end in ("", "_backward"))
    assert posed(lambda x: jnp.sum(tuned_silu_and_mul(x)), jnp.zeros((8, 24), jnp.bfloat16)) == {backward}
    gated = posed(lambda x: jnp.sum(tuned_gated_matmul(x, w) ** 2), x)
    assert {forward, backward, "matmul m=8 n=24 k=16 dtype=bfloat16"} <= gated


@interpreted
@pytest.mark.parametrize(
    "problem", [SiluAndMulBackwardProblem(24, 512), SiluAndMulBackwardProblem(9, 1000, "float16")], ids=str
)
def test_interpreted_kernels_agree_with_the_reference(problem):
    schedules = list(KERNEL.space(problem, TARGET).schedules(KERNEL.space(problem, TARGET).legal()[0]))
    for schedule in random.Random(0).sample(schedules, 2):
        actual, right = hopper.interpret(KERNEL, problem, schedule, cores=4)
        np.testing.assert_allclose(actual, right, rtol=2**-7, atol=2**-12)


def test_the_floor_is_three_halves_read_and_two_written():
    problem = SiluAndMulBackwardProblem(4096, 14336)
    points, _ = KERNEL.space(problem, TARGET).legal()
    found = KERNEL.footprint(problem, points, TARGET)
    half = 4096 * 14336 * 2
    assert problem.bytes_moved == 5 * half
    blocks = np.prod(np.broadcast_arrays(*found.grid), axis=0)
    loaded = sum(load.bytes for load in found.step.loads) * blocks
    np.testing.assert_allclose(loaded, 3 * half)
    np.testing.assert_allclose(found.tile.bytes_written * blocks, 2 * half)


def test_operands_that_do_not_belong_together_are_refused():
    x, d_out = jnp.zeros((4, 16)), jnp.zeros((4, 16))
    with pytest.raises(ValueError, match=r"x float32\[4, 16\] is not two of d_out float32\[4, 16\]"):
        SiluAndMulBackwardProblem.of(x, d_out)
    with pytest.raises(ValueError, match=r"are not alike, of two halves"):
        SiluAndMulJvpProblem.of(x, x[:, :8])


def test_xla_s_time_alone_says_nothing_of_a_function_in_which_it_is_taken_apart():
    h200 = find("NVIDIA H200")
    (record,) = shipped().records(operation=SILU_AND_MUL_BACKWARD.name, hardware=h200.id)
    assert record.best(frozenset({"xla"})).measurement.median_s < 140e-6
    for rows in (2048, 4000, 8192):
        answer = predict(
            SILU_AND_MUL_BACKWARD, SiluAndMulBackwardProblem(rows, 14336, "bfloat16"), h200, records=[record]
        )
        assert answer.backend == "mosaic_gpu", answer.reason


def test_what_xla_moves_where_it_is_taken_apart_keeps_it_out_of_no_search():
    h200 = find("NVIDIA H200")
    problem, library = SiluAndMulBackwardProblem(8192, 14336, "bfloat16"), SILU_AND_MUL_BACKWARD.library
    assert problem.library_bytes_moved > 1.5 * problem.bytes_moved
    (alone,) = prune(library, problem, h200, CostModel(h200)).candidates()
    assert alone.floor_s == 0.0
