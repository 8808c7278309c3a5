"""The backward pass of attention on Hopper: values in the GPU interpreter, and SMEM as lowering asks for it."""

import dataclasses
import re

import numpy as np
import pytest
from hopper import H200, check_gradients, check_onchip_bytes, lower

from search_spaces.flash_attention_backward.hopper import (
    FlashAttentionBackwardSchedule,
    MosaicGpuFlashAttentionBackward,
)
from search_spaces.flash_attention_backward.hopper.plan import DqPlan, Plan
from search_spaces.flash_attention_backward.problem import FlashAttentionBackwardProblem
from search_spaces.jax_compat import HAS_GPU_INTERPRETER
from search_spaces.space import Columns

pytestmark = pytest.mark.slow_but_first

KERNEL = MosaicGpuFlashAttentionBackward()
SCHEDULE = FlashAttentionBackwardSchedule(64, 2, 2, 2, True, 1)
PROBLEM = FlashAttentionBackwardProblem(batch=1, q_len=128, kv_len=128, heads=1, kv_heads=1, head_dim=64)
SEPARATE = {"dq": "separate", "ds_stages": 1}
PLAIN = dataclasses.replace(SCHEDULE, overlap=False)

needs_new_ref = pytest.mark.skipif(not HAS_GPU_INTERPRETER, reason="the kernel needs JAX 0.11")


def posed(**fields):
    return dataclasses.replace(PROBLEM, **fields)


@needs_new_ref
@pytest.mark.parametrize(
    ("problem", "schedule"),
    [
        (posed(), SCHEDULE),
        (posed(q_len=200, kv_len=144, causal=True), SCHEDULE),
        (posed(q_len=100, kv_len=61, head_dim=128), PLAIN),
        (
            posed(heads=4, kv_heads=2, causal=True, q_len=192, kv_len=256, head_dim=96),
            dataclasses.replace(SCHEDULE, section=2),
        ),
        (posed(window_left=30, window_right=50, q_len=200, kv_len=260), SCHEDULE),
        (posed(batch=2, q_lengths=True, kv_lengths=True, q_len=160, kv_len=300), SCHEDULE),
        (posed(softcap=True), PLAIN),
        (posed(q_len=256), dataclasses.replace(PLAIN, block_q=128, ds_stages=1)),
        (
            posed(head_dim=128, head_dim_v=64, lse_cotangent=True, dtype="float16"),
            dataclasses.replace(SCHEDULE, do_stages=1),
        ),
        (posed(q_len=40, kv_len=300, causal=True), SCHEDULE),
        (posed(q_len=256, kv_len=300, heads=2, kv_heads=1), dataclasses.replace(PLAIN, rotate=True)),
        (posed(deterministic=True, head_dim=128), dataclasses.replace(SCHEDULE, **SEPARATE)),
        (
            posed(deterministic=True, q_len=200, kv_len=330, causal=True, heads=2, kv_heads=1),
            dataclasses.replace(PLAIN, **SEPARATE),
        ),
        (
            posed(batch=2, window_left=30, window_right=50, kv_lengths=True, q_len=200, kv_len=260, softcap=True),
            dataclasses.replace(PLAIN, **SEPARATE),
        ),
        (posed(batch=2, q_len=129, kv_len=129, heads=2, kv_heads=1, head_dim=128, causal=True), SCHEDULE),
        (posed(q_len=201, kv_len=77), dataclasses.replace(PLAIN, block_q=128, ds_stages=1)),
        (
            posed(deterministic=True, q_len=129, kv_len=203, head_dim=128, head_dim_v=96, window_left=50),
            dataclasses.replace(SCHEDULE, **SEPARATE),
        ),
    ],
    ids=[
        "plain",
        "ragged",
        "short",
        "grouped",
        "window",
        "lengths",
        "softcap",
        "rows",
        "values",
        "few_queries",
        "rotated",
        "separate",
        "separate_causal",
        "separate_window",
        "odd",
        "odd_rows",
        "odd_separate",
    ],
)
def test_gradients_agree_with_the_reference(problem, schedule):
    check_gradients(KERNEL, problem, schedule)


@needs_new_ref
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_onchip_bytes_are_what_lowering_asks_for(head_dim):
    problem = posed(q_len=1024, kv_len=1024, heads=4, kv_heads=2, head_dim=head_dim, causal=True)
    points, _ = KERNEL.space(problem, H200.target).legal()
    assert len(points)
    found = KERNEL.footprint(problem, points, H200.target)
    for schedule, predicted in zip(
        KERNEL.space(problem, H200.target).schedules(points), found.onchip_bytes, strict=True
    ):
        check_onchip_bytes(KERNEL, problem, schedule, int(predicted))


@needs_new_ref
@pytest.mark.parametrize("fields", [{}, {"head_dim": 256}], ids=str)
def test_lengths_that_8_does_not_divide_are_neither_padded_nor_cut_out(fields):
    problem = posed(q_len=3001, kv_len=3001, heads=2, kv_heads=2, **{"head_dim": 128} | fields)
    space = KERNEL.space(problem, H200.target)
    points, _ = space.legal()
    fitting = points.take(KERNEL.footprint(problem, points, H200.target).onchip_bytes <= H200.onchip_bytes)
    around = lower(KERNEL, problem, next(space.schedules(fitting))).as_text()
    moved = re.findall(r"stablehlo\.(?:pad|slice|concatenate|dynamic_slice).*-> tensor<(\w+)>", around)
    # Only float32 is: the log-sum-exp and delta, and the sums for dq, whose conversion XLA does in the same fusion.
    assert not [shape for shape in moved if not shape.endswith("f32")]


def test_footprints_count_what_is_multiplied():
    problem = posed(q_len=1024, kv_len=1024, heads=4, kv_heads=2)
    found = KERNEL.footprint(problem, Columns.of([SCHEDULE]), H200.target)
    multiplied = found.step.flops * found.steps * np.prod([axis[0] for axis in found.grid])
    np.testing.assert_allclose(multiplied, problem.flops)


def test_the_same_bits_are_wanted_of_sums_in_one_order():
    for wanted, dq in ((False, "reduce_add"), (True, "separate")):
        points, _ = KERNEL.space(posed(deterministic=wanted, q_len=1024, kv_len=1024), H200.target).legal()
        assert set(points.dq) == {dq}


def test_spaces_are_small_and_begin_with_the_best_measured_section():
    long = {"batch": 2, "q_len": 4096, "kv_len": 4096, "heads": 16, "kv_heads": 16, "head_dim": 128}
    for fields in ({}, {"causal": True}, {"deterministic": True}, {"head_dim": 64}):
        space = KERNEL.space(posed(**long | fields), H200.target)
        points, _ = space.legal()
        assert 4 <= len(points) <= 40
        assert next(iter(space.schedules(points))).section == (4 if "causal" in fields else 1)


@needs_new_ref
def test_a_kernel_of_its_own_for_dq_asks_for_the_onchip_bytes_of_its_plan():
    problem = posed(q_len=256, kv_len=256, deterministic=True)
    for head_dim in (64, 96, 128):
        problem = dataclasses.replace(problem, head_dim=head_dim)
        schedule = dataclasses.replace(SCHEDULE, **SEPARATE)
        check_onchip_bytes(KERNEL, problem, schedule, DqPlan(problem).onchip_bytes)
        found = KERNEL.footprint(problem, Columns.of([schedule]), H200.target)
        assert found.onchip_bytes == max(DqPlan(problem).onchip_bytes, Plan(problem, schedule).onchip_bytes)


@needs_new_ref
@pytest.mark.parametrize(
    "fields", [{"kv_lengths": True}, {"kv_len": 203}, {"q_lengths": True, "kv_lengths": True}], ids=str
)
def test_a_kernel_of_dq_that_masks_only_an_end_is_lowered(fields):
    """(In seconds: layouts of its mask once took Mosaic GPU more than minutes.)"""
    lower(KERNEL, posed(deterministic=True, **fields), dataclasses.replace(PLAIN, **SEPARATE))
