"""The benchmark of the row-wise operations: its problems, and the figures it boils them down to."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from scheduler.core import hardware
from scheduler.search import jobs
from search_spaces.problem import as_tuple

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import rows as benchmark

pytestmark = [pytest.mark.one_jax, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
H200 = hardware.find("NVIDIA H200")


@pytest.mark.parametrize("job", ["benchmarks/rows.toml", "sweeps/rows.toml"])
def test_every_problem_of_a_job_is_one_that_a_pallas_kernel_takes(job):
    tasks = jobs.parse((ROOT / job).read_text())
    assert len({(task.operation.name, task.problem) for task in tasks}) == len(tasks) >= 10
    for task in tasks:
        assert task.operation.kernel("mosaic_gpu").supports(task.problem, H200.target) is None


def test_the_suite_reaches_from_the_launch_to_a_gibibyte_and_from_256_to_262144_columns():
    problems = [task.problem for task in benchmark.tasks(H200, None)]
    sizes = [p.operands()[0].size * p.itemsize for p in problems]
    assert min(sizes) < 2**20
    assert max(sizes) == 2**30
    assert {256, 262144} <= {p.columns for p in problems}
    assert {p.dtype for p in problems} == {"bfloat16", "float16", "float32"}
    assert any(p.columns % 2 for p in problems)
    assert any(p.rows % 2 and p.rows > 1 for p in problems)


def row(operation, columns, *, pallas=4.0, vs_xla=1.2, size=2**27, dtype="bfloat16", final=1.0):
    return {
        "operation": operation,
        "columns": columns,
        "dtype": dtype,
        "operand_bytes": size,
        "copy_tb_per_s": 4.4,
        "xla_tb_per_s": 2.0,
        "pallas_tb_per_s": pallas,
        "pallas_vs_xla": vs_xla,
        "final_vs_xla": final,
    }


def test_the_summary_takes_the_worst_of_what_each_figure_is_about():
    figures = benchmark.summary(
        [
            row("softmax", 4096, pallas=4.2, vs_xla=1.15),
            row("softmax", 32768, pallas=4.1, vs_xla=2.3),
            row("softmax", 131072, pallas=4.3, vs_xla=2.4),
            row("softmax", 262144, pallas=3.0, vs_xla=1.0),
            row("softmax", 4096, pallas=1.0, vs_xla=0.5, size=2**20),
            row("softmax", 4096, pallas=1.0, vs_xla=0.5, dtype="float32", final=0.98),
            row("rms_norm", 65536, pallas=4.0, vs_xla=1.8),
            row("silu_and_mul", 4096, vs_xla=1.04, size=2**26),
            row("silu_and_mul", 4096, vs_xla=0.9, size=2**25),
        ]
    )
    assert figures["softmax_tb_per_s_worst"] == 4.1
    assert figures["softmax_of_best_worst"] == pytest.approx(4.1 / 4.4)
    assert figures["rms_norm_tb_per_s_worst"] == 4.0
    assert figures["softmax_vs_xla_worst"] == 1.15
    assert figures["softmax_long_vs_xla_worst"] == 2.3
    assert figures["rms_norm_long_vs_xla_worst"] == 1.8
    assert figures["silu_and_mul_vs_xla_worst"] == 1.04
    assert figures["final_vs_xla_worst"] == 0.98


def test_a_large_problem_without_a_pallas_schedule_counts_as_nothing():
    missing = row("softmax", 4096, pallas=None, vs_xla=None)
    assert benchmark.summary([row("softmax", 1024), missing])["softmax_tb_per_s_worst"] == 0.0


def test_a_rehearsal_searches_times_and_writes_every_figure(tmp_path):
    where = ["--work", str(tmp_path / "work"), "--results", str(tmp_path)]
    benchmark.main(["--cache", str(tmp_path / "cache.db"), "--budget", "2", "--rounds", "1", *where])
    (file,) = tmp_path.glob("rows-cpu*.json")
    written = json.loads(file.read_text())
    assert written["summary"].keys() == benchmark.summary([]).keys()
    assert written["summary"]["problems"] == len(written["rows"]) == len(benchmark.CPU_SUITE)
    assert written["summary"]["final_vs_xla_worst"] > 0


def test_rows_are_rehearsed_by_the_command_and_told_beside_what_is_written(tmp_path):
    options = ["--budget", "3", "--rounds", "2", "--cache", str(tmp_path / "c.db"), "--work", str(tmp_path / "work")]
    benchmark.main([*options, "--results", str(tmp_path)])
    (file,) = tmp_path.glob("rows-cpu*.json")
    result = json.loads(file.read_text())
    assert len(result["rows"]) == len(benchmark.CPU_SUITE)
    for one in result["rows"]:
        assert one["final_vs_xla"] == pytest.approx(one["xla_us"] / one["final_us"])
        assert one["library_us"]


@pytest.mark.parametrize("name", benchmark.WRITTEN)
def test_what_people_write_of_rows_is_the_same_formula_rounded_more_often(name):
    written = benchmark.WRITTEN[name]
    problem = written.problem(rows=8, columns=512, dtype="bfloat16")
    args = problem.inputs(seed=0)
    found = written.library.run(problem, None, None, *args), problem.reference(*args)
    told = problem.results(), as_tuple(written.library.tolerance(problem, None))
    for actual, right, result, tolerance in zip(*map(as_tuple, found), *told, strict=True):
        assert actual.dtype == result.dtype
        np.testing.assert_allclose(actual.astype("float32"), right, rtol=tolerance.relative, atol=tolerance.absolute)
