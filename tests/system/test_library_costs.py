"""What XLA costs: the points that are measured, a rehearsal, and constants that are found again in such rows."""

import dataclasses
import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from scheduler.core import hardware as chips
from scheduler.core.records import Environment
from scheduler.model.calibration import fit
from scheduler.model.constants import known
from scheduler.model.cost import Constants, CostModel
from search_spaces.matmul import MATMUL, MatmulProblem
from search_spaces.row_alignment import row_alignment

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import library_costs

H200 = chips.find("NVIDIA H200")
NOW = Environment(jax="0", jaxlib="0", driver="0", date="2026-01-01T00:00:00Z")
POINTS = library_costs.points()


def row(problem, constants):
    us = 1e6 * CostModel(H200, constants).library_seconds(problem)
    return {"operation": "matmul", "problem": problem.canonical(), "family": "alignment", "microseconds": {"xla": us}}


def test_the_points_are_distinct_and_have_each_alignment_of_each_array_and_each_arithmetic():
    assert len({str(point) for point in POINTS}) == len(POINTS) >= 200
    products = [point.problem for point in POINTS if point.operation is MATMUL]
    for array in range(2):
        assert {row_alignment(p.operands()[array]) for p in products} >= {16, 8, 4, 2}
    assert {row_alignment(p.result()) for p in products} >= {16, 8, 4, 2}
    assert {p.arithmetic for p in products} >= {"bfloat16", "float16", "int8", "float8_e4m3fn", "tf32", "bf16_3x"}
    assert {(p.transpose_a, p.transpose_b) for p in products} == {(a, b) for a in (False, True) for b in (False, True)}


def test_the_first_half_of_the_points_is_about_as_varied_as_all_of_them():
    half = Counter(point.operation.name for point in POINTS[: len(POINTS) // 2])
    for name, count in Counter(point.operation.name for point in POINTS).items():
        assert abs(half[name] - count / 2) <= max(3, count / 20), name


def test_constants_of_unaligned_rows_are_found_again_in_the_rows_of_a_chip_that_has_them():
    true = Constants(library_unaligned=1.0, library_halving=0.1, library_store=3.0)
    rows = [row(point.problem, true) for point in POINTS if point.operation is MATMUL]
    made = fit(MATMUL, MATMUL.library, H200, library_costs.observations(rows, MATMUL), NOW)
    found = CostModel(H200, dataclasses.replace(Constants(), **known(made)))
    for problem in (MatmulProblem(4096, 4097, 4096), MatmulProblem(4095, 4095, 4095), MatmulProblem(2048, 3000, 1001)):
        wanted = CostModel(H200, true).library_seconds(problem)
        assert found.library_seconds(problem) == pytest.approx(wanted, rel=0.05)


def test_a_rehearsal_times_each_program_and_a_second_one_measures_nothing_again(tmp_path, capsys):
    command = ["--small", "--work", str(tmp_path), "--results", str(tmp_path)]
    library_costs.main(command)
    (result,) = tmp_path.glob("library_costs-*.json")
    first = json.loads(result.read_text())["rows"]
    assert [line["family"] for line in first] == ["alignment", "alignment", "rows"]
    assert all(line["microseconds"]["xla"] > 0 and not line["failures"] for line in first)
    assert "batch: 1 of 1" in capsys.readouterr().out
    library_costs.main(command)
    assert json.loads(result.read_text())["rows"] == first
    assert "batch" not in capsys.readouterr().out
