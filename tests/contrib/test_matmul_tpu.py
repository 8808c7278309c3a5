"""The products for TPUs: right in the interpreter, VMEM as their compiler allocates it, tiles as recorded."""

import base64
import dataclasses
import functools
import json
import random
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jaxlib.mlir import ir
from jaxlib.mosaic.python import tpu
from static_profiles import compiled, needs_libtpu
from values import ENVIRONMENT, FAST, SLOW

import scheduler
from scheduler import tuned_matmul
from scheduler.contrib.tpu import estimate
from scheduler.core.hardware import find
from scheduler.core.records import Entry, Record, key_of
from scheduler.model.pruning import illegal
from scheduler.store.store import Store, default_url
from search_spaces import Columns
from search_spaces.gated_matmul import GATED_MATMUL, GatedMatmulProblem
from search_spaces.matmul import MATMUL, MatmulProblem

pytestmark = pytest.mark.slow_but_first

OPERATIONS = {"matmul": MATMUL, "gated_matmul": GATED_MATMUL}
V6E, TPU7X = find("v6e"), find("tpu7x")
EXTENTS = ((1, 3, 16, 40), (128, 200, 256), (300, 384, 512))


def kernel(operation):
    return operation.kernel("mosaic_tpu")


def drawn(name, draw, largest=512):
    """A problem of an operation, ragged as often as not, on a chip that multiplies such operands."""

    def extent():
        return draw.choice([each for each in draw.choice(EXTENTS) if each <= largest])

    m, n, k = extent(), extent(), extent()
    if name == "gated_matmul":
        return GatedMatmulProblem(
            m, n, k,
            transpose_w=draw.random() < 0.5,
            pair=draw.random() < 0.5,
            activation=draw.choice(("silu", "gelu", "relu")),
            bias=draw.choice(("", "bfloat16", "float32")),
        ), V6E  # fmt: skip
    dtype = draw.choice(("bfloat16", "bfloat16", "float32", "int8", "float8_e4m3fn", "float8_e5m2"))
    narrow = jnp.dtype(dtype).itemsize == 1
    epilogue = {} if narrow else {
        "bias": draw.choice(("", "bfloat16", "float32")),
        "activation": draw.choice(("", "relu", "gelu", "silu")),
        "residual": draw.choice(("", "bfloat16", "float32")),
    }  # fmt: skip
    results = {"int8": ("int32", "bfloat16", "float32")}.get(dtype, ("bfloat16", "float32"))
    problem = MatmulProblem(
        m, n, k, dtype,
        batch=draw.choice((1, 1, 3)),
        out_dtype=draw.choice(results),
        transpose_a=draw.random() < 0.3,
        transpose_b=draw.random() < 0.4,
        precision=draw.choice(("default", "high", "highest")),
        **epilogue,
    )  # fmt: skip
    return problem, TPU7X if dtype.startswith("float8") else V6E


def schedules(operation, problem, hardware):
    space = kernel(operation).space(problem, hardware.target)
    return list(space.schedules(space.legal()[0]))


def check(operation, problem, hardware, schedule, seed=0):
    """Memory that nothing was written to, and what lies beyond edges, is NaN in this interpreter."""
    args = problem.inputs(seed)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        results = kernel(operation).results(problem, schedule, hardware.target, *args)
    expected = problem.reference(*args)
    for actual, right in zip(results, expected if isinstance(expected, tuple) else (expected,), strict=True):
        tolerance = problem.tolerance()
        assert actual.shape == right.shape
        np.testing.assert_allclose(
            np.asarray(actual, np.float32), np.asarray(right, np.float32),
            atol=tolerance.absolute, rtol=tolerance.relative, err_msg=f"{problem} {schedule}",
        )  # fmt: skip


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.always), *range(1, 8)])
@pytest.mark.parametrize("name", OPERATIONS)
def test_drawn_problems_are_right_with_a_drawn_schedule(name, seed):
    draw = random.Random(seed)
    problem, hardware = drawn(name, draw)
    assert kernel(OPERATIONS[name]).supports(problem, hardware.target) is None
    check(OPERATIONS[name], problem, hardware, draw.choice(schedules(OPERATIONS[name], problem, hardware)), seed)


LARGE = {
    "matmul": MatmulProblem(600, 700, 600, bias="float32", activation="gelu", residual="bfloat16"),
    "gated_matmul": GatedMatmulProblem(600, 700, 600, bias="bfloat16"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_choice_of_the_space_is_right_at_least_once(name):
    operation, problem = OPERATIONS[name], LARGE[name]
    space = kernel(operation).space(problem, V6E.target)
    left = {(field, value) for field, values in space.choices.items() for value in values}
    every = schedules(operation, problem, V6E)
    random.Random(0).shuffle(every)
    for schedule in every:
        if new := left & set(vars(schedule).items()):
            check(operation, problem, V6E, schedule)
            left -= new
    assert not left


@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("n", [256, 320])
def test_joined_weights_are_read_where_they_lie_if_their_second_half_begins_with_a_tile(n, transpose_w):
    problem = GatedMatmulProblem(16, n, 128, transpose_w=transpose_w)
    (one, *_) = schedules(GATED_MATMUL, problem, V6E)
    gated = kernel(GATED_MATMUL)
    copied = gated.footprint(problem, Columns.of([one]), V6E.target).copied_bytes[0]
    text = jax.jit(lambda *args: gated.run(problem, one, V6E.target, *args)).trace(*problem.operands()).jaxpr
    assert ("slice[" in str(text)) == (copied > 0) == (n % one.tile_n != 0 or n % 128 != 0)
    check(GATED_MATMUL, problem, V6E, one)


def test_several_results_are_cut_out_of_one():
    problem = MatmulProblem(16, 384, 128, split_sizes="128+256")
    (one, *_) = schedules(MATMUL, problem, V6E)
    check(MATMUL, problem, V6E, one)


SUPPORTED = [
    (MatmulProblem(64, 64, 64, "int8", out_dtype="int32"), ["v5e", "v5p", "v6e"]),
    (MatmulProblem(64, 64, 64, "float8_e5m2", out_dtype="float32"), ["tpu7x"]),
    (MatmulProblem(64, 64, 64, "float16"), []),
    (MatmulProblem(64, 64, 64, bias="float16"), []),
    (MatmulProblem(64, 64, 64, "float32", precision="highest"), ["v4", "v5e", "v5p", "v6e", "tpu7x"]),
]


@pytest.mark.parametrize(("problem", "chips"), SUPPORTED, ids=str)
def test_what_a_chip_multiplies_is_its_own(problem, chips):
    answers = {
        name: kernel(MATMUL).supports(problem, find(name).target) for name in ("v4", "v5e", "v5p", "v6e", "tpu7x")
    }
    assert [name for name, reason in answers.items() if reason is None] == chips
    assert "TPU" in kernel(MATMUL).supports(problem, find("h200").target)


SHAPES = [
    (MATMUL, MatmulProblem(4096, 4096, 4096)),
    (MATMUL, MatmulProblem(16, 4096, 4096)),
    (MATMUL, MatmulProblem(5000, 3000, 7000)),
    (MATMUL, MatmulProblem(1, 1, 1)),
    (MATMUL, MatmulProblem(8192, 128256, 1024)),
    (MATMUL, MatmulProblem(20_003, 17, 50_021, "float32")),
    (GATED_MATMUL, GatedMatmulProblem(4096, 14336, 4096)),
]


@pytest.mark.parametrize("chip", ["v4", "v6e"])
@pytest.mark.parametrize(("operation", "problem"), SHAPES, ids=str)
def test_a_space_has_some_hundred_points_and_some_that_fit(operation, problem, chip):
    hardware, every = find(chip), schedules(operation, problem, find(chip))
    assert 1 <= len(every) <= 400
    space = kernel(operation).space(problem, hardware.target)
    fit = [one for one in every if illegal(kernel(operation), problem, hardware, space.encode(vars(one))) is None]
    assert fit


def test_a_product_that_is_exported_for_a_tpu_has_the_tiles_of_its_record():
    problem = MatmulProblem(2048, 1024, 4096)
    schedule = {"tile_m": 512, "tile_n": 256, "tile_k": 1024, "grid_minor_dim": "n", "vmem_limit_mib": 0}
    entries = (Entry("mosaic_tpu", kernel(MATMUL).version, schedule, FAST, 1e-4), Entry("xla", 1, {}, SLOW, 2e-4))
    versions = {each.backend: each.version for each in MATMUL.kernels}
    store = Store(default_url())
    store.put(Record(key_of(MATMUL, problem, V6E), entries, versions, ENVIRONMENT, budget=8, tried=8, space=100))
    scheduler.reload()
    blocks = _blocks(tuned_matmul, problem)
    assert blocks == ["1x512x1024xbf16", "1x1024x256xbf16", "1x512x256xbf16", "512x256xf32"]


def test_without_a_record_xla_answers_for_a_tpu():
    scheduler.reload()
    assert _blocks(tuned_matmul, MatmulProblem(1024, 2048, 4096)) == []


def _blocks(call, problem):
    """In VMEM, of the one TPU kernel in what is exported of a call for a v6e; none where there is no kernel."""
    with scheduler.target("v6e"):
        exported = jax.export.export(jax.jit(call), platforms=["tpu"])(*problem.operands())
    kernels = re.findall(r'@tpu_custom_call.*?backend_config = "([^"]*)"', exported.mlir_module())
    if not kernels:
        return []
    (config,) = kernels
    body = json.loads(config.replace(r"\22", '"'))["custom_call_config"]["body"]
    with ir.Context() as context:
        context.allow_unregistered_dialects = True
        tpu.register_dialect(context)
        text = str(ir.Module.parse(base64.b64decode(body)))
    return re.findall(r"%arg\d+: memref<(\w+), #tpu.memory_space<vmem>>", text[: text.index("):")])


COMPILED = 4  # schedules of each operation


@needs_libtpu
@pytest.mark.always
@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_vmem_is_what_the_compiler_allocates_beside_spills(chip, tmp_path):
    said = json.loads(compiled(__file__, chip, tmp_path).splitlines()[-1])
    assert len(said) == COMPILED * len(OPERATIONS)
    assert [(each["text"], each["allocated"]) for each in said] == [(each["text"], each["predicted"]) for each in said]


def _compile(chip):
    """VMEM of a few schedules as predicted and as allocated, in bytes.

    Extents are whole lanes, weights a pair, and there is no bias: what XLA copies first, it may leave in VMEM.
    """
    hardware, found = find(chip), []
    for name, operation in OPERATIONS.items():
        draw = random.Random(name)
        while sum(each["text"].startswith(name) for each in found) < COMPILED:
            problem, _ = drawn(name, draw)
            extents = {axis: 128 * draw.choice((1, 2, 3, 5)) for axis in "mnk"}
            apart = {"pair": True} if operation is GATED_MATMUL else {}
            problem = dataclasses.replace(problem, bias="", **extents, **apart)
            if kernel(operation).supports(problem, hardware.target) is not None:
                continue
            schedule = draw.choice(schedules(operation, problem, hardware))
            profile = estimate.static_profile(
                functools.partial(kernel(operation).run, problem, schedule, hardware.target),
                problem.operands(),
                hardware,
            )
            predicted = kernel(operation).footprint(problem, Columns.of([schedule]), hardware.target).onchip_bytes[0]
            found.append({
                "text": f"{name} {problem} {schedule}",
                "allocated": profile.onchip_bytes - profile.spill_bytes,
                "predicted": int(predicted),
            })  # fmt: skip
    return found


if __name__ == "__main__":
    print(json.dumps(_compile(sys.argv[1])))
