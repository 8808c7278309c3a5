"""The table of the README: its points, its losses, what its figures cost, and the command that measures it."""

import json
import shutil
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import harness
import headline
import reproduce
from markdown_page import in_place

from scheduler.core.hardware import find

RESULTS = {path.stem: json.loads(path.read_text()) for path in sorted(harness.RESULTS.glob("*.json"))}


def result(*rows, missing=(), **summary):
    environment = {"device": "NVIDIA H200 (132 cores, 140 GiB)", "missing": missing}
    return {"rows": rows, "environment": environment, "summary": summary}


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_points_that_were_not_timed_are_counted():
    rows = [
        {"operation": "softmax", "problem": f"rows={n}", "final_vs_xla": ratio} for n, ratio in ((1, 2.0), (2, 0.5))
    ]
    found = {"rows-nvidia-h200": result(*rows, missing=["softmax rows=3", "layer_norm rows=3"])}
    (line,) = [line for line in headline.ratios(found) if line.startswith("| softmax")]
    assert cells(line)[2:] == ["H200", "2 of 3", "1.000", "0.500"]


def test_every_point_below_1_is_a_loss_and_its_least_run_counts():
    rows = [
        {"model": "a", "kind": "training", "optimize_vs_jnp": 1.2, "ratios": [0.9, 1.2, 1.3]},
        {"model": "b", "kind": "training", "optimize_vs_jnp": 1.5, "ratios": [1.4, 1.5, 1.6]},
        {"model": "attention_found"},
    ]
    found = {"models-nvidia-h200": result(*rows, false_rejections=["b"])}
    (line,) = [line for line in headline.losses(found) if line.startswith("| `optimize`")]
    assert cells(line)[2:] == ["NVIDIA H200", "a", "0.900", "1 of 2"]
    assert any("refuses kernels that are right in: b" in line for line in headline.losses(found))


def test_no_comparison_with_a_loss_is_left_out():
    told = [cells(line)[:3] for line in headline.losses(RESULTS) if line.startswith("|")]
    for comparison, of, points in headline.compared(RESULTS):
        row = [comparison.ours, comparison.rival, headline.card(of)]
        assert (row in told) == any(low < 1 for *_, low in points)


def test_a_search_is_repaid_by_what_its_calls_save():
    tuned = {"problem": "m=8", "winner_us": [1.0, 1.0]}
    found = {
        "tuning_time-nvidia-h200": result(tuned, seconds_with_startup=30.0, trials=64),
        "matmul-nvidia-h200": result({"problem": "m=8", "xla_us": 13.0, "final_us": 10.0}),
    }
    assert "repaid after 10 million calls" in " ".join(" ".join(headline.costs(found)).split())
    slower = found | {"matmul-nvidia-h200": result({"problem": "m=8", "xla_us": 9.0, "final_us": 10.0})}
    assert "repaid" not in " ".join(headline.costs(slower))


def test_a_place_that_is_empty_is_filled_once_and_others_stay():
    page = "<!-- by benchmarks/a.py -->\n<!-- end -->\nbetween\n<!-- by benchmarks/b.py -->\n<!-- end -->\n"
    filled = in_place(page, "a.py", ["x"])
    assert filled == page.replace("a.py -->\n", "a.py -->\nx\n")
    assert in_place(filled, "a.py", ["x"]) == filled


def test_the_table_of_this_card_is_printed_beside_ours(tmp_path, capsys):
    (tmp_path / "results").mkdir()
    shutil.copy(harness.RESULTS / "fused-nvidia-h200.json", tmp_path / "results" / "fused-nvidia-h200.dirty.json")
    reproduce.main(["--minutes", "0", "--work", str(tmp_path), "--only", "fused"])
    here, ours = capsys.readouterr().out.split("benchmarks/results, NVIDIA H200:")
    (line,) = [line for line in here.splitlines() if "bias" in line]
    assert line in ours
    assert "cuDNN" in ours
    assert "cuDNN" not in here


@pytest.mark.parametrize("benchmark", reproduce.BENCHMARKS)
def test_a_benchmark_is_run_by_options_that_it_has(benchmark, tmp_path):
    for program, *options in reproduce.commands(benchmark, tmp_path, 0.5):
        text = Path(program).read_text() + (harness.ROOT / "benchmarks" / "suite.py").read_text()
        assert all(f'"{option}"' in text for option in options if option.startswith("--"))


def test_results_and_kept_rows_have_the_clocks_and_the_power(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "query_driver", lambda fields: [[f"of {field}" for field in fields.split(",")]])
    made = harness.write_result(
        "x", find("NVIDIA H200"), summary={}, rows=[], environment={"dirty": False}, directory=tmp_path
    )
    kept = harness.Kept(tmp_path / "kept.jsonl").add({}, {"problem": "a"})
    for state in (json.loads(made.read_text())["environment"]["gpu"], kept["gpu"]):
        assert state[0]["sm_mhz"] == "of clocks.sm"
        assert state[0]["power_w"] == "of power.draw"
