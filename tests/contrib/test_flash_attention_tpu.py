"""Flash attention on TPUs: right in the TPU interpreter, VMEM by the real compiler, lowered for TPUs."""

import dataclasses
import json
import random
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from static_profiles import compiled, needs_libtpu

from scheduler import tuned_flash_attention
from scheduler.contrib.tpu import estimate
from scheduler.core.hardware import find
from scheduler.model import pruning
from search_spaces.attention.xla import attention
from search_spaces.contrib.tpu.flash_attention import MosaicTpuFlashAttention, TpuFlashAttentionSchedule, Visibility
from search_spaces.contrib.tpu.flash_attention import space as spaces
from search_spaces.contrib.tpu.flash_attention.space import Rows
from search_spaces.flash_attention import FLASH_ATTENTION, FlashAttentionProblem
from search_spaces.space import Columns

pytestmark = pytest.mark.slow_but_first

KERNEL = MosaicTpuFlashAttention()
V6E = find("v6e")
# Small ones of each kind: ragged, grouped, of few queries, with bounds of all sorts, with rows that see nothing.
BOUNDED = {"window_left": 60, "window_right": 40, "softcap": True, "kv_lengths": True, "q_lengths": True}
PROBLEMS = {
    "causal, ragged": FlashAttentionProblem(1, 300, 300, 2, 2, 64, causal=True, return_lse=True),
    "more keys than queries": FlashAttentionProblem(1, 130, 400, 2, 1, 128, causal=True, return_lse=True),
    "groups of three": FlashAttentionProblem(2, 90, 200, 6, 2, 64, causal=True, return_lse=True),
    "few queries": FlashAttentionProblem(2, 3, 300, 8, 4, 64, head_dim_v=80, causal=True, return_lse=True),
    "one query": FlashAttentionProblem(2, 1, 300, 8, 4, 64, kv_lengths=True, q_lengths=True, return_lse=True),
    "one query, causal": FlashAttentionProblem(1, 1, 200, 4, 2, 64, causal=True),
    "fewer keys than a tile": FlashAttentionProblem(1, 5, 3, 6, 2, 72, window_left=1, return_lse=True),
    "window, cap, lengths": FlashAttentionProblem(2, 200, 300, 6, 2, 64, **BOUNDED, return_lse=True),
    "nothing to see": FlashAttentionProblem(1, 300, 100, 2, 1, 64, causal=True, window_left=50, dtype="float32"),
    "wide heads": FlashAttentionProblem(1, 100, 260, 2, 2, 256, dtype="float32", return_lse=True),
}
FIRST, *OTHERS = PROBLEMS
PARAMS = {"window, cap, lengths": {"scale": -0.3, "softcap": 3.0}, "nothing to see": {"scale": 0.0}}


def wrong(problem: FlashAttentionProblem, schedule: TpuFlashAttentionSchedule, seed: int, **params: float) -> list[str]:
    """Of the results, those that are not right, in a machine whose memory is full of NaN."""
    operands = problem.inputs(seed)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        results = KERNEL.results(problem, schedule, V6E.target, *operands, **params)
    tolerances = problem.tolerance()
    tolerances = tolerances if isinstance(tolerances, tuple) else (tolerances,)
    found = []
    for name, actual, expected, tolerance in zip(
        ("out", "lse"), results, attention(problem, *operands, **params), tolerances, strict=False
    ):
        actual, expected = np.asarray(actual, np.float32), np.asarray(expected, np.float32)
        with np.errstate(invalid="ignore"):
            near = np.abs(actual - expected) <= tolerance.absolute + tolerance.relative * np.abs(expected)
        if not (near | (actual == expected)).all():
            found.append(f"{name}: {schedule}")
    return found


@pytest.mark.parametrize("name", [pytest.param(FIRST, marks=pytest.mark.always), *OTHERS])
def test_it_is_right_with_a_schedule_of_its_space(name):
    problem = PROBLEMS[name]
    points, _ = KERNEL.space(problem, V6E.target).legal()
    few = points.take(points.block_q * points.block_kv_compute <= 2**17)
    drawn = few.row(random.Random(name).randrange(len(few)))
    assert not wrong(problem, TpuFlashAttentionSchedule(**drawn), seed=1, **PARAMS.get(name, {}))


SCHEDULES = (
    TpuFlashAttentionSchedule("one", 128, 256, 128, 0),
    TpuFlashAttentionSchedule("all", 128, 128, 128, 0),
    TpuFlashAttentionSchedule("group", 256, 512, 256, 0),
    TpuFlashAttentionSchedule("one", 512, 1024, 512, 0),
    TpuFlashAttentionSchedule("group", 1024, 2048, 1024, 128),
    TpuFlashAttentionSchedule("group", 2048, 4096, 2048, 128),
    TpuFlashAttentionSchedule("all", 128, 8192, 4096, 0),
)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_every_value_of_every_choice_is_right_somewhere(schedule):
    queries = 5 if schedule.heads == "all" else 140
    problem = FlashAttentionProblem(1, queries, 300, 4, 2, 64, causal=True, return_lse=True)
    assert not wrong(problem, schedule, seed=1)


def test_that_is_every_value_of_every_choice():
    tried = {field.name: {getattr(s, field.name) for s in SCHEDULES} for field in dataclasses.fields(SCHEDULES[0])}
    assert tried["heads"] == {"one", "group", "all"}
    assert tried["block_q"] == set(spaces.BLOCKS_Q)
    assert tried["block_kv"] == set(spaces.BLOCKS_KV)
    assert tried["block_kv_compute"] == set(spaces.BLOCKS_KV_COMPUTE)
    assert tried["vmem_limit_mib"] == set(spaces.VMEM_LIMITS_MIB)


@pytest.mark.parametrize("seed", range(30))
def test_loops_take_each_block_that_is_seen_once_and_mask_those_that_are_not_seen_whole(seed):
    draw = random.Random(seed)
    heads = draw.choice((1, 2, 3)) * (kv_heads := draw.choice((1, 2, 4)))
    bounds = {"window_left": draw.choice((-1, 5, 300)), "window_right": draw.choice((-1, 0, 200))}
    p = FlashAttentionProblem(1, draw.randint(1, 900), draw.randint(1, 900), heads, kv_heads, 64, **bounds)
    rows = Rows.of(p, draw.choice(("one", "group"))).one()
    schedule = TpuFlashAttentionSchedule("", 128, draw.choice((256, 512)), draw.choice((128, 256)), 0)
    v = Visibility(rows, schedule)
    query = np.arange(rows.q_rows)[:, None] // rows.per_query
    key = np.arange(rows.kv_rows)[None]
    seen = (key <= query + (p.kv_len if p.right is None else p.right)) & (
        key >= query - (p.q_len if p.left is None else p.left)
    )
    size = schedule.block_kv_compute
    for i in range(-(-rows.q_rows // schedule.block_q)):
        taken: dict[int, bool] = {}
        here = seen[i * schedule.block_q : (i + 1) * schedule.block_q]
        for j in range(-(-rows.kv_rows // schedule.block_kv)):
            for first, end, masked in v.loops(jnp.int32(i), jnp.int32(j)):
                for n in range(int(first), int(end)):
                    place = j * schedule.block_kv // size + n
                    assert place not in taken
                    taken[place] = masked
                    assert int(v.block_to_load(jnp.int32(i), jnp.int32(j), None)) == j
        for place in range(-(-rows.kv_rows // size)):
            block = here[:, place * size : (place + 1) * size]
            assert place in taken or not block.any()
            whole = block.all() and (place + 1) * size <= rows.kv_rows
            assert taken.get(place, True) or whole


def test_gradients_traced_for_a_tpu_lower_there():
    problem = FlashAttentionProblem(1, 256, 256, 4, 2, 128, causal=True)
    operands = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in problem.operands()]
    exported = jax.export.export(jax.jit(_gradients), platforms=["tpu"])(*operands)
    assert [x.shape for x in exported.out_avals] == [x.shape for x in operands]


def _gradients(*qkv):
    def loss(q, k, v):
        return tuned_flash_attention(q, k, v, causal=True).astype(jnp.float32).sum()

    return jax.grad(loss, (0, 1, 2))(*qkv)


def test_it_supports_what_tpus_multiply():
    problem = FlashAttentionProblem(1, 256, 256, 4, 2, 128)
    assert KERNEL.supports(problem, V6E.target) is None
    assert "runs on TPUs" in (KERNEL.supports(problem, find("h200").target) or "")
    for other in ({"dtype": "float16"}, {"head_dim": 100}, {"head_dim": 512}, {"head_dim_v": 20}):
        assert KERNEL.supports(dataclasses.replace(problem, **other), V6E.target)


def test_where_all_heads_are_rows_of_one_product_no_operand_is_copied():
    problem = FlashAttentionProblem(1, 1, 4096, 32, 8, 128)
    points, _ = KERNEL.space(problem, V6E.target).legal()
    footprint = KERNEL.footprint(problem, points, V6E.target)
    copied = np.broadcast_to(footprint.copied_bytes, len(points))
    assert ((copied == 0) == (points.heads == "all")).all()
    assert (copied == 0).any()


@needs_libtpu
@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_vmem_is_what_the_compiler_takes_but_for_spills_of_which_there_are_no_fewer(chip, tmp_path):
    for line in compiled(__file__, chip, tmp_path).splitlines():
        said = json.loads(line)
        assert said["taken"] - said["spilled"] == said["onchip_bytes"], said
        assert said["spill_bytes"] <= said["spilled"], said


def _compile(chip: str) -> None:
    """Programs whose copies take less VMEM than the kernel does."""
    hardware = find(chip)
    cases = [
        (FlashAttentionProblem(1, 600, 700, 2, 2, 64, causal=True, return_lse=True), ("one", 256, 512, 256, 0)),
        (FlashAttentionProblem(2, 1, 3000, 8, 4, 128, kv_lengths=True), ("all", 128, 2048, 512, 0)),
        (FlashAttentionProblem(1, 300, 500, 4, 2, 128, window_left=90, dtype="float32"), ("group", 128, 512, 128, 0)),
    ]
    for problem, values in cases:
        s = TpuFlashAttentionSchedule(*values)
        profile = estimate.static_profile(
            lambda *args, p=problem, s=s: KERNEL.run(p, s, hardware.target, *args), problem.operands(), hardware
        )
        footprint = KERNEL.footprint(problem, Columns.of([s]), hardware.target)
        print(
            json.dumps(
                {
                    "taken": profile.onchip_bytes,
                    "spilled": profile.spill_bytes,
                    "onchip_bytes": int(footprint.onchip_bytes[0]),
                    "spill_bytes": float(pruning.onchip_demand(footprint)[0] - footprint.onchip_bytes[0]),
                }
            )
        )


def test_it_is_one_of_the_kernels_of_the_operation():
    assert [kernel.backend for kernel in FLASH_ATTENTION.kernels].count("mosaic_tpu") == 1


if __name__ == "__main__":
    _compile(sys.argv[1])
