"""The benchmark of the row-wise operations: its problems, its rivals, and the figures it boils them down to."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from scheduler.core import hardware
from scheduler.search import jobs
from search_spaces import load
from search_spaces.problem import as_tuple
from search_spaces.rows.channels import GroupNormProblem
from search_spaces.rows.problem import RowProblem

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import rows as benchmark
from rows_rivals import AS_WRITTEN, WRITTEN, WrittenProblem

from scheduler.measure.runner import Task

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
H200 = hardware.find("NVIDIA H200")


@pytest.mark.parametrize(
    ("job", "least"), [("benchmarks/rows.toml", 10), ("sweeps/rows.toml", 10), ("sweeps/channels.toml", 5)]
)
def test_every_problem_of_a_job_is_one_that_a_pallas_kernel_takes(job, least):
    parsed = jobs.parse((ROOT / job).read_text())
    tasks = [task for task in parsed if isinstance(task, jobs.Task)]
    assert len(tasks) == len(parsed)
    assert len({(task.operation.name, task.problem) for task in tasks}) == len(tasks) >= least
    for task in tasks:
        assert task.operation.kernel("mosaic_gpu").supports(task.problem, H200.target) is None, str(task)


def test_the_suite_reaches_from_the_launch_to_a_gibibyte_and_from_128_to_262144_columns():
    problems = [task.problem for task in benchmark.tasks(H200, None)]
    sizes = [p.operands()[0].size * p.operands()[0].dtype.itemsize for p in problems]
    assert min(sizes) < 2**20
    assert max(sizes) >= 2**30
    assert any(isinstance(p, GroupNormProblem) for p in problems)
    problems = [p for p in problems if isinstance(p, RowProblem)]
    assert {128, 256, 262144} <= {p.columns for p in problems}
    assert {p.dtype for p in problems} == {"bfloat16", "float16", "float32"}
    assert any(p.columns % 2 for p in problems)
    assert any(p.rows % 2 and p.rows > 1 for p in problems)


def test_names_choose_operations_or_parts_of_problems():
    every = benchmark.tasks(H200, None)

    def names(points):
        return [task.operation.name for task in benchmark.chosen_by(points, every)]

    assert names("quantize_rows,layer_norm") == ["layer_norm", "quantize_rows", "quantize_rows"]
    assert {*names("cross_entropy")} == {*benchmark.CROSS_ENTROPY}
    assert {*names("")} - {*names("table")} == {*benchmark.FORWARD}
    with pytest.raises(SystemExit, match="there are table"):
        names("nothing")


def row(operation, columns, *, pallas=4.0, vs_xla=1.2, size=2**27, dtype="bfloat16", final=1.0, **figures):
    times = {"xla_us": 200.0, "library_us": 150.0, "torch_us": None, "final_us": 100.0}
    return times | {
        "operation": operation,
        "bytes": 2 * size,
        "columns": columns,
        "dtype": dtype,
        "operand_bytes": size,
        "copy_tb_per_s": 4.4,
        "xla_tb_per_s": 2.0,
        "pallas_tb_per_s": pallas,
        "pallas_vs_xla": vs_xla,
        "final_vs_xla": final,
        **figures,
    }


def test_the_summary_takes_the_worst_of_what_each_figure_is_about():
    rows = [
        row("softmax", 4096, pallas=4.2, vs_xla=1.15),
        row("softmax", 32768, pallas=4.1, vs_xla=2.3),
        row("softmax", 262144, pallas=3.0, vs_xla=1.0),
        row("softmax", 4096, pallas=1.0, vs_xla=0.5, size=2**20),
        row("softmax", 4096, pallas=1.0, vs_xla=0.5, dtype="float32", final=0.98),
        row("rms_norm", 65536, pallas=4.0, vs_xla=1.8),
        row("silu_and_mul", 4096, vs_xla=1.04, size=2**26),
        row("silu_and_mul", 4096, vs_xla=0.9, size=2**25),
    ]
    assert (
        benchmark.summary(rows).items()
        >= {
            "softmax_tb_per_s_worst": 4.1,
            "softmax_of_best_worst": 4.1 / 4.4,
            "rms_norm_tb_per_s_worst": 4.0,
            "softmax_vs_xla_worst": 1.15,
            "softmax_long_vs_xla_worst": 2.3,
            "rms_norm_long_vs_xla_worst": 1.8,
            "silu_and_mul_vs_xla_worst": 1.04,
            "final_vs_xla_worst": 0.98,
        }.items()
    )
    # A large problem without a Pallas schedule counts as nothing.
    assert benchmark.summary([*rows, row("softmax", 4096, pallas=None)])["softmax_tb_per_s_worst"] == 0.0


def test_a_floor_is_the_bytes_at_the_best_rate_of_large_copies():
    figures = benchmark.summary(
        [
            row("layer_norm_backward", 4096, bytes=4.0e8, torch_us=90.0),
            row("softmax_backward", 8192, bytes=4.4e8, final_us=50.0, copy_tb_per_s=2.0),
            row("quantize_rows", 8192, bytes=2.2e8),
            row("quantize_rows", 128, bytes=1.1e9, final_us=1100.0),
            row("cross_entropy_saving", 128256, bytes=1.0e9, torch_us=300.0, final_us=200.0),
            row("cross_entropy_backward", 128256, bytes=1.2e9, torch_us=300.0, final_us=800.0),
            row("softmax", 256, bytes=2**20, copy_tb_per_s=9.0),
        ]
    )
    assert figures["copy_tb_per_s"] == 4.4
    assert figures["layer_norm_backward_of_floor"] == pytest.approx(1.1)
    assert figures["softmax_backward_of_floor"] == pytest.approx(0.5)
    assert figures["quantize_of_floor"] == pytest.approx(4.4)
    assert figures["cross_entropy_of_floor"] == pytest.approx(2.0)
    assert figures["rms_norm_backward_of_floor"] is None
    assert figures["backward_vs_xla_geomean"] == pytest.approx((200 / 100 * 200 / 50 * 200 / 800) ** (1 / 3))
    assert figures["vs_torch_worst"] == pytest.approx(0.6)


def test_a_rehearsal_searches_times_and_merges_what_commands_choose(tmp_path):
    where = ["--work", str(tmp_path / "work"), "--results", str(tmp_path), "--cache", str(tmp_path / "cache.db")]

    def run(*options):
        benchmark.main([*options, "--rounds", "2", "--trials", "2", *where])
        (file,) = tmp_path.glob("rows-cpu*.json")
        return json.loads(file.read_text())

    first = run("--points", "softmax,cross_entropy")
    assert [one["operation"] for one in first["rows"]] == ["softmax", *benchmark.CROSS_ENTROPY]
    assert len(first["environment"]["missing"]) == len(benchmark.CPU_SUITE) - 3
    written = run("--points", "add_rms_norm,silu_and_mul,layer_norm_backward,quantize_rows")
    assert written["summary"].keys() == benchmark.summary([]).keys()
    assert written["summary"]["problems"] == len(written["rows"]) == len(benchmark.CPU_SUITE)
    assert [one for one in written["rows"] if one in first["rows"]] == first["rows"]
    assert written["summary"]["final_vs_xla_worst"] > 0
    for one in written["rows"]:
        assert one["final_vs_xla"] == pytest.approx(one["xla_us"] / one["final_us"])
        assert one["library_us"]
        assert not one["failures"]


@pytest.mark.parametrize("name", sorted({*WRITTEN} - {"group_norm"}))
def test_what_people_write_of_rows_is_the_same_formula_rounded_more_often(name):
    problem = load(name).problem(rows=8, columns=512, dtype="bfloat16")
    written = WrittenProblem(name, problem.canonical())
    args = problem.inputs(seed=0)
    found = as_tuple(written.compute(*args)), as_tuple(problem.reference(*args))
    for actual, right, result, tolerance in zip(*found, problem.results(), written.tolerance(), strict=True):
        assert actual.dtype == result.dtype
        np.testing.assert_allclose(actual.astype("float32"), right, rtol=tolerance.relative, atol=tolerance.absolute)


@pytest.mark.parametrize("name", sorted({*WRITTEN} - {"group_norm", "quantize_rows"}))
def test_the_backward_pass_of_what_people_write_has_the_gradients_of_ours(name):
    parts = [load(f"{name}_{part}").problem(rows=8, columns=512, dtype="float32") for part in ("saving", "backward")]
    written = WrittenProblem(f"{name}_backward", parts[1].canonical())
    args, count = written.inputs(seed=0), len(written.forward.operands())
    forward = as_tuple(parts[0].reference(*args[:count]))
    derivative = written.forward.derivative()
    saved = [(args if x.kind == "operand" else forward)[x.index] for x in derivative.saved]
    distinct = as_tuple(parts[1].reference(*saved, *args[count:]))
    right = [distinct[place] for _, place in derivative.moved]
    for actual, wanted, tolerance in zip(written.compute(*args), right, written.tolerance(), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=tolerance.relative, atol=tolerance.absolute)


def test_torch_is_asked_for_the_inputs_of_a_formula():
    problem = load("cross_entropy_backward").problem(rows=16, columns=256)
    task = Task(
        AS_WRITTEN, WrittenProblem("cross_entropy_backward", problem.canonical()), "torch", {"mode": "eager"}, 1
    )
    assert benchmark.request(task) == {
        "formula": "cross_entropy",
        "backward": True,
        "operands": [[[16, 256], "bfloat16"], [[16], "int32"]],
        "mode": "eager",
    }
