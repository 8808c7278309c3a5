"""The kernels of the teaching documents on a GPU: every sampled legal schedule is right."""

import random
import sys
from pathlib import Path

import pytest

from scheduler.measure.runner import Task
from scheduler.model.cost import CostModel
from scheduler.model.pruning import prune
from search_spaces.flash_attention import FlashAttentionProblem
from search_spaces.matmul import MatmulProblem

sys.path.append(str(Path(__file__).parents[2] / "examples" / "seeds"))
from teaching_attention import TEACHING_ATTENTION
from teaching_matmul import TEACHING_MATMUL


@pytest.mark.parametrize(
    ("operation", "problem"),
    [
        (TEACHING_MATMUL, MatmulProblem(1024, 2048, 1024, "float32")),
        (TEACHING_MATMUL, MatmulProblem(1024, 2048, 1024, "bfloat16")),
        (TEACHING_ATTENTION, FlashAttentionProblem(2, 1024, 2048, 4, 4, 64, dtype="float16")),
        (TEACHING_ATTENTION, FlashAttentionProblem(2, 1024, 1024, 4, 4, 128, dtype="bfloat16")),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_sampled_schedules_of_teaching_kernels_agree_with_the_reference(pool, all_right, operation, problem):
    candidates = prune(operation.kernels[0], problem, pool.hardware, CostModel(pool.hardware)).candidates()
    sample = random.Random(0).sample(candidates, min(12, len(candidates)))
    all_right([Task(operation, problem, c.backend, c.schedule, 3) for c in sample])
