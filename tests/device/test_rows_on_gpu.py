"""The GPU kernels of the row-wise operations, compiled and run: every sampled legal schedule is right."""

import random

import pytest

from scheduler.measure.runner import Task
from scheduler.model.cost import CostModel
from scheduler.model.pruning import prune
from search_spaces.rows.formulas import (
    ADD_RMS_NORM,
    RMS_NORM,
    SILU_AND_MUL,
    SILU_AND_MUL_BACKWARD,
    SOFTMAX,
    AddRmsNormProblem,
    RmsNormProblem,
    SiluAndMulBackwardProblem,
    SiluAndMulProblem,
    SoftmaxProblem,
)

OPERATIONS = {
    SoftmaxProblem: SOFTMAX,
    RmsNormProblem: RMS_NORM,
    AddRmsNormProblem: ADD_RMS_NORM,
    SiluAndMulProblem: SILU_AND_MUL,
    SiluAndMulBackwardProblem: SILU_AND_MUL_BACKWARD,
}
ALONE = (SoftmaxProblem, RmsNormProblem, SiluAndMulProblem)
EXTENTS = [
    (4096, 1024, "bfloat16"),
    (4096, 4096, "bfloat16"),
    (1000, 8192, "float16"),
    (1001, 1000, "float32"),
    (37, 4095, "bfloat16"),
    (5, 129, "float16"),
    (600, 32768, "bfloat16"),
    (300, 131072, "bfloat16"),
    (133, 151936, "bfloat16"),
    (1000, 65536, "bfloat16"),
    (140, 65536, "float32"),
    (7, 262144, "bfloat16"),
    (70, 524288, "bfloat16"),
    # Rows that start anywhere.
    (133, 50257, "bfloat16"),
    (1, 50257, "bfloat16"),
    (300, 32001, "float16"),
    (301, 24577, "bfloat16"),
    (140, 65537, "float32"),
    (67, 128257, "bfloat16"),
    (9, 262145, "bfloat16"),
    (133, 50264, "bfloat16"),
]
WIDER = [RmsNormProblem(*extents, weight_dtype="float32") for extents in EXTENTS if extents[2] != "float32"]
# Two operands and two results; by themselves: -k AddRmsNorm.
ADDED = [
    AddRmsNormProblem(*extents)
    for extents in [
        (16, 4096, "bfloat16"),
        (4096, 4096, "bfloat16", "float32"),
        (1001, 1000, "float32"),
        (37, 4095, "float16"),
        (300, 8192, "bfloat16"),
        (301, 32768, "bfloat16"),
        (133, 50257, "bfloat16", "float32"),
        (67, 100000, "bfloat16"),
        (9, 262145, "float16"),
    ]
]

# A pass of three loads and two stores; by themselves: -k Backward.
GRADIENTS = [
    SiluAndMulBackwardProblem(*extents)
    for extents in [
        (4096, 14336, "bfloat16"),
        (256, 14336, "float16"),
        (1001, 1000, "float32"),
        (37, 4095, "bfloat16"),
        (5, 129, "float16"),
        (301, 24577, "bfloat16"),
    ]
]


@pytest.mark.parametrize(
    "problem",
    [*(problem(*extents) for problem in ALONE for extents in EXTENTS), *WIDER, *ADDED, *GRADIENTS],
    ids=lambda p: f"{type(p).__name__}({p})",
)
def test_sampled_schedules_agree_with_the_reference(pool, all_right, problem):
    operation = OPERATIONS[type(problem)]
    kernel = operation.kernel("mosaic_gpu")
    if reason := kernel.supports(problem, pool.hardware.target):
        pytest.skip(reason)
    candidates = prune(kernel, problem, pool.hardware, CostModel(pool.hardware)).candidates()
    sample = candidates[:4] + random.Random(0).sample(candidates, min(16, len(candidates)))
    all_right([Task(operation, problem, c.backend, c.schedule, 3) for c in sample])
