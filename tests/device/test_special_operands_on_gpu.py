"""Special operands on a GPU: the kernels that are asked about them give the answers that operations promise."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from scheduler.measure.runner import Task
from scheduler.model.cost import CostModel
from scheduler.model.pruning import prune
from search_spaces import load_known
from search_spaces.flash_attention import FlashAttentionProblem
from search_spaces.flash_attention_backward import FlashAttentionBackwardProblem
from search_spaces.gated_matmul import GatedMatmulProblem
from search_spaces.matmul import MatmulProblem
from search_spaces.scaled_matmul import ScaledMatmulProblem

ROWS = ("softmax", "rms_norm", "add_rms_norm", "silu_and_mul", "silu_and_mul_backward")
# Operations that cancel the mean of a row ("offset").
NORMS = ("layer_norm", "layer_norm_backward", "log_softmax", "rms_norm_backward")
DTYPES = ("bfloat16", "float16", "float32")
CASES = [
    *(("matmul", MatmulProblem(512, 384, 1000, dtype=dtype)) for dtype in DTYPES),
    ("matmul", MatmulProblem(512, 384, 1000, dtype="float32", precision="high")),
    *(("matmul", MatmulProblem(512, 384, 1024, dtype=dtype, out_dtype=out, transpose_b=True)) for dtype, out in (
        ("int8", "int32"), ("float8_e4m3fn", "bfloat16"), ("float8_e5m2", "float32")
    )),
    *(("matmul", MatmulProblem(512, 384, 1000, bias="bfloat16", activation=name)) for name in ("gelu", "silu")),
    *(("gated_matmul", GatedMatmulProblem(512, 384, 1000, dtype=dtype)) for dtype in ("bfloat16", "float16")),
    ("scaled_matmul", ScaledMatmulProblem(512, 384, 1024, transpose_b=True)),
    *((name, load_known(name).problem(1000, 4096, dtype)) for name in ROWS for dtype in DTYPES),
    *((name, load_known(name).problem(512, 1024, dtype)) for name in NORMS for dtype in DTYPES),
    *(("group_norm", load_known("group_norm").problem(8, 256, 64, 8, dtype)) for dtype in DTYPES),
    *(("softmax", load_known("softmax").problem(64, columns)) for columns in (1000, 65536, 151936)),
    *(("flash_attention", FlashAttentionProblem(2, 512, 512, 4, 2, 128, causal=True, return_lse=True, dtype=dtype))
      for dtype in ("bfloat16", "float16")),
    ("flash_attention", FlashAttentionProblem(2, 300, 515, 6, 3, 64, softcap=True)),
    ("flash_attention", FlashAttentionProblem(4, 1, 8192, 32, 4, 128, kv_lengths=True)),
    *(("flash_attention_backward", FlashAttentionBackwardProblem(2, 512, 512, 4, 2, 128, causal=causal))
      for causal in (False, True)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "problem"), CASES, ids=str)
def test_the_first_schedules_of_each_kernel_are_confirmed(pool, name, problem):
    operation, tasks = load_known(name), []
    for kernel in operation.kernels:
        if not kernel.library and kernel.supports(problem, pool.hardware.target) is None:
            candidates = prune(kernel, problem, pool.hardware, CostModel(pool.hardware)).candidates()[:3]
            tasks += [Task(operation, problem, c.backend, c.schedule, 3) for c in candidates]
    with ThreadPoolExecutor(pool.slots) as threads:
        failures = list(threads.map(pool.confirm, tasks))
    assert tasks
    failed = [(task.backend, task.schedule, str(found)) for task, found in zip(tasks, failures, strict=True) if found]
    assert failed == []
