"""The backward pass of attention of wide heads on Hopper: values in the GPU interpreter, and SMEM as lowering asks."""

import dataclasses

import numpy as np
import pytest
from hopper import H200, check_gradients, check_onchip_bytes

from search_spaces.flash_attention_backward.hopper import (
    FlashAttentionBackwardSchedule,
    MosaicGpuFlashAttentionBackward,
)
from search_spaces.flash_attention_backward.problem import FlashAttentionBackwardProblem
from search_spaces.jax_compat import HAS_GPU_INTERPRETER
from search_spaces.space import Columns

pytestmark = pytest.mark.slow_but_first

KERNEL = MosaicGpuFlashAttentionBackward()
SCHEDULE = FlashAttentionBackwardSchedule(64, 2, 1, 2, True, 1, block_kv=64)
PLAIN = dataclasses.replace(SCHEDULE, overlap=False)
PROBLEM = FlashAttentionBackwardProblem(batch=1, q_len=128, kv_len=128, heads=1, kv_heads=1, head_dim=256)

needs_new_ref = pytest.mark.skipif(not HAS_GPU_INTERPRETER, reason="the kernel needs JAX 0.11")


def posed(**fields):
    return dataclasses.replace(PROBLEM, **fields)


@needs_new_ref
@pytest.mark.parametrize(
    ("problem", "schedule"),
    [
        (posed(), SCHEDULE),
        (posed(q_len=200, kv_len=144, causal=True), SCHEDULE),
        (posed(q_len=100, kv_len=61), dataclasses.replace(PLAIN, ds_stages=1)),
        (posed(heads=4, kv_heads=2, causal=True, q_len=192), dataclasses.replace(SCHEDULE, section=2)),
        (posed(window_left=30, window_right=50, q_len=200, kv_len=260), dataclasses.replace(SCHEDULE, ds_stages=1)),
        (posed(batch=2, q_lengths=True, kv_lengths=True, q_len=160, kv_len=200), SCHEDULE),
        (posed(softcap=True), PLAIN),
        (posed(head_dim=192, causal=True, dtype="float16"), dataclasses.replace(SCHEDULE, do_stages=2)),
        (posed(head_dim=192, head_dim_v=128, lse_cotangent=True), PLAIN),
        (posed(head_dim=64, head_dim_v=256), SCHEDULE),
        (posed(batch=2, q_len=129, kv_len=77, heads=2, kv_heads=1, causal=True), SCHEDULE),
        (posed(q_len=77, kv_len=131, head_dim=192, head_dim_v=128), dataclasses.replace(PLAIN, do_stages=2)),
    ],
    ids=[
        "plain",
        "ragged",
        "short",
        "grouped",
        "window",
        "lengths",
        "softcap",
        "d192",
        "latent",
        "wide_values",
        "odd",
        "odd_d192",
    ],
)
def test_gradients_agree_with_the_reference(problem, schedule):
    check_gradients(KERNEL, problem, schedule)


@needs_new_ref
@pytest.mark.parametrize("head_dims", [(256, 256), (192, 192), (192, 128)])
def test_onchip_bytes_are_what_lowering_asks_for(head_dims):
    head_dim, head_dim_v = head_dims
    problem = posed(q_len=1024, kv_len=1024, heads=4, kv_heads=2, head_dim=head_dim, head_dim_v=head_dim_v, causal=True)
    points, _ = KERNEL.space(problem, H200.target).legal()
    points = points.take(points.section == 1)
    points = points.take(np.arange(len(points)) % (1 if head_dims == (256, 256) else 3) == 0)
    assert len(points)
    found = KERNEL.footprint(problem, points, H200.target)
    for schedule, predicted in zip(
        KERNEL.space(problem, H200.target).schedules(points), found.onchip_bytes, strict=True
    ):
        check_onchip_bytes(KERNEL, problem, schedule, int(predicted))


def test_footprints_count_what_is_multiplied():
    problem = posed(q_len=1024, kv_len=1024, heads=4, kv_heads=2)
    found = KERNEL.footprint(problem, Columns.of([SCHEDULE]), H200.target)
    multiplied = found.step.flops * found.steps * np.prod([axis[0] for axis in found.grid])
    np.testing.assert_allclose(multiplied, problem.flops)
