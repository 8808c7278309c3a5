"""How problems are divided over a mesh, and tuned calls there: `eight_devices.py`, in a process with eight devices."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.dispatch.dispatch import Options
from scheduler.dispatch.query_recorder import digest
from search_spaces.flash_attention import FLASH_ATTENTION, FlashAttentionProblem
from search_spaces.flash_attention_backward import FLASH_ATTENTION_BACKWARD, FlashAttentionBackwardProblem
from search_spaces.gated_matmul import GATED_MATMUL, GatedMatmulProblem
from search_spaces.matmul import MATMUL, MatmulProblem
from search_spaces.ragged_dot import (
    GATED_RAGGED_DOT,
    RAGGED_DOT,
    RAGGED_DOT_WEIGHTS,
    GatedRaggedDotProblem,
    RaggedDotProblem,
    RaggedDotWeightsProblem,
)
from search_spaces.rows.formulas import RMS_NORM, SILU_AND_MUL_BACKWARD, RmsNormProblem, SiluAndMulBackwardProblem
from search_spaces.scaled_matmul import SCALED_MATMUL, ScaledMatmulProblem
from search_spaces.sharding import divide

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

PROBLEMS = [
    (MATMUL, MatmulProblem(64, 48, 32)),
    (MATMUL, MatmulProblem(62, 48, 32, batch=4, transpose_a=True, bias="float32", activation="gelu")),
    (MATMUL, MatmulProblem(64, 48, 30, transpose_b=True, residual="bfloat16")),
    (MATMUL, MatmulProblem(64, 48, 32, split_sizes="16+32")),
    (MATMUL, MatmulProblem(64, 48, 32, dtype="int8", out_dtype="bfloat16")),
    (GATED_MATMUL, GatedMatmulProblem(64, 48, 32, pair=True, bias="bfloat16")),
    (GATED_MATMUL, GatedMatmulProblem(64, 48, 32, transpose_w=True)),
    (RAGGED_DOT, RaggedDotProblem(64, 8, 32, 48)),
    (RAGGED_DOT, RaggedDotProblem(64, 8, 32, 48, transpose_rhs=True, out_dtype="float32")),
    (GATED_RAGGED_DOT, GatedRaggedDotProblem(64, 8, 32, 48)),
    (RAGGED_DOT_WEIGHTS, RaggedDotWeightsProblem(64, 8, 32, 48)),
    (SCALED_MATMUL, ScaledMatmulProblem(64, 256, 256)),
    (SCALED_MATMUL, ScaledMatmulProblem(64, 48, 256, transpose_b=True, a_scales="rows", b_scales="rows")),
    (RMS_NORM, RmsNormProblem(24, 64)),
    (SILU_AND_MUL_BACKWARD, SiluAndMulBackwardProblem(24, 64)),
    (FLASH_ATTENTION, FlashAttentionProblem(4, 16, 16, 8, 2, 64, return_lse=True, kv_lengths=True)),
    (FLASH_ATTENTION, FlashAttentionProblem(4, 16, 16, 8, 1, 64)),
    (FLASH_ATTENTION, FlashAttentionProblem(4, 16, 16, 8, 8, 64)),
    (FLASH_ATTENTION_BACKWARD, FlashAttentionBackwardProblem(4, 16, 16, 8, 2, 64, lse_cotangent=True)),
]
MESHES = [{"x": 4, "y": 2}, {"x": 2, "y": 2, "z": 2}, {"x": 3, "y": 2}, {"x": 1, "y": 8}]


def specs(draw, shapes, mesh):
    """Of each array: some mesh axes, each of them once, on some of its axes."""
    found = []
    for shape in shapes:
        entries = [[] for _ in shape]
        for axis in draw(st.permutations(list(mesh))):
            place = draw(st.integers(-1, len(shape) - 1))
            if place >= 0:
                entries[place].append(axis)
        found.append(tuple(tuple(entry) for entry in entries))
    return found


@given(st.data(), st.sampled_from(PROBLEMS), st.sampled_from(MESHES), st.booleans())
@settings(deadline=None, max_examples=300)
def test_parts_times_devices_are_the_whole_and_no_axis_divides_two_letters(data, posed, mesh, with_results):
    operation, problem = posed
    sharding = operation.shard(problem)
    operands, results = problem.operands(), problem.results()
    given_operands = specs(data.draw, [s.shape for s in operands], mesh)
    given_results = specs(data.draw, [s.shape for s in results], mesh) if with_results else ()
    found = divide(sharding, problem, mesh, given_operands, given_results)

    def devices(axes):
        return math.prod(mesh[axis] for axis in axes)

    letters = sharding.arrays
    divides = {}
    for arrays, all_specs, whole in ((letters[0], found.operands, operands), (letters[1], found.results, results)):
        for array, spec, s in zip(arrays, all_specs, whole, strict=True):
            named = [axis for axes in spec for axis in axes]
            assert len(set(named)) == len(named)
            for of, axes, extent in zip(array, spec, s.shape, strict=True):
                assert extent % devices(axes) == 0
                for axis in axes:
                    divides.setdefault(axis, set()).add(of)
    scattered = {axis for spec in found.scattered for axes in spec for axis in axes}
    for axis, places in divides.items():  # one letter, alone or in an axis that is made of it and another
        assert set.intersection(*map(set, places)) or (axis in scattered and len(places) == 2), (axis, places)

    asked = len(found.problem.operands())
    parts = (*found.local.operands()[:asked], *found.finished.operands()[asked:])
    for s, spec, local in zip(operands, found.operands, parts, strict=True):
        assert s.size == local.size * math.prod(map(devices, spec))
    for s, spec, shape in zip(results, found.results, found.shapes, strict=True):
        assert tuple(extent // devices(axes) for extent, axes in zip(s.shape, spec, strict=True)) == shape
    # Every device does its share: nothing is computed twice but over axes that divide nothing.
    over = math.prod(mesh[axis] for axis in divides)
    assert found.local.flops * over == pytest.approx(problem.flops)
    for axes in found.sums:
        divided = {a for spec in found.results for b in spec for a in b}
        assert divided.intersection(axes) == scattered.intersection(axes) or operation is FLASH_ATTENTION_BACKWARD
    for number, (spec, kept) in enumerate(zip(given_operands, found.operands, strict=True)):
        lost = any(axes != now[: len(axes)] for axes, now in zip(spec, kept, strict=True))
        assert lost == any(reason.startswith(f"operand {number} ") for reason in found.gathered)


def test_a_divided_contraction_asks_for_the_product_alone_and_says_what_is_gathered():
    problem = MatmulProblem(64, 48, 32, bias="bfloat16", activation="gelu")
    found = divide(MATMUL.shard(problem), problem, {"x": 4, "y": 2}, [("x", "y"), ("y",), ("x",)])
    assert found.problem == MatmulProblem(16, 48, 16)
    assert found.local == MatmulProblem(16, 48, 16, bias="bfloat16", activation="gelu")
    assert found.sums == (("y",),)
    assert found.gathered == ("operand 2 along n, divided over x: x divides m",)
    odd = MatmulProblem(62, 48, 32)
    ragged = divide(MATMUL.shard(odd), odd, {"x": 4}, [("x",), ()])
    assert ragged.problem.m == 62
    assert ragged.gathered == ("operand 0 along m, divided over x: 62 is no multiple of 4",)


@pytest.mark.parametrize(
    ("wanted", "results", "scattered"),
    [
        (("x",), (("x",), ()), (("x",), ())),
        ((None, "x"), ((), ("x",)), ((), ("x",))),
        ((("x", "y"),), (("x",), ()), (("x",), ())),  # nothing is summed over y: that part is left to XLA
        ((("y", "x"),), (("y", "x"), ()), (("x",), ())),
        (("y",), (("y",), ()), ((), ())),
    ],
)
def test_a_sum_is_scattered_over_its_own_axes_alone(wanted, results, scattered):
    problem = MatmulProblem(64, 48, 32, residual="bfloat16")
    found = divide(MATMUL.shard(problem), problem, {"x": 4, "y": 2}, [(None, "x"), ("x",), wanted], [wanted])
    assert (found.results, found.scattered) == ((results,), (scattered,))
    assert found.sums == (("x",),)
    assert found.operands[2] == results
    m, n = (math.prod({"x": 4, "y": 2}[axis] for axis in axes) for axes in results)
    assert found.finished == MatmulProblem(64 // m, 48 // n, 8, residual="bfloat16")


@pytest.mark.parametrize(
    ("spec", "message"),
    [(("x", None, "y"), "more axes"), (("z",), "names z"), (("x", "x"), "twice")],
)
def test_a_spec_that_is_none_is_told_why(spec, message):
    problem = MatmulProblem(64, 48, 32)
    with pytest.raises(ValueError, match=message):
        divide(MATMUL.shard(problem), problem, {"x": 4, "y": 2}, [spec, ()])


def on_eight_devices(*command, **environment):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    return subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"} | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def test_the_claims_about_divided_calls_hold_on_eight_devices():
    ran = on_eight_devices("-m", "pytest", "-q", "-p", "no:cacheprovider", str(ROOT / "tests/eight_devices.py"))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "passed" in ran.stdout
    assert "skipped" not in ran.stdout


COMPILES = """
import sys
import jax
import jax.numpy as jnp
from jax import monitoring
from jax.sharding import NamedSharding, PartitionSpec as P

jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
from scheduler import reload, tuned_matmul

mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
a, b = jax.device_put(jnp.ones((64, 32)), NamedSharding(mesh, P("x"))), jnp.ones((32, 16))
seen = []
monitoring.register_event_listener(
    lambda name, **_: seen.append(name.rsplit("_", 1)[1]) if "compilation_cache/cache_" in name else None
)
program = jax.jit(tuned_matmul).lower(a, b).compile()
print(seen[-1], "while" in program.as_text(), float(program(a, b)[0, 0]))
"""

# A record of what each device asks for, by which the interpreted kernel is the fastest: its loop is in the program.
RECORDS = """
import dataclasses
from scheduler import Store, tune
from scheduler.store.store import default_url
from search_spaces.matmul import MATMUL, MatmulProblem
record = tune(MATMUL, MatmulProblem(8, 16, 32, dtype="float32"), backends=["interpret", "xla"], budget=4)
entries = sorted(record.entries, key=lambda entry: entry.backend != "interpret")
Store(default_url()).put(dataclasses.replace(record, entries=tuple(entries)))
"""


def test_a_second_process_finds_the_compiled_program_until_a_record_answers_otherwise(tmp_path):
    places = {"TILE_SCHEDULER_CACHE": str(tmp_path / "records.db"), "TILE_SCHEDULER_MISSES": "off"}

    def compiles():
        ran = on_eight_devices("-c", COMPILES, str(tmp_path / "programs"), **places)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.split()

    assert compiles() == ["misses", "False", "32.0"]
    assert compiles() == ["hits", "False", "32.0"]
    ran = on_eight_devices("-c", RECORDS, **places)
    assert ran.returncode == 0, ran.stderr
    assert compiles() == ["misses", "True", "32.0"]
    assert compiles() == ["hits", "True", "32.0"]


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Options)])
def test_jax_tells_programs_apart_by_all_that_decides_how_their_parts_are_answered(name):
    plan = types.SimpleNamespace(plan=types.SimpleNamespace(digest="0"), missing="xla")
    other = {
        "on_miss": "xla",
        "backends": frozenset({"xla"}),
        "schedule": (("tile_m", 64),),
        "target": "NVIDIA H200",
        "plan": plan,
        "generation": 1,
        "loss_per_gain": 0.5,
        "divided": True,
        "excluded": frozenset({"xla"}),
    }
    problem, usual = MatmulProblem(64, 48, 32), Options()
    changed = dataclasses.replace(usual, **{name: other[name]})
    told = [digest(MATMUL, problem, (), {}, "cpu", options) for options in (usual, changed, usual)]
    assert told[0] == told[2]
    # These change nothing that is answered: how often JAX was made to ask, and that a device asks while XLA compiles.
    assert (told[0] == told[1]) is (name in ("generation", "divided"))
