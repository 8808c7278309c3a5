"""The matmul by warp-level MMA on a CPU: what it supports, its space, and small products interpreted."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from failures import failures
from mma_matmul import A40, A100, BASE, CASES, H200, KERNEL, L40S, case, check, needs_mma

from scheduler.core import hardware
from scheduler.measure import build
from scheduler.model.cost import CostModel
from scheduler.model.pruning import prune
from search_spaces import Columns, Target
from search_spaces.jax_compat import HAS_MMA, gpu_interpreter
from search_spaces.matmul import MATMUL
from search_spaces.matmul.mma import MosaicGpuMmaMatmul
from search_spaces.matmul.problem import MatmulProblem

pytestmark = pytest.mark.slow_but_first

GPUS = hardware.rows("cuda")
PRODUCTS = [
    MatmulProblem(4096, 4096, 4096),
    MatmulProblem(1, 1, 1),
    MatmulProblem(16, 8192, 8192, transpose_b=True),
    MatmulProblem(1000, 1000, 1000, transpose_a=True),
    MatmulProblem(512, 512, 65536, out_dtype="float32"),
    MatmulProblem(33, 5027, 4096, dtype="int8", out_dtype="int32", transpose_b=True),
    MatmulProblem(4096, 4096, 1024, batch=3, bias="float32", activation="gelu", residual="float32"),
]


@needs_mma
@pytest.mark.parametrize("chip", [A100, A40, L40S], ids=lambda chip: chip.architecture)
def test_it_is_for_the_chips_before_hopper_and_answers_nothing_that_was_not_measured(chip):
    assert KERNEL.supports(PRODUCTS[0], chip.target) is None
    points, _ = KERNEL.space(PRODUCTS[0], chip.target).legal()
    assert not np.any(KERNEL.verified(PRODUCTS[0], points, chip.target))


def test_what_it_cannot_do_it_refuses_in_words():
    kernel, product = MATMUL.kernel("mosaic_gpu_mma"), PRODUCTS[0]
    assert "not for NVIDIA T4 (sm_75)" in kernel.supports(product, Target("cuda", "NVIDIA T4", "sm_75", 40))
    assert "sm_90" in kernel.supports(product, H200.target), "wgmma is faster there"


@needs_mma
@pytest.mark.parametrize(
    ("problem", "chip", "reason"),
    [
        (MatmulProblem(64, 64, 64, dtype="float8_e4m3fn", out_dtype="float32", transpose_b=True), A40, "not float8"),
        (MatmulProblem(64, 64, 64, dtype="float32"), L40S, "not float32"),
        (MatmulProblem(64, 64, 64, dtype="int8", out_dtype="int32"), L40S, "transpose_b alone"),
    ],
    ids=str,
)
def test_what_a_chip_cannot_multiply_it_refuses_in_words(problem, chip, reason):
    assert reason in KERNEL.supports(problem, chip.target)
    fp8 = MatmulProblem(64, 64, 64, dtype="float8_e4m3fn", out_dtype="float32", transpose_b=True)
    assert KERNEL.supports(fp8, L40S.target) is None


@needs_mma
def test_on_hopper_it_runs_for_whoever_asks_for_it():
    assert MosaicGpuMmaMatmul(also_on=("sm_90",)).supports(PRODUCTS[0], H200.target) is None


@pytest.mark.skipif(HAS_MMA, reason="this JAX is new enough")
def test_an_older_jax_is_named():
    assert "0.11.2" in KERNEL.supports(PRODUCTS[0], A100.target)


@needs_mma
def test_every_problem_has_schedules_that_fit_and_no_term_of_wgmma_or_tma():
    def check(item):
        problem, chip = item
        if KERNEL.supports(problem, chip.target):
            assert chip.architecture in ("sm_90", "sm_100")
            return
        candidates = prune(KERNEL, problem, chip, CostModel(chip)).candidates()
        assert candidates
        points, _ = KERNEL.space(problem, chip.target).legal()
        terms = CostModel(chip).terms(KERNEL.footprint(problem, points, chip.target))
        assert not any(
            np.any(terms[name]) for name in ("wgmma_bubble", "tma_rows", "oob_fill", "cluster_sync", "dsmem")
        )
        assert np.all(terms["mma"] > 0)

    assert failures(check, itertools.product(PRODUCTS, GPUS), lambda item: f"{item[0]} on {item[1].kind}") == []


@needs_mma
@pytest.mark.parametrize("name", CASES)
def test_the_cases_are_schedules_of_their_spaces_but_for_what_searches_need_not_try(name):
    problem, schedule = case(name)
    needless = (
        "where rasterization",
        "split-K gives",
        "with under 16 KiB",
        "warps multiply parts",
        "eight warps compute",
    )
    one = Columns.of([schedule])
    broken = [reason for reason, rule in KERNEL.space(problem, A100.target).rules.items() if not np.all(rule(one))]
    assert all(reason.startswith(needless) for reason in broken)


@needs_mma
@pytest.mark.parametrize("name", CASES)
def test_interpreted_it_computes_what_the_reference_does(name):
    problem, schedule = case(name)
    with gpu_interpreter():
        run = jax.jit(lambda *args: KERNEL.run(problem, schedule, A100.target, *args))
        answer = jax.block_until_ready(run(*problem.inputs(seed=0)))
    check(problem, answer)


@needs_mma
@pytest.mark.parametrize("problem", PRODUCTS, ids=str)
def test_onchip_bytes_are_what_lowering_asks_for(problem):
    candidates = prune(KERNEL, problem, L40S, CostModel(L40S)).candidates()
    space = KERNEL.space(problem, L40S.target)
    one = space.decode(candidates[len(candidates) // 2].schedule)
    mesh = jax.sharding.AbstractMesh(
        (1,),
        ("x",),
        abstract_device=jax.sharding.AbstractDevice(device_kind=L40S.kind, num_cores=L40S.cores, platform="cuda"),
    )
    with jax.sharding.use_abstract_mesh(mesh):
        asked = build.requested_onchip_bytes(build.lower_candidate(KERNEL, problem, one, L40S.target))
    assert asked == KERNEL.footprint(problem, Columns.of([one]), L40S.target).onchip_bytes[0]


@needs_mma
def test_a_stage_more_takes_its_bytes_and_no_register():
    problem = PRODUCTS[0]
    few, more = (dataclasses.replace(BASE, stages=stages) for stages in (3, 4))
    one = KERNEL.footprint(problem, Columns.of([few, more]), L40S.target)
    assert np.diff(one.onchip_bytes)[0] == (BASE.tile_m + BASE.tile_n) * BASE.tile_k * 2
    assert len(set(np.ravel(one.registers).tolist())) == 1
