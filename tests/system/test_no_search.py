"""The benchmark of answers without a search leaves out what it says, and counts only what was measured as exact."""

import sys
from pathlib import Path

import pytest

from scheduler.core import hardware as chips
from scheduler.store import text_files
from search_spaces import load
from search_spaces.matmul import MatmulProblem

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import no_search

pytestmark = pytest.mark.one_jax
ROOT = Path(__file__).parents[2]
H200 = chips.find("NVIDIA H200")


@pytest.fixture(scope="module")
def rows():
    records = [r for r in text_files.read_records(ROOT / "records") if r.key.operation == "gated_matmul"]
    judged, environments = no_search.judge(load("gated_matmul"), H200, records, 1.0, {"other/kernel": [1.0, 1.21]})
    assert environments
    return judged


def test_each_problem_has_an_answer_that_is_no_faster_than_the_fastest_known(rows):
    assert len(rows) == 3
    for row in rows:
        for label in ("", "beside_", "before_"):
            assert row["best_us"] * (1 - 1e-9) <= row[f"{label}us"] <= row[f"{label}bound_us"]


def test_what_was_not_measured_is_estimated_by_what_top_predictions_cost(rows):
    for row in rows:
        for label in ("", "before_"):
            if row[f"{label}answer"] == "mosaic_gpu" and not row[f"{label}exact"]:
                assert row[f"{label}bound_us"] / row[f"{label}us"] == pytest.approx(1.1)


def test_the_summary_follows_from_the_rows(rows):
    summary = no_search.summarise(rows)
    gains = [row["xla_us"] / row["us"] for row in rows]
    assert summary["final_vs_xla_worst"] == pytest.approx(min(gains))
    assert summary["problems"] == summary["gated_matmul"]["problems"] == 3
    assert 0 <= summary["exact"] <= 3
    best = [{**row, "us": row["best_us"]} for row in rows]
    assert no_search.summarise(best)["gain_taken"] == pytest.approx(1)
    library = [{**row, "us": row["xla_us"]} for row in rows]
    assert no_search.summarise(library)["gain_taken"] == pytest.approx(0)


def test_a_group_is_of_sizes_alone():
    one = MatmulProblem(4096, 4096, 4096)
    assert no_search.apart(one, MatmulProblem(4096, 4096, 4096, dtype="float16", bias="float16")) == 0
    assert no_search.apart(one, MatmulProblem(2048, 8192, 4096)) == 2
    assert no_search.apart(one, MatmulProblem(4096, 4096, 4096, batch=4)) == 2


def test_every_sweep_of_the_chip_tells_what_its_top_prediction_costs():
    assert len(no_search.sweeps_of(H200, "matmul")) == len(list((ROOT / "sweeps" / "nvidia-h200").glob("matmul-*")))
