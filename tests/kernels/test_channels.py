"""Group norm, and row programs along an axis that is not the last: kernels, interpreted and as machine code."""

import dataclasses
import functools
import json
import random
import re
import sys

import hopper
import jax
import jax.numpy as jnp
import machine_code
import numpy as np
import pytest

import scheduler
from scheduler.model.cost import CostModel
from scheduler.model.pruning import prune
from search_spaces import Columns, load
from search_spaces.jax_compat import HAS_GPU_INTERPRETER, JAX_VERSION, gpu_interpreter
from search_spaces.rows.builder import online
from search_spaces.rows.channels import GROUP_NORM, GroupNormProblem, group_norm
from search_spaces.rows.formulas import layer_norm, softmax, softmax_with_lse
from search_spaces.rows.hopper.channel_layout import ChannelPlan
from search_spaces.rows.hopper.channels import ChannelSchedule, run_channels
from search_spaces.rows.problem import ProgramAlongProblem
from search_spaces.rows.reader import trace
from search_spaces.space import round_up

KERNEL = GROUP_NORM.kernel("mosaic_gpu")
interpreted = pytest.mark.skipif(not HAS_GPU_INTERPRETER, reason="this JAX interprets no GPU kernel")

CASES = {
    "an access is a group": (GroupNormProblem(2, 37, 256, 8), ChannelSchedule(4, 8, 1)),
    "a cluster, weights of float32": (
        GroupNormProblem(2, 37, 256, 8, weight_dtype="float32"),
        ChannelSchedule(4, 8, 1, 4, kept=4),
    ),
    "several positions in a line": (
        GroupNormProblem(1, 150, 64, 16, weight_dtype="float32"),
        ChannelSchedule(8, 8, 2, 2),
    ),
    "several groups in an access": (GroupNormProblem(1, 150, 64, 2), ChannelSchedule(4, 8, 2, 2)),
    "a channel is a group": (GroupNormProblem(1, 50, 256, 1), ChannelSchedule(4, 8, 1, 2)),
    "several blocks of channels": (GroupNormProblem(1, 67, 512, 16), ChannelSchedule(8, 8, 2, 2, kept=4)),
    "a part overlaps by more than a chunk": (GroupNormProblem(1, 67, 512, 32, "float32"), ChannelSchedule(4, 4, 1, 8)),
    "a block is a group": (GroupNormProblem(1, 16, 64, 64, "float16"), ChannelSchedule(4, 8, 1)),
    "resident blocks, in turn": (GroupNormProblem(3, 128, 64, 8), ChannelSchedule(4, 8, 1, resident=32)),
    "resident blocks of a cluster, with overlaps": (
        GroupNormProblem(2, 1021, 64, 16, weight_dtype="float32"),
        ChannelSchedule(8, 8, 2, 2, resident=32),
    ),
    "an access is a group of a resident block": (
        GroupNormProblem(2, 250, 64, 4),
        ChannelSchedule(8, 4, 2, resident=32),
    ),
    "resident blocks of float32": (GroupNormProblem(2, 310, 64, 16, "float32"), ChannelSchedule(4, 4, 2, resident=16)),
    "channels are groups of a resident block": (GroupNormProblem(2, 128, 64, 1), ChannelSchedule(4, 8, 1, resident=32)),
}


def along(function, samples, columns, inner, **operands):
    """Returns the problem of a function of rows along the middle axis; `operands` are kinds and dtypes by name."""
    kinds = [kind for kind, _ in operands.values()]
    shapes = [
        jax.ShapeDtypeStruct((columns,) if kind in ("row", "shared") else (), dtype)
        for kind, dtype in operands.values()
    ]
    text = trace(function, shapes, kinds)[0].text()
    return ProgramAlongProblem(samples * inner, text, function.__name__, inner)


def weighted(x, y, scale):
    z = x.astype(jnp.float32) * y
    return (z - jnp.max(z)).astype(x.dtype), jnp.sum(z) * scale, jnp.argmax(z)


def softmax_backward(y, dy):
    a, b = y.astype(jnp.float32), dy.astype(jnp.float32)
    return (a * (b - jnp.sum(a * b))).astype(y.dtype)


BF16, F32 = ("row", "bfloat16"), ("row", "float32")
NORM = {"x": BF16, "weight": ("shared", "float32"), "bias": ("shared", "bfloat16")}
ALONG = {
    "softmax, more than a line": (along(softmax, 2, 37, 512, x=BF16), ChannelSchedule(4, 8, 1)),
    "softmax of float32, less than a line, a cluster": (
        along(softmax, 2, 45, 64, x=F32),
        ChannelSchedule(4, 4, 1, 2),
    ),
    "softmax, accesses of one element": (along(softmax, 1, 21, 96, x=BF16), ChannelSchedule(4, 1, 2)),
    "softmax, resident blocks": (along(softmax, 3, 128, 64, x=BF16), ChannelSchedule(4, 8, 1, resident=32)),
    "softmax of float32, resident, with overlaps": (
        along(softmax, 1, 253, 32, x=F32),
        ChannelSchedule(4, 4, 1, 2, resident=32),
    ),
    "a log-sum-exp, chunks in SMEM": (
        along(softmax_with_lse, 1, 150, 256, x=BF16),
        ChannelSchedule(8, 8, 2, 2, kept=4),
    ),
    "vectors by position, a position in a line": (along(layer_norm, 2, 37, 256, **NORM), ChannelSchedule(4, 8, 1)),
    "vectors by position, several in a line": (along(layer_norm, 2, 61, 64, **NORM), ChannelSchedule(4, 8, 1, 2)),
    "vectors by position, an access of all channels": (along(layer_norm, 1, 150, 8, **NORM), ChannelSchedule(4, 8, 1)),
    "vectors by position, resident blocks": (
        along(layer_norm, 2, 128, 64, **NORM),
        ChannelSchedule(4, 8, 2, resident=64),
    ),
    "two rows of different dtypes, and scalars": (
        along(weighted, 2, 50, 128, x=BF16, y=F32, scale=("scalar", "float32")),
        ChannelSchedule(4, 4, 1),
    ),
    "a backward pass": (along(softmax_backward, 1, 67, 128, y=BF16, dy=BF16), ChannelSchedule(8, 4, 1, 2, kept=4)),
}


def interpreted_results(problem, schedule):
    assert KERNEL.supports(problem, hopper.H200.target) is None
    assert not KERNEL.space(problem, hopper.H200.target).broken(schedule)
    return hopper.interpret(KERNEL, problem, schedule, cores=2)


@interpreted
@pytest.mark.parametrize("case", ALONG)
def test_rows_along_another_axis_agree_with_float64(case):
    problem, schedule = ALONG[case]
    actual, _ = interpreted_results(problem, schedule)
    with jax.enable_x64(True):
        exact = [x.astype(jnp.float64) for x in problem.inputs(seed=0)]
        wanted = jax.tree.map(np.asarray, problem.reference(*exact))
    allowed = problem.for_each(problem.tolerance())
    for found, right, each in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), allowed, strict=True):
        assert found.shape == right.shape
        error = np.abs(found - right) - each.relative * np.abs(right)
        assert error.max() <= each.absolute * np.abs(right).max()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("inner", [64, 96, 1024, 3136])
def test_a_search_has_streamed_and_resident_schedules_that_request_the_declared_smem(inner):
    problem = along(softmax, 16, 2048, inner, x=BF16)
    found = prune(KERNEL, problem, hopper.H200, CostModel(hopper.H200)).candidates()
    schedules = [KERNEL.space(problem, hopper.H200.target).decode(each.schedule) for each in found]
    for resident in (True, False):
        of_kind = [s for s in schedules if bool(s.resident) == resident]
        for one in random.Random(inner).sample(of_kind, 2):
            declared = KERNEL.footprint(problem, Columns.of([one]), hopper.H200.target).onchip_bytes[0]
            hopper.check_onchip_bytes(KERNEL, problem, one, declared)


def test_kernels_along_another_axis_refuse_what_they_do_not_compute():
    def reason(problem):
        return KERNEL.supports(problem, hopper.H200.target)

    assert "49 channels" in reason(along(lambda x: x * jnp.max(x), 2, 64, 49, x=BF16))
    assert reason(along(softmax, 2, 64, 64, x=BF16)) is None
    assert "reduces rows" in reason(along(lambda x: x + 1, 2, 64, 64, x=BF16))
    assert "parts of a row" in reason(along(lambda x: x[:64] * jnp.sum(x[64:]), 2, 128, 64, x=BF16))
    with_weight = along(lambda x, weight: x * weight * jnp.sum(x), 2, 64, 64, x=F32, weight=("shared", "float32"))
    assert reason(with_weight) is None
    backward = with_weight.derivative().backward
    assert "sums over rows" in reason(dataclasses.replace(with_weight, text=backward.text()))


@interpreted
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_agrees_with_the_reference(case):
    problem, schedule = CASES[case]
    actual, wanted = interpreted_results(problem, schedule)
    allowed = problem.tolerance()
    error = np.abs(actual - wanted) - allowed.relative * np.abs(wanted)
    assert error.max() <= allowed.absolute * np.abs(wanted).max()


@pytest.mark.skipif(JAX_VERSION < (0, 12), reason="the interpreter reports races from JAX 0.12 on")
@pytest.mark.parametrize(
    ("group", "schedule", "cores"),
    [(8, ChannelSchedule(8, 8, 1, resident=32), 1), (16, ChannelSchedule(4, 8, 2, 2, resident=32), 2)],
)
def test_loads_and_stores_of_resident_blocks_do_not_race(group, schedule, cores):
    problem = GroupNormProblem(3, 256, 64, group)
    actual, wanted = hopper.interpret(KERNEL, problem, schedule, cores=cores, detect_races=True)
    np.testing.assert_allclose(actual, wanted, rtol=0.01, atol=0.03)


@interpreted
def test_another_program_reduces_positions_for_each_channel():
    def largest(x):
        y = x.astype(jnp.float32)
        return jnp.max(y), jax.nn.logsumexp(y)

    program, _ = trace(largest, [jax.ShapeDtypeStruct((45,), jnp.bfloat16)], ["row"])
    x = jax.random.normal(jax.random.key(0), (2, 45, 64), jnp.bfloat16)
    plan = ChannelPlan(45, 64, group=1, vector=8, warpgroups=1, accesses=1, cluster=2)
    result = jax.ShapeDtypeStruct((2, 64), jnp.float32)
    with gpu_interpreter():
        top, total = run_channels(online(program), plan, 2, [result, result], [x])
    np.testing.assert_array_equal(top, x.max(1).astype(jnp.float32))
    np.testing.assert_allclose(total, jax.nn.logsumexp(x.astype(jnp.float32), 1), rtol=1e-5)


def test_the_kernel_requests_the_smem_that_its_footprint_declares_and_refuses_other_groups():
    along_axis = [(p, s) for p, s in ALONG.values() if KERNEL.supports(p, hopper.H200.target) is None]
    assert len(along_axis) >= 5
    for problem, schedule in [*CASES.values()][:5] + [*CASES.values()][-5:] + along_axis:
        predicted = KERNEL.footprint(problem, Columns.of([schedule]), hopper.H200.target).onchip_bytes[0]
        hopper.check_onchip_bytes(KERNEL, problem, schedule, predicted)
    assert "groups of 10" in KERNEL.supports(GroupNormProblem(1, 4096, 320, 10), hopper.H200.target)


def test_a_call_its_derivative_and_a_batch():
    x = jax.random.normal(jax.random.key(0), (2, 5, 3, 32))
    weight, bias = jnp.arange(32.0), jnp.ones(32)
    tuned = functools.partial(scheduler.tuned_group_norm, groups=8, eps=1e-5)
    plain = functools.partial(group_norm, group=4, eps=1e-5)

    for function in (lambda f: f, lambda f: jax.grad(lambda *a: jnp.sum(f(*a) ** 2), (0, 1, 2))):
        found, right = (function(f)(x, weight, bias) for f in (tuned, plain))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), found, right)
    many = jnp.stack([x, 2 * x + 1])
    found, right = (jax.vmap(f, (0, None, None))(many, weight, bias) for f in (tuned, plain))
    np.testing.assert_allclose(found, right, rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match="groups"):
        scheduler.tuned_group_norm(x, weight, bias, groups=5)
    assert GroupNormProblem(2, 15, 32, 4, "float32") in [
        each.problem for each in scheduler.problems(tuned, x, weight, bias)
    ]


@machine_code.needed()
@pytest.mark.slow
@pytest.mark.parametrize(
    ("problem", "schedule"),
    [
        *[
            (GroupNormProblem(*extents), schedule)
            for extents in [(64, 3136, 256, 8), (64, 3136, 64, 2), (64, 785, 512, 16)]
            for schedule in [ChannelSchedule(8, 8, 4, 8), ChannelSchedule(16, 8, 2, 4, kept=4)]
        ],
        (GroupNormProblem(64, 3136, 256, 8), ChannelSchedule(8, 8, 7, resident=32)),
        (GroupNormProblem(64, 3136, 256, 8), ChannelSchedule(16, 8, 5, 2, resident=64)),
        (along(softmax, 16, 2048, 1024, x=BF16), ChannelSchedule(8, 8, 4, 8)),
        (along(softmax, 16, 2048, 1024, x=BF16), ChannelSchedule(8, 8, 4, resident=32)),
        (along(layer_norm, 16, 768, 3136, **NORM), ChannelSchedule(8, 2, 4, 4)),
        (along(layer_norm, 16, 768, 1024, **NORM), ChannelSchedule(8, 8, 2, 4, kept=4)),
        (along(softmax_backward, 16, 2048, 1024, y=BF16, dy=BF16), ChannelSchedule(8, 8, 2, 8)),
    ],
)
def test_ptxas_spills_nothing_and_needs_about_the_registers_that_are_declared(problem, schedule, tmp_path):
    fields = json.dumps(dataclasses.asdict(schedule))
    operation = "group_norm" if isinstance(problem, GroupNormProblem) else "rows_along"
    said, file, _ = machine_code.compiled(__file__, tmp_path, operation, problem.canonical(), fields)
    assert "0 bytes spill stores" in said
    declared = KERNEL.footprint(problem, Columns.of([schedule]), hopper.H200.target)
    assert int(re.search(r"Used (\d+) registers", said)[1]) <= round_up(declared.registers[0] + 16, 8)
    text = file.read_text()
    passes = (len(online(problem.program_of()).stages) + 1) * schedule.accesses
    assert text.count("ld.shared.v4" if schedule.resident else f"ld.v{min(4, schedule.vector)}") >= passes
    assert ("cp.async.bulk.tensor" in text) == bool(schedule.resident)


def main(operation: str, canonical: str, fields: str) -> None:
    problem, one = load(operation).problem.from_canonical(canonical), ChannelSchedule(**json.loads(fields))
    machine_code.compile_for_h200(lambda *args: KERNEL.run(problem, one, hopper.H200.target, *args), problem.operands())


if __name__ == "__main__":
    main(*sys.argv[1:])
