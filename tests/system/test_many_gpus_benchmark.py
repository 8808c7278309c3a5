"""The benchmark of several GPUs, on a CPU's made-up devices: it runs to its end, and its figures follow from rows."""

import io
import json
import sys
from pathlib import Path

import pytest

from scheduler.core import hardware
from scheduler.rewriting.decided import collectives
from scheduler.store.store import shipped

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import drawn_problems
import external_clock
import many_gpus
import results_page
from harness import ROOT
from job_on_gpus import job_of, limited, shares_of, tune
from sharded_layers import cases

pytestmark = pytest.mark.slow

H200 = hardware.find("NVIDIA H200")


def test_rows_are_measured_kept_and_written_with_what_is_missing(tmp_path, capsys):
    where = ["--small", "--gpus", "4", "--work", str(tmp_path), "--results", str(tmp_path)]
    rows = ["--only", "data_and_tensor_parallel_64,job", "--minutes", "5", "--problems", "2"]
    many_gpus.main([*rows, *where, "--cache", str(tmp_path / "cache.db")])
    assert not list(tmp_path.glob("many_gpus-*.json"))
    said = capsys.readouterr().out
    assert "job_one: 2 of 2 problems" in said
    many_gpus.main(["--report", *where])
    (file,) = tmp_path.glob("many_gpus-4-cpu*.json")
    written = json.loads(file.read_text())
    layers, *jobs = written["rows"]
    assert written["environment"]["missing"] == [
        "tensor_parallel_4096", "tensor_parallel_64", "data_and_tensor_parallel_4096", "data_parallel_step",
        "sharded_parameters_step",
    ]  # fmt: skip
    assert layers["mesh"] == {"data": 2, "model": 2}
    # Of 64 tokens and 64 hidden columns, half on each device: what was extracted is tuned, asked and answered.
    local = {text.partition(" out_dtype")[0] for text in layers["local_problems"]}
    assert local == {"gated_matmul m=32 n=32 k=32 pair=True", "matmul m=32 n=32 k=32"}
    assert layers["asked_as_extracted"]
    assert {one["from"] for one in layers["answers"]} == {"measured, from the user's cache"}
    assert {one["state"] for one in layers["tuning"]["results"]} == {"tuned"}
    assert layers["collectives"]["tuned"]["all-reduce"]["count"] == 2
    assert layers["same_collectives"]
    assert layers["error_vs_jnp"] < 1.5
    assert [one["state"] for job in jobs for one in job["results"]] == ["tuned"] * 4
    assert written["summary"] == many_gpus.summary(written["rows"])
    assert written["summary"]["answered_from_records"]
    assert written["summary"]["seconds_per_problem_1_gpu"] > 0
    assert written["summary"]["job_speedup_4_gpus"] > 0
    assert written["summary"]["seconds_per_record_verified"] > 0
    assert len(next(job for job in jobs if job["case"] == "job_one")["verdicts"]) == 2


def test_one_gpu_is_too_few_and_unknown_rows_are_named(tmp_path, capsys):
    for arguments, reason in (
        ([], "at least two GPUs are wanted, and 0 can be used"),
        (["--small", "--only", "jobs"], "no row jobs; there are tensor_parallel_4096"),
    ):
        with pytest.raises(SystemExit):
            many_gpus.main([*arguments, "--work", str(tmp_path)])
        assert reason in capsys.readouterr().err
    with pytest.raises(SystemExit, match="holds no rows of 4 devices"):
        many_gpus.main(["--small", "--report", "--work", str(tmp_path)])


def test_a_job_whose_time_is_up_is_interrupted_and_says_so(tmp_path):
    tasks = drawn_problems.drawn(1, 0, drawn_problems.SMALL, 2)
    ran = tune(limited(job_of(tasks), 2), [], str(tmp_path / "cache.db"), 0.01)
    assert ran.cut_off
    assert not ran.results


def test_the_layers_are_those_of_llama_3_70b_and_tokens_are_divided_from_four_devices_on():
    assert [one.name for one in cases(2, small=False)] == ["tensor_parallel_4096", "tensor_parallel_64"]
    four = {one.name: one for one in cases(4, small=False)}
    assert {(one.data, one.model) for one in four.values()} == {(1, 4), (2, 2)}
    model = four["tensor_parallel_64"].case.model
    assert model.shapes() == {"gate": (8192, 28672), "up": (8192, 28672), "down": (28672, 8192)}
    assert model.tokens == 64


def test_problems_are_drawn_in_an_order_of_which_none_is_shipped():
    tasks = drawn_problems.drawn(40, 0, drawn_problems.KINDS, 64)
    assert len({str(task) for task in tasks}) == 40
    assert drawn_problems.drawn(8, 0, drawn_problems.KINDS, 64) == tasks[:8]
    assert drawn_problems.drawn(8, 1, drawn_problems.KINDS, 64) != tasks[:8]
    assert {task.operation.name for task in tasks[:5]} >= {"matmul", "flash_attention", "gated_matmul"}
    known = {(record.key.operation, record.key.problem) for record in shipped().records()}
    for task in tasks:
        assert (task.operation.name, task.problem.canonical()) not in known
        kernels = [kernel for kernel in task.operation.kernels if not kernel.library]
        assert any(kernel.supports(task.problem, H200.target) is None for kernel in kernels), task
    with pytest.raises(ValueError, match="no 40 problems can be drawn, only"):
        drawn_problems.drawn(40, 0, drawn_problems.SMALL[1:], 2)


def test_collectives_are_counted_once_whether_they_are_started_or_not_with_the_bytes_of_their_results():
    program = """
      %all-reduce.1 = f32[64,32]{1,0} all-reduce(%dot), channel_id=1
      %start = (bf16[64,32]{1,0}, bf16[64,128]{1,0}) all-gather-start(%x), channel_id=2
      %done = bf16[64,128]{1,0} all-gather-done(%start)
      %both = (f32[8]{0}, f32[4]{0}) all-reduce-start(%a, %b), channel_id=3
      %text = f32[] add(%c, %d), metadata={op_name="all-reduce(x)"}
    """
    assert collectives(program) == {
        "all-reduce": {"count": 2, "bytes": 64 * 32 * 4 + 12 * 4},
        "all-gather": {"count": 1, "bytes": 64 * 128 * 2},
    }


def test_a_gpu_is_busy_for_the_mean_of_what_the_driver_said_and_unknown_where_it_said_nothing():
    said = io.StringIO("GPU-1, 50\nGPU-2, 0\nGPU-1, 100\nGPU-2, [N/A]\nGPU-")
    assert shares_of(said, ["GPU-1", "GPU-2"]) == [0.75, 0.0]
    assert shares_of(said, ["GPU-1", "GPU-3"]) == []


LAYERS = {
    "case": "tensor_parallel_64",
    "gpus": 4,
    "mesh": {"data": 1, "model": 4},
    "jnp_us": 100.0,
    "tuned_us": 80.0,
    "tuned_vs_jnp": 1.25,
    "error_vs_jnp": 0.9,
    "same_collectives": True,
    "collectives": {
        "jnp": {"all-reduce": {"count": 1, "bytes": 10**6}},
        "tuned": {"all-reduce": {"count": 1, "bytes": 2 * 10**6}},
    },
    "answers": [{"recorded": True}],
}
ON_ALL = {
    "case": "job_all",
    "gpus": 4,
    "hardware": "NVIDIA H200",
    "problems": ["a", "b"],
    "budget": 64,
    "seconds": 10.0,
    "whole": True,
    "busy": [0.5, 0.7],
    "results": [{}, {}],
}
ON_ONE = ON_ALL | {"case": "job_one", "gpus": 1, "seconds": 30.0, "busy": [], "verify_seconds": 3.0}
ON_ONE |= {"verdicts": ["holds", "slower"]}


def test_the_summary_takes_the_worst_of_layers_and_names_a_speed_up_by_the_number_of_gpus():
    worse = LAYERS | {"tuned_vs_jnp": 0.98, "answers": [{"recorded": False}]}
    figures = many_gpus.summary([LAYERS, worse, ON_ALL, ON_ONE])
    assert (figures["tensor_parallel_vs_jnp_worst"], figures["answered_from_records"]) == (0.98, False)
    assert figures["job_speedup_4_gpus"] == 3.0
    assert (figures["seconds_per_problem_1_gpu"], figures["collective_bytes_vs_jnp_worst"]) == (15.0, 2.0)
    assert figures["seconds_per_record_verified"] == 1.5
    figures = many_gpus.summary([ON_ALL | {"gpus": 2}, ON_ONE])
    assert (figures["job_speedup_2_gpus"], figures["gpus"]) == (3.0, 2)
    assert figures["same_collectives"] is None


def test_a_share_of_the_host_has_whole_cores(tmp_path):
    for cpu in range(8):
        (tmp_path / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    assert many_gpus.by_core({7, 6, 5, 4, 3, 2, 1, 0}, tmp_path) == [0, 4, 1, 5, 2, 6, 3, 7]
    assert many_gpus.by_core([3, 1, 2], tmp_path / "elsewhere") == [1, 2, 3], "nobody says"


def test_a_job_that_was_cut_off_or_has_other_problems_gives_no_speed_up():
    for one in (ON_ONE | {"whole": False}, ON_ONE | {"problems": ["a"]}, None):
        assert many_gpus.speedup(ON_ALL, one) is None


def test_the_page_of_results_has_several_gpus_where_there_is_a_file_of_them():
    results = {path.stem: json.loads(path.read_text()) for path in sorted((ROOT / "benchmarks/results").glob("*.json"))}
    of = {"environment": {"device": "NVIDIA H200", "jax": "0", "commit": "0" * 40}, "rows": [LAYERS, ON_ALL, ON_ONE]}
    page = results_page.page(results | {"many_gpus-4-nvidia-h200": of})
    assert "| tensor_parallel_64 | 1 x 4 | 100.0 | 80.0 | 1.250 | 0.900 | 1.0 | 2.0 |" in page
    assert "| 4 | 2 of 2 | 64 | 10 | 60.0 % |  |\n| 1 | 2 of 2 | 64 | 30 |  | 1.5 |" in page
    without = {name: one for name, one in results.items() if not name.startswith("many_gpus")}
    assert "Several GPUs of one host" not in results_page.page(without)


def test_winners_are_timed_again_in_processes_that_chose_none_of_them(tmp_path, capsys):
    where = ["--cache", str(tmp_path / "c.db"), "--work", str(tmp_path), "--results", str(tmp_path)]
    command = ["--count", "2", "--budget", "2", "--rounds", "2", *where]
    external_clock.main(command)
    (path,) = tmp_path.glob("external_clock-cpu*.json")
    result = json.loads(path.read_text())
    assert result["summary"]["problems"] == 2
    for row in result["rows"]:
        assert [len(each) for each in row["winner_samples_us"]] == [2] * external_clock.PROCESSES
        assert row["winner_deviation"] == pytest.approx(row["winner_us"] / row["winner_stored_us"] - 1)
    capsys.readouterr()
    external_clock.main(command)
    assert "time: " not in capsys.readouterr().out, "rows that were kept are not timed again"


def test_an_external_clock_counts_the_winners_that_agree():
    def row(winner_us, library_us):
        return {"winner_us": winner_us, "library_us": library_us, "winner_deviation": winner_us / 100 - 1}

    figures = external_clock.summary([row(101, 120), row(98, 90), row(103, 103)])
    assert (figures["agree"], figures["library_is_faster"]) == (1, 1)
    assert figures["final_vs_library_worst"] == pytest.approx(90 / 98)
    assert figures["deviation_most"] == pytest.approx(0.03)
