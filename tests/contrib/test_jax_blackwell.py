"""JAX's kernels for Blackwell, without one: rules, on-chip memory, machine code, and values where they are interpreted.

This file as a program compiles one of them for a B200.
"""

import dataclasses
import json
import random
import sys

import jax
import machine_code
import numpy as np
import pytest
from hopper import onchip_bytes_asked

import search_spaces
from scheduler.core import hardware
from scheduler.model.cost import CostModel
from scheduler.model.pruning import illegal, prune
from search_spaces import Problem, jax_compat
from search_spaces.contrib.jax_blackwell import BlackwellSchedule
from search_spaces.jax_compat import HAS_GPU_INTERPRETER, JAX_VERSION, gpu_interpreter
from search_spaces.matmul import MATMUL, MatmulProblem
from search_spaces.ragged_dot import RAGGED_DOT, RaggedDotProblem

B200 = hardware.find("B200")
PRODUCT = MATMUL.kernel("jax_blackwell")
GROUPED = RAGGED_DOT.kernel("jax_blackwell")
SCHEDULE = BlackwellSchedule(128, 64, 64, 2, False, 64, "N", 8)
TOGETHER = dataclasses.replace(SCHEDULE, collective=True)
WIDE = {"collective": False, "tile_n": 256, "epilogue_tile_n": 128, "max_concurrent_steps": 3}
PROBLEMS = [
    (PRODUCT, MatmulProblem(4096, 6144, 4096)),
    (PRODUCT, MatmulProblem(256, 192, 128, dtype="float16")),
    (GROUPED, RaggedDotProblem(4096, 8, 1024, 1536)),
    (GROUPED, RaggedDotProblem(256, 3, 128, 128, dtype="float16")),
]


@pytest.fixture(autouse=True)
def _blackwell(monkeypatch):
    monkeypatch.setattr("jax.experimental.mosaic.gpu.utils._infer_arch", lambda: (10, 0), raising=False)


def lowering(kernel, problem, schedule):
    traced = jax.jit(lambda *args: kernel.run(problem, schedule, B200.target, *args)).trace(*problem.operands())
    return lambda: traced.lower(lowering_platforms=("cuda",))


@pytest.mark.always
@pytest.mark.parametrize(("kernel", "problem"), PROBLEMS, ids=lambda x: str(x) if isinstance(x, Problem) else x.backend)
def test_legal_schedules_are_lowered_and_ask_for_the_on_chip_memory_of_their_footprint(kernel, problem):
    pruned = prune(kernel, problem, B200, CostModel(B200))
    best, *others = pruned.candidates()
    for candidate in (best, *random.Random(0).sample(others, 3)):
        lower = lowering(kernel, problem, pruned.space.decode(candidate.schedule))
        assert onchip_bytes_asked(lower) == candidate.onchip_bytes
        lower()


@pytest.mark.parametrize(
    ("kernel", "problem", "schedule", "ours", "theirs"),
    [
        (PRODUCT, MatmulProblem(128, 256, 256), TOGETHER, "divide m", "must be divisible by tile_m=256"),
        (PRODUCT, MatmulProblem(256, 192, 256), TOGETHER, "divide n", "must be divisible by tile_n=128"),
        (
            PRODUCT,
            MatmulProblem(256, 256, 320),
            dataclasses.replace(SCHEDULE, tile_k=128),
            "tile_k divides k",
            "must be divisible by tile_k=128",
        ),
        (
            PRODUCT,
            MatmulProblem(256, 256, 256),
            dataclasses.replace(SCHEDULE, epilogue_tile_n=128),
            "epilogue_tile_n divides",
            "must be divisible by epilogue_tile_n=128",
        ),
        (
            PRODUCT,
            MatmulProblem(256, 512, 256),
            dataclasses.replace(TOGETHER, tile_n=256),
            "tensor memory",
            "exceeding the limit of 512",
        ),
        (
            PRODUCT,
            MatmulProblem(256, 512, 1024),
            dataclasses.replace(SCHEDULE, tile_n=256, max_concurrent_steps=5),
            "bytes of on-chip memory",
            "exceeds available shared memory",
        ),
        (PRODUCT, MatmulProblem(256, 256, 256), dataclasses.replace(SCHEDULE, tile_m=64), "tile_m", "layout"),
        (GROUPED, RaggedDotProblem(512, 2, 256, 384), dataclasses.replace(TOGETHER, tile_n=128), "divide n", "tile_n="),
        (
            GROUPED,
            RaggedDotProblem(512, 2, 256, 512),
            dataclasses.replace(TOGETHER, tile_n=256),
            "tensor memory",
            "exceeding the limit of 512",
        ),
        (GROUPED, RaggedDotProblem(512, 2, 256, 256), SCHEDULE, "collective", "x"),  # no axis x
    ],
)
def test_what_the_rules_exclude_is_what_the_kernel_rejects(kernel, problem, schedule, ours, theirs):
    assert ours in illegal(kernel, problem, B200, dataclasses.asdict(schedule))
    with pytest.raises((ValueError, NameError), match=theirs):
        lowering(kernel, problem, schedule)()


def test_problems_that_it_cannot_multiply_and_other_chips_are_refused_with_a_reason(monkeypatch):
    for kernel, problem, reason in (
        (PRODUCT, MatmulProblem(256, 256, 256, dtype="float32"), "bfloat16 and float16"),
        (PRODUCT, MatmulProblem(256, 256, 256, transpose_b=True), "one [m, k] by one [k, n]"),
        (PRODUCT, MatmulProblem(256, 256, 256, activation="gelu"), "without an epilogue"),
        (PRODUCT, MatmulProblem(192, 256, 256), "128 rows"),
        (PRODUCT, MatmulProblem(256, 256, 64), "2 steps along k"),
        (GROUPED, RaggedDotProblem(384, 4, 256, 256), "256 rows, 128 columns"),
        (GROUPED, RaggedDotProblem(512, 4, 256, 256, transpose_rhs=True), "transposed"),
        (GROUPED, RaggedDotProblem(512, 4, 256, 256, out_dtype="float32"), "their dtype"),
    ):
        assert reason in kernel.supports(problem, B200.target)
    for kernel, problem in PROBLEMS:
        assert "Blackwell (sm_100), not for NVIDIA H200" in kernel.supports(problem, hardware.find("H200").target)
        assert not kernel.verified_on
    assert "has no jax.experimental.pallas.ops.gpu.none_mgpu" in jax_compat.jax_gpu_kernels_missing("none_mgpu")


@pytest.mark.skipif(not HAS_GPU_INTERPRETER, reason="JAX interprets GPU kernels from 0.11 on")
@pytest.mark.parametrize(
    ("k", "changed"),
    [
        (128, {}),
        (256, {"max_concurrent_steps": 4, "tile_n": 128, "grid_minor_dim": "M"}),
        pytest.param(
            512,
            {"max_concurrent_steps": 3, "epilogue_tile_n": 32},
            marks=pytest.mark.skipif(
                JAX_VERSION < (0, 12), reason="the interpreter of JAX 0.11 wants a wait for each reuse of a stage"
            ),
        ),
    ],
)
def test_one_cta_multiplies_rightly(k, changed):
    """The interpreter has no products of two CTAs, so neither `collective` nor the grouped product is interpreted."""
    problem, schedule = MatmulProblem(256, 256, k), dataclasses.replace(SCHEDULE, **changed)
    assert not illegal(PRODUCT, problem, B200, dataclasses.asdict(schedule))
    args = problem.inputs(0)
    with gpu_interpreter(skip_inline=True):
        found = jax.jit(lambda *args: PRODUCT.run(problem, schedule, B200.target, *args))(*args)
    tolerance = problem.tolerance()
    np.testing.assert_allclose(
        np.asarray(found, np.float32), problem.reference(*args), atol=tolerance.absolute, rtol=tolerance.relative
    )


@machine_code.needed()
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fields", "changed"),
    [
        ("matmul", {"m": 4096, "n": 6144, "k": 4096}, {}),
        ("matmul", {"m": 4096, "n": 6144, "k": 4096}, WIDE),
        ("ragged_dot", {"rows": 4096, "groups": 8, "k": 1024, "n": 1536}, {}),
    ],
)
def test_it_is_compiled_for_sm_100a_without_spilling(name, fields, changed, tmp_path):
    said, *_ = machine_code.compiled(__file__, tmp_path, json.dumps([name, fields, changed]), architecture="sm_100")
    assert machine_code.sound(said), said


def main(case: str) -> None:
    name, fields, changed = json.loads(case)
    operation = search_spaces.load(name)
    machine_code.compile_changed(operation.kernel("jax_blackwell"), operation.problem(**fields), changed, B200)


if __name__ == "__main__":
    main(sys.argv[1])
