"""The benchmark of answers without a search leaves out what it says, and counts only what was measured as exact."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scheduler.core import hardware as chips
from scheduler.store import text_files
from search_spaces import load
from search_spaces.matmul import MatmulProblem

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import no_search

ROOT = Path(__file__).parents[2]
H200 = chips.find("NVIDIA H200")


@pytest.fixture(scope="module")
def found():
    return no_search.measured(load("gated_matmul"), H200, text_files.read_records(ROOT / "records"))


@pytest.fixture(scope="module")
def rows(found):
    assert found.environments
    evidence = no_search.left_out(load("gated_matmul"), H200, found, 1.0)
    return no_search.judge(load("gated_matmul"), H200, found, evidence, {"other/kernel": [1.0, 1.21]})


def test_each_problem_has_an_answer_that_is_no_faster_than_the_fastest_known(rows):
    assert len(rows) == 3
    for row in rows:
        for label in ("kernel", "otherwise"):
            assert row["best_us"] * (1 - 1e-9) <= row[f"{label}_us"] <= row[f"{label}_bound_us"]


def test_what_was_not_measured_is_estimated_by_what_top_predictions_cost(rows):
    for row in rows:
        if row["kernel"] == "mosaic_gpu" and not row["kernel_exact"]:
            assert row["kernel_bound_us"] / row["kernel_us"] == pytest.approx(1.1)


def test_the_summary_follows_from_the_rows(rows):
    def summary_with(ratio, **times):
        return no_search.summarise([{**row, "loss_per_gain": ratio, **times} for row in rows])

    kernels = summary_with(0.0)
    gains = [row["xla_us"] / row["kernel_us"] for row in rows]
    assert kernels["final_vs_xla_worst"] == kernels["final_vs_library_worst"] == pytest.approx(min(gains))
    assert kernels["problems"] == kernels["gated_matmul"]["problems"] == 3
    assert 0 <= kernels["exact"] <= 3
    assert kernels["gain_taken_attention"] is kernels["gain_taken_rows"] is kernels["cross_chip_worst"] is None
    best = [{**row, "loss_per_gain": 0.0, "kernel_us": row["best_us"]} for row in rows]
    assert no_search.summarise(best)["gain_taken"] == pytest.approx(1)
    assert summary_with(2.0)["gain_taken"] == pytest.approx(0)
    bold, careful = (point["gain_taken"] for point in (summary_with(0.3)["curve"][n] for n in (-1, 0)))
    assert careful == pytest.approx(0)
    assert bold > 0


def test_a_chip_is_answered_from_the_records_of_its_sibling_alone(found):
    h100 = chips.find("h100")
    records = text_files.read_records(ROOT / "records")
    evidence = no_search.sibling_evidence(load("gated_matmul"), h100, records)
    assert {fitted.hardware for fitted in evidence[0].values()} == {H200.id}
    assert no_search.sibling_evidence(load("gated_matmul"), H200, records) is None
    # As if an H100 had taken the same times.
    here = [replace(r, key=replace(r.key, hardware=h100.id)) for r in found.records]
    cross = no_search.judge(
        load("gated_matmul"), h100, no_search.measured(load("gated_matmul"), h100, here), lambda _: evidence, {}
    )
    summary = no_search.summarise(cross, cross)
    assert all(row["kernel_exact"] for row in cross), "the schedules of the same problems on the sibling"
    assert summary["cross_chip_gain_taken"] == summary["gain_taken"] > 0.7
    assert summary["cross_chip_worst"] >= 1


def test_the_picture_has_a_point_for_each_ratio(rows, tmp_path):
    pytest.importorskip("matplotlib")
    no_search.draw(no_search.summarise(rows)["curve"], tmp_path / "curve.svg")
    assert (tmp_path / "curve.svg").read_text().count("<path") > len(no_search.RATIOS)


def test_a_group_is_of_sizes_alone():
    one = MatmulProblem(4096, 4096, 4096)
    assert no_search.apart(one, MatmulProblem(4096, 4096, 4096, dtype="float16", bias="float16")) == 0
    assert no_search.apart(one, MatmulProblem(2048, 8192, 4096)) == 2
    assert no_search.apart(one, MatmulProblem(4096, 4096, 4096, batch=4)) == 2


def test_every_sweep_of_the_chip_tells_what_its_top_prediction_costs():
    assert len(no_search.sweeps_of(H200, "matmul")) == len(list((ROOT / "sweeps" / "nvidia-h200").glob("matmul-*")))
