"""`tile-scheduler shards` and `extract --mesh`: what each device of a mesh asks, told without the devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from scheduler.cli import extracting
from scheduler.cli.app import main
from scheduler.inspect import shards
from scheduler.rewriting import named
from scheduler.search import jobs
from search_spaces import OPERATIONS, load

ROOT = Path(__file__).parents[2]
MATMUL = ("matmul", "m=8192", "n=28672", "k=8192")
MESH = ("--mesh", "data=2,model=4")


def run(capfd, *words, status=0):
    with pytest.raises(SystemExit) as end:
        main(["shards", *map(str, words)])
    out, err = capfd.readouterr()
    assert end.value.code == status, err
    return out, " ".join(err.replace("│", " ").split())


def found(capfd, *words):
    return json.loads(run(capfd, *words, "--json")[0])


def test_the_usual_ways_are_batch_parallel_column_parallel_row_parallel_and_both(capfd):
    rows = found(capfd, *MATMUL, *MESH)
    assert {row["divided"]: (row["problem"]["m"], row["problem"]["n"], row["problem"]["k"]) for row in rows} == {
        "m over data": (4096, 28672, 8192),
        "m over data, model": (1024, 28672, 8192),
        "n over model": (8192, 7168, 8192),
        "m over data, n over model": (4096, 7168, 8192),
        "k over model": (8192, 28672, 2048),
        "m over data, k over model": (4096, 28672, 2048),
    }
    assert [row["divided"] for row in rows if row["sums"] == ["model"]] == ["k over model", "m over data, k over model"]
    assert rows[3]["operands"] == ["P('data')", "P(None, 'model')"]
    assert rows[3]["results"] == ["P('data', 'model')"]


def test_over_one_axis_each_letter_is_divided_alone(capfd):
    assert [row["divided"] for row in found(capfd, *MATMUL, "--mesh", "x=4")] == ["m over x", "n over x", "k over x"]
    assert [row["divided"] for row in found(capfd, "softmax", "rows=64", "columns=32", *MESH)] == [
        "rows over data",
        "rows over data, model",
    ]


def test_a_person_reads_the_problem_the_sum_what_is_gathered_and_the_command(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    out, _ = run(capfd, *MATMUL, "activation=gelu", *MESH, "--divide", "m=data", "--divide", "k=model")
    assert "m over data, k over model: P('data', 'model'), P('model') -> P('data')" in out
    assert "each device: m=4096 n=28672 k=2048 dtype=bfloat16\n" in out
    assert "results are summed over model; the epilogue is a separate pass after the sum" in out
    assert "\n  tile-scheduler tune matmul m=4096 n=28672 k=2048 dtype=bfloat16\n" in out
    out, _ = run(capfd, "matmul", "m=30", "n=64", "k=64", "--mesh", "x=4", "--divide", "m=x")
    assert "each device: m=30" in out
    assert "gathered: operand 0 along m, divided over x: 30 is no multiple of 4" in out
    assert "Replicated on each device: columns." in run(capfd, "softmax", "rows=64", "columns=32", *MESH)[0]


def test_specs_are_taken_as_jax_writes_them_and_as_a_shell_likes_them(capfd):
    quoted = ("--in-specs", "P('data', None), jax.P(None, ('model',))", "--out-specs", "PartitionSpec('data', 'model')")
    bare = ("--in-specs", "P(data), P(None, model)")
    (one,), (other,) = found(capfd, *MATMUL, *MESH, *quoted), found(capfd, *MATMUL, *MESH, *bare)
    assert one == other
    assert (one["problem"]["m"], one["problem"]["n"]) == (4096, 7168)


def test_what_results_are_divided_by_operands_are_not(capfd):
    (row,) = found(capfd, *MATMUL, *MESH, "--in-specs", "P(None, 'data')", "--out-specs", "P('data')")
    assert (row["problem"]["m"], row["problem"]["k"], row["sums"]) == (4096, 8192, [])
    assert row["gathered"] == ["operand 0 along k, divided over data: data divides m"]


def test_a_job_has_each_problem_once_and_can_be_read(capfd):
    out, err = run(capfd, *MATMUL, *MESH, "--job")
    tasks = jobs.parse(out)
    assert len({task.problem for task in tasks}) == len(tasks) == 6
    assert all(task.operation.name == "matmul" for task in tasks)
    assert "m over data, k over model" in err
    assert "tile-scheduler tune-job job.toml" in out


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("--mesh", "data"), 2, "expected a mesh such as data=2,model=4, found 'data'"),
        (("--mesh", "x=2,x=4"), 2, "has the axis x twice"),
        (("--mesh", "x=0"), 2, "found 'x=0'"),
        ((*MESH, "--divide", "m"), 2, "as in m=data,model, found 'm'"),
        ((*MESH, "--divide", "m=data", "--divide", "m=model"), 2, "m is sharded twice"),
        ((*MESH, "--divide", "q=data"), 2, "has no 'q' (there are: m, k, n)"),
        ((*MESH, "--divide", "m=dat"), 2, "the mesh has no axis 'dat'; did you mean 'data'?"),
        ((*MESH, "--divide", "m=data,data"), 2, "the axis data is used twice"),
        ((*MESH, "--divide", "m=data", "--in-specs", "P()"), 2, "--divide excludes --in-specs and --out-specs"),
        ((*MESH, "--in-specs", "P('data'"), 2, "expected a partition spec per array"),
        ((*MESH, "--in-specs", "open('data')"), 2, "expected a partition spec per array"),
        ((*MESH, "--in-specs", "P(1)"), 2, "expected a partition spec per array"),
        ((*MESH, "--in-specs", "P('x')"), 2, "names x, which the mesh has not (data, model)"),
        ((*MESH, "--in-specs", "P(), P(), P()"), 2, "expected at most 2 specs of operands, found 3"),
        ((*MESH, "--in-specs", "P(None, None, 'data')"), 2, "is of more axes than an array of 2 has"),
        ((), 2, "Missing option '--mesh'"),
    ],
)
def test_words_that_mean_nothing_are_said_in_a_sentence(words, status, said, capfd):
    out, err = run(capfd, *MATMUL, *words, status=status)
    assert out == ""
    assert said in err
    assert "Traceback" not in err


def test_an_operation_that_says_nothing_is_xla_s(capfd):
    _, err = run(capfd, ROOT / "tests" / "system" / "test_api.py:SCALE", "n=8", *MESH, status=1)
    assert "scale does not declare how it is sharded" in err


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_each_usual_way_has_whole_extents_of_any_operation(data):
    """What devices have together is what was there, and no axis divides twice."""
    from scheduler.inspect.case import example

    operation = load(data.draw(st.sampled_from(OPERATIONS)))
    problem = example(operation, data.draw(st.sampled_from([8, 24, 256])))
    if problem is None or operation.shard is None:
        return
    mesh = data.draw(st.dictionaries(st.sampled_from("xyz"), st.integers(1, 8), min_size=1))
    sharding = shards.sharding_of(operation, problem)
    for way in shards.usual_ways(sharding, problem, mesh):
        divided = way.divided
        for spec, s in zip(divided.operands, problem.operands(), strict=True):
            axes = [axis for entry in spec for axis in entry]
            assert len(set(axes)) == len(axes)
            for entry, extent in zip(spec, s.shape, strict=True):
                for axis in entry:
                    assert extent % mesh[axis] == 0
                    extent //= mesh[axis]
        assert type(problem).from_canonical(divided.problem.canonical()) == divided.problem


# extract --mesh


def test_an_array_s_text_tells_what_divides_it():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    over = NamedSharding(mesh, PartitionSpec("model", None, "data"))
    assert named.array("bf16[64@model, 32,256@(data)]", mesh) == jax.ShapeDtypeStruct(
        (64, 32, 256), jnp.bfloat16, sharding=over
    )
    assert named.array("f32[8@(data,model)]", mesh).sharding.spec == PartitionSpec(("data", "model"))
    for text, said in [
        ("f32[8@data]", "give --mesh"),
        ("f32[8@]", "expected an array such as"),
        ("f32[8@(data]", "expected an array such as"),
        ("f32[8 8]", "expected an array such as"),
    ]:
        with pytest.raises(ValueError, match=said):
            named.array(text)
    with pytest.raises(ValueError, match="rows"):
        named.array("f32[8@rows]", mesh)


def test_meshes_and_letters_read_back():
    assert extracting.mesh_of(" data=2, model=4") == {"data": 2, "model": 4}
    assert extracting.letters_of(["m=data,model", "k=x"]) == {"m": ("data", "model"), "k": ("x",)}
    assert extracting.specs_of("P(None, 'x', ('y', 'z'))") == [((), ("x",), ("y", "z"))]
    assert extracting.specs_of("") == []


STEP = """
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from scheduler import tuned_matmul

def forward(x, up, down):
    return tuned_matmul(tuned_matmul(x, up, activation="gelu"), down)

def STEP():
    up = jax.lax.with_sharding_constraint(jnp.zeros((64, 256)), P(None, "model"))
    down = jax.lax.with_sharding_constraint(jnp.zeros((256, 64)), P("model"))
    return forward(jnp.zeros((32, 64)), up, down)

def own_mesh():
    mesh = jax.make_mesh((16,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    w = jax.lax.with_sharding_constraint(jnp.zeros((64, 256)), jax.NamedSharding(mesh, P(None, "model")))
    return tuned_matmul(jnp.zeros((32, 64)), w)
"""


@pytest.fixture
def step_file(tmp_path):
    path = tmp_path / "step.py"
    path.write_text(STEP)
    return path


def extract(*words, flags=""):
    """The command in a process of its own, whose devices are still to be made up."""
    env = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    return subprocess.run(
        [sys.executable, "-m", "scheduler", "extract", *map(str, words)],
        env=env | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", "--xla_force_host_platform_device_count=3"])
def test_extract_makes_up_the_devices_of_a_mesh(step_file, flags):
    ran = extract(f"{step_file}:STEP", "--mesh", "data=4,model=4", "--hardware", "h200", flags=flags)
    assert ran.returncode == 0, ran.stderr
    assert "one device's of data=4, model=4" in ran.stdout
    assert {str(task.problem) for task in jobs.parse(ran.stdout)} == {
        "m=32 n=64 k=64 dtype=float32 activation=gelu",
        "m=32 n=64 k=64 dtype=float32",
    }
    assert "XLA partitions the function over data=4, model=4" in ran.stderr
    assert "step.py:7" in ran.stderr


@pytest.mark.slow
def test_extract_takes_arrays_that_are_divided_and_a_function_s_own_mesh(step_file):
    arrays = "f32[32@data,64]", "f32[64,256@model]", "f32[256@model,64]"
    ran = extract(f"{step_file}:forward", *arrays, *MESH, "--json")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["mesh"] == "data=2, model=4"
    assert [(row["problem"]["m"], row["problem"]["k"]) for row in found["tuned"]] == [(16, 64), (16, 64)]
    ran = extract(f"{step_file}:own_mesh", "--mesh", "model=16")
    assert [task.problem.n for task in jobs.parse(ran.stdout)] == [16], ran.stderr


@pytest.mark.slow
def test_what_extract_cannot_divide_is_said_in_a_sentence(step_file):
    arrays = "f32[31@data,64]", "f32[64,256@model]", "f32[256@model,64]"
    ran = extract(f"{step_file}:forward", *arrays, *MESH)
    assert ran.returncode == 1
    assert ran.stderr.startswith("tile-scheduler: the function cannot be compiled for the mesh data=2, model=4")
    assert "Traceback" not in ran.stderr
    ran = extract(f"{step_file}:STEP", "--mesh", "data")
    assert (ran.returncode, ran.stdout) == (2, "")
