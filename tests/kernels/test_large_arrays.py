"""Arrays that indices of 32 bits do not reach: no kernel is asked for them, and the library answers."""

import jax
import jax.numpy as jnp
import pytest

import scheduler
from scheduler.core import hardware as chips
from search_spaces import OPERATIONS, load
from search_spaces.flash_attention import FlashAttentionProblem
from search_spaces.flash_attention_backward import FlashAttentionBackwardProblem
from search_spaces.gated_matmul import GatedMatmulProblem
from search_spaces.kernel import INDICES_OF_32_BITS
from search_spaces.matmul import MatmulProblem
from search_spaces.rows.formulas import RmsNormProblem
from search_spaces.scaled_matmul import ScaledMatmulProblem

pytestmark = pytest.mark.slow_but_first

HALF = 2**15
SEQUENCES = {"batch": 2**11, "q_len": 2**10, "kv_len": 2**10, "heads": 8, "kv_heads": 8}
# One array of each has 2^31 elements: an operand, a result, a batch of either.
LARGE = [
    ("matmul", MatmulProblem(2 * HALF, HALF, 64)),
    ("matmul", MatmulProblem(2 * HALF, 64, HALF)),
    ("matmul", MatmulProblem(64, HALF, 2 * HALF, transpose_b=True)),
    ("matmul", MatmulProblem(2**10, 2**10, 2**6, batch=2**11)),
    ("matmul", MatmulProblem(HALF, HALF, 2**6, batch=2, dtype="float32", out_dtype="float32")),
    ("gated_matmul", GatedMatmulProblem(2 * HALF, HALF, 64, pair=True)),
    ("gated_matmul", GatedMatmulProblem(64, HALF, HALF)),
    ("scaled_matmul", ScaledMatmulProblem(2 * HALF, HALF, 128, transpose_b=True)),
    ("rms_norm", RmsNormProblem(2 * HALF, HALF)),
    ("flash_attention", FlashAttentionProblem(head_dim=128, **SEQUENCES)),
    ("flash_attention_backward", FlashAttentionBackwardProblem(head_dim=128, **SEQUENCES)),
    ("flash_attention_backward", FlashAttentionBackwardProblem(head_dim=256, **SEQUENCES)),
]


def targets():
    return [chip.target for chip in chips.table() if chip != chips.CPU]


def test_every_kernel_but_those_of_libraries_says_which_arrays_its_indices_reach():
    for name in OPERATIONS:
        for kernel in load(name).kernels:
            wanted = None if kernel.library or kernel.vendor else INDICES_OF_32_BITS
            assert kernel.most_elements == wanted, (name, kernel.backend)


@pytest.mark.parametrize(("name", "problem"), LARGE, ids=str)
def test_no_kernel_supports_an_array_beyond_its_indices_on_any_chip(name, problem):
    for kernel in load(name).kernels:
        if kernel.most_elements is not None:
            assert kernel.largest_array(problem) > kernel.most_elements
            assert all(kernel.supports(problem, target) is not None for target in targets())


@pytest.mark.parametrize(("name", "problem"), LARGE, ids=str)
def test_the_library_is_lowered_for_such_arrays_and_a_call_without_it_says_why(name, problem):
    operation = load(name)
    operands = [jax.ShapeDtypeStruct(s.shape, s.dtype) for s in problem.operands()]

    def call(*args):
        from scheduler.dispatch import dispatch
        from scheduler.dispatch.primitive import tuned_call

        return tuned_call(operation, problem, *args, options=dispatch.options(operation, target="NVIDIA H200"))

    with scheduler.target("NVIDIA H200"):
        lowered = jax.jit(call).trace(*operands).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" not in lowered.as_text()


def test_the_reason_reaches_whoever_leaves_the_library_out():
    a, b = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2 * HALF, 64), (64, HALF)))
    with scheduler.target("NVIDIA H200"), pytest.raises(scheduler.NoCandidate, match=r"indices reach 2147483647 ele"):
        jax.jit(lambda a, b: scheduler.tuned_matmul(a, b, backends="pallas")).trace(a, b).lower(
            lowering_platforms=("cuda",)
        )


def test_padding_counts():
    matmul = load("matmul").kernel("mosaic_gpu")
    assert matmul.supports(MatmulProblem(2**25, 8, 8), chips.find("NVIDIA H200").target) is not None
    assert matmul.supports(MatmulProblem(2**23, 128, 128), chips.find("NVIDIA H200").target) is None
