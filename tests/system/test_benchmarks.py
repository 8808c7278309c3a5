"""The matmul benchmark without a device: its suite, its rival, its steps on an H200 that takes the model's times."""

import contextlib
import dataclasses
import json
import random
import re
import sys
from pathlib import Path

import hopper
import numpy as np
import pytest
from failures import failures
from invented import Alone
from operations import NOTED, NotedProblem

from scheduler.core.errors import RecordingError
from scheduler.core.hardware import GIB
from scheduler.core.records import Environment, Failure, Measurement
from scheduler.measure.buffers import timing_conditions
from scheduler.measure.gpu import Gpu
from scheduler.measure.runner import Task
from scheduler.measure.worker_process import CONTEXT_BYTES
from scheduler.model.cost import CostModel
from scheduler.model.pruning import prune
from scheduler.search import jobs
from scheduler.store.store import Store
from search_spaces import Columns, load, locate
from search_spaces.jax_compat import HAS_GPU_INTERPRETER
from search_spaces.matmul import MATMUL, MatmulProblem
from search_spaces.problem import nbytes

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import comparison
import fused
import matmul
from harness import paced, posed
from independent import FreshProcesses, time_in_rounds
from jax_hopper import JAX_HOPPER, RIVALS, JaxHopperSchedule
from problems import FUSED, MATMULS, REPEATED

ROOT = Path(__file__).parents[2]
H200, MODEL = hopper.H200, CostModel(hopper.H200)
RESULT = json.loads((ROOT / "benchmarks" / "results" / "matmul-nvidia-h200.json").read_text())
NEVER = float("inf")
SMALL = MatmulProblem(1024, 1024, 2048)
RAGGED = MatmulProblem(1000, 1000, 1000)


class Modelled(Alone):
    """An H200 on which everything takes as long as the model says; it counts what it is asked."""

    environment = Environment(jax="0", jaxlib="0", driver="0", date="2026-01-01T00:00:00Z")

    def __init__(self, *failing):
        self.failing, self.asked = failing, 0

    def measure(self, task, *, again=False):
        self.asked += 1
        if task.backend in self.failing:
            return Failure("verify", "all elements are off")
        kernel = task.operation.kernel(task.backend)
        if kernel.library:
            time_s = MODEL.library_seconds(task.problem)
        else:
            one = Columns.of([kernel.space(task.problem, H200.target).decode(task.schedule)])
            time_s = float(MODEL.seconds(kernel.footprint(task.problem, one, H200.target))[0])
        return Measurement(time_s, (time_s,) * task.repetitions, "cupti", "cold")


def products(*problems):
    return [product for product in MATMULS if product.problem in problems]


def drawn(problem, count):
    pruned = prune(JAX_HOPPER, problem, H200, MODEL)
    return [
        JaxHopperSchedule(**pruned.points.row(i)) for i in random.Random(0).sample(range(len(pruned.points)), count)
    ]


def test_the_suite_is_of_distinct_problems_and_has_all_kinds_of_them():
    problems = [product.problem for product in MATMULS]
    assert len(set(problems)) == len(problems) >= 40
    assert {p.m for p in problems} >= {1, 16, 64, 128, 256, 1024, 2048, 4096, 8192}
    assert {p.n for p in problems} >= {128256, 151936, 32000, 50257}
    assert {p.batch for p in problems} >= {1, 4, 16}
    assert {p.dtype for p in problems} == {"bfloat16", "float16"}
    assert any(p.out_dtype == "float32" for p in problems)
    assert any(p.transpose_a for p in problems)
    assert any(p.transpose_b for p in problems)
    assert sum("Llama 3" in product.origin for product in MATMULS) >= 10
    assert set(REPEATED) <= set(problems)


def test_the_job_of_float32_is_of_both_precisions_and_has_kernels():
    problems = [task.problem for task in jobs.parse((ROOT / "benchmarks" / "float32.toml").read_text())]
    assert len(set(problems)) == len(problems) == 8
    assert {p.dtype for p in problems} == {"float32"}
    assert {p.precision for p in problems} == {"default", "high"}
    for problem in problems:
        assert MATMUL.kernel("mosaic_gpu_bf16_3x").supports(problem, H200.target) is None


def test_what_was_measured_before_the_suite_grew_is_still_in_it_and_in_the_same_order():
    measured = [posed(MatmulProblem, row["problem"]) for row in RESULT["rows"]]
    assert [product.problem for product in MATMULS][:21] == measured[:21]


def test_workers_have_room_for_each_problem():
    def check(product):
        problem = product.problem
        elements = [np.prod(x.shape) for x in problem.operands()]
        result, reference = problem.result(), 4 * np.prod(problem.result().shape)
        # Operands for two draws, results in turns; drawing one is a pass over random bits and floats of 32 bits each,
        # and the reference multiplies operands of 32 bits.
        held = 2 * sum(2 * elements) + 2 * nbytes(result) + reference
        passing = max(8 * max(elements), 4 * sum(elements) + reference)
        # A result of 2.5 GB needs an eighth: where fifteen share the device, it is tried again with all of it.
        workers = 8 if nbytes(result) > GIB else 15
        assert held + passing + CONTEXT_BYTES < 140 * GIB / workers

    assert failures(check, MATMULS) == []


def test_operands_come_out_of_memory_but_for_the_smallest():
    warm = [p.problem for p in MATMULS if timing_conditions(p.problem, H200)[1] == "warm"]
    assert warm == [MatmulProblem(512, 512, 512)]


def test_the_rival_has_schedules_for_a_problem_or_says_why_not():
    def check(product):
        if reason := JAX_HOPPER.supports(product.problem, H200.target):
            assert re.search(r"multiples of|nothing transposed", reason)
        else:
            assert len(prune(JAX_HOPPER, product.problem, H200, MODEL).points) >= 32

    assert failures(check, MATMULS) == []


def test_the_rival_can_do_more_than_half_of_the_suite():
    able = [p for p in MATMULS if JAX_HOPPER.supports(p.problem, H200.target) is None]
    assert len(able) > len(MATMULS) / 2


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    "problem",
    [MatmulProblem(4096, 4096, 4096), MatmulProblem(128, 8192, 8192, dtype="float16"), MatmulProblem(2048, 576, 7168)],
    ids=str,
)
def test_the_rival_s_schedules_lower_and_ask_for_the_bytes_that_its_footprint_says(problem):
    for one in drawn(problem, 3):
        assert "mosaic_gpu" in hopper.lower(JAX_HOPPER, problem, one).as_text()
        said = JAX_HOPPER.footprint(problem, Columns.of([one]), H200.target).onchip_bytes[0]
        assert hopper.onchip_bytes_asked(lambda one=one: hopper.lower(JAX_HOPPER, problem, one)) == said, one


def test_what_breaks_a_rule_of_the_rival_s_space_does_not_lower():
    problem, one = MatmulProblem(384, 256, 192), JaxHopperSchedule(64, 64, 64, 3, "M", 1, "N", "none")
    space = JAX_HOPPER.space(problem, H200.target)
    assert space.broken(one) is None
    hopper.lower(JAX_HOPPER, problem, one)
    for fields in ({"tile_m": 256}, {"tile_n": 256}, {"tile_k": 128, "max_concurrent_steps": 1}):
        broken = dataclasses.replace(one, **fields)
        assert "divide" in space.broken(dataclasses.replace(broken, max_concurrent_steps=3))
        with pytest.raises(ValueError, match="divisible"):
            hopper.lower(JAX_HOPPER, problem, broken)


@pytest.mark.skipif(not HAS_GPU_INTERPRETER, reason="JAX interprets GPU kernels from 0.11 on")
def test_the_rival_is_right_on_as_many_cores_as_it_is_told():
    problem = MatmulProblem(256, 256, 192)
    one = JaxHopperSchedule(64, 64, 64, 3, "N", 4, "M", "none")
    actual, expected = hopper.interpret(JAX_HOPPER, problem, one, cores=3)
    tolerance = problem.tolerance()
    np.testing.assert_allclose(actual, expected, rtol=tolerance.relative, atol=tolerance.absolute)


def test_a_worker_can_load_the_rival_by_name_and_by_file():
    assert locate(RIVALS) == "jax_hopper:RIVALS"
    assert load(f"{ROOT / 'benchmarks' / 'jax_hopper.py'}:RIVALS").backends == RIVALS.backends
    assert RIVALS.kernels[: len(MATMUL.kernels)] == tuple(MATMUL.kernels)


@pytest.fixture
def steps(tmp_path):
    """The three steps of two problems, one of which the rival cannot do."""
    store, work, both = Store(":memory:"), tmp_path, products(SMALL, RAGGED)

    def run(runner, *, schedules=6, rounds=3, deadline=NEVER):
        matmul.tune_all(both, runner, store, 6, deadline)
        matmul.rival_all(both, runner, work, schedules, deadline)
        return matmul.time_all(both, runner, store, work, rounds, deadline)

    return run


def test_a_rehearsal_gives_every_figure_of_the_summary(steps):
    rows = steps(Modelled())
    assert [row["problem"] for row in rows] == [str(SMALL), str(RAGGED)]
    small, ragged = rows
    assert small["rival"]["drawn"] == 6
    assert small["rival"]["seed"] == matmul.RIVAL_SEED
    assert small["rival"]["legal"] == len(prune(JAX_HOPPER, SMALL, H200, MODEL).points)
    assert "multiples of" in ragged["rival"]["refused"]
    assert small["pallas_vs_jax_hopper"] == pytest.approx(small["jax_hopper_us"] / small["pallas_us"])
    assert ragged["pallas_vs_jax_hopper"] is None
    assert small["bound_us"] == pytest.approx(MODEL.lower_bound(SMALL) * 1e6)
    summary = comparison.summarize(rows)
    assert all(value is not None for name, value in summary.items() if "10gflop" not in name)
    assert summary["problems"] == 2
    assert summary["problems_with_jax_hopper"] == 1
    assert summary["pallas_vs_xla_worst"] == min(row["pallas_vs_xla"] for row in rows)
    assert summary["pallas_vs_xla_worst_over_10gflop"] is None
    assert summary["pallas_vs_jax_hopper_worst"] == small["pallas_vs_jax_hopper"]
    assert comparison.table(rows, H200).row_count == 2


def test_only_problems_above_ten_gflop_count_as_large():
    small = {"flops": 9e9, "pallas_vs_xla": 0.5}
    large = {"flops": 11e9, "pallas_vs_xla": 0.9}
    others = dict.fromkeys(
        ("pallas_us", "jax_hopper_us", "final_vs_xla", "jax_hopper_vs_xla", "pallas_vs_jax_hopper")
    ) | {"failures": {}, "rival": {}}
    summary = comparison.summarize([small | others, large | others])
    assert summary["pallas_vs_xla_worst"] == 0.5
    assert summary["pallas_vs_xla_worst_over_10gflop"] == 0.9


def test_the_same_command_measures_nothing_twice_and_what_has_changed_again(steps):
    first, again, more = Modelled(), Modelled(), Modelled()
    rows = steps(first)
    assert steps(again) == rows
    assert (first.asked > 0, again.asked) == (True, 0)
    assert [len(row["xla_samples_us"]) for row in steps(more, rounds=4)] == [40, 40]
    with pytest.raises(RecordingError, match="delete the file"):
        steps(Modelled(), schedules=7)


def test_a_line_that_was_cut_off_is_timed_again(steps, tmp_path):
    rows = steps(Modelled())
    kept = tmp_path / "judged.jsonl"
    kept.write_text(kept.read_text()[:-100])
    fresh, again = Modelled(), Modelled()
    assert [row["pallas_us"] for row in steps(fresh)] == [row["pallas_us"] for row in rows]
    assert fresh.asked > 0
    steps(again)
    assert again.asked == 0


def test_what_is_out_of_time_is_missing_rather_than_empty(steps):
    assert steps(Modelled(), deadline=-1.0) == []


def test_a_candidate_that_fails_before_the_independent_benchmark_has_no_time_and_the_others_have(steps):
    steps(Modelled(), rounds=1)
    for row in steps(Modelled("mosaic_gpu")):
        assert row["failures"]["pallas"] == "verify: all elements are off"
        assert row["pallas_us"] is None
        assert row["pallas_vs_xla"] is None
        assert row["xla_us"] > 0


def test_a_problem_that_nothing_can_do_leaves_the_others_theirs(steps, capsys):
    assert steps(Modelled(*RIVALS.backends)) == []
    said = capsys.readouterr().out
    assert said.count("none of") == 2
    assert "6 schedules of JAX's own kernel, none ran" in said


def test_every_fused_product_is_one_and_our_kernel_takes_it():
    problems = [product.problem for product in FUSED]
    assert len(set(problems)) == len(problems) >= 8
    for problem in problems:
        assert problem.fused
        assert MATMUL.kernel("mosaic_gpu").supports(problem, H200.target) is None
    assert {problem.activation for problem in problems} >= {"gelu", "silu"}


@pytest.mark.slow
def test_fused_products_are_rehearsed_by_the_command_and_told_beside_what_is_written(tmp_path):
    options = ["--budget", "2", "--rounds", "2", "--cache", str(tmp_path / "c.db"), "--work", str(tmp_path / "work")]
    fused.main([*options, "--results", str(tmp_path)])
    (file,) = tmp_path.glob("fused-cpu*.json")
    result = json.loads(file.read_text())
    assert result["summary"]["problems"] == len(result["rows"]) == 2
    assert result["summary"]["candidates_that_failed"] == 0
    for row in result["rows"]:
        assert row["final_vs_written"] == pytest.approx(row["as_written_us"] / row["final_us"])


def test_what_is_written_is_the_same_formula_rounded_more_often():
    problem = fused.WrittenProblem(16, 24, 32, bias="bfloat16", activation="gelu", residual="float32")
    args = problem.inputs(seed=0)
    written, reference = fused.AsWritten().run(problem, None, None, *args), problem.reference(*args)
    tolerance = problem.tolerance()
    np.testing.assert_allclose(written.astype("float32"), reference, rtol=tolerance.relative, atol=tolerance.absolute)
    assert not np.array_equal(written, reference.astype(written.dtype))


def test_names_of_one_task_share_its_times():
    task = Task(MATMUL, SMALL, "xla", {}, 10)
    runner = Modelled()
    timed = time_in_rounds(runner, {"xla": task, "final": task}, rounds=5)
    assert runner.asked == 1 + 5
    assert timed.rounds["xla"] == timed.rounds["final"]
    assert len(timed.times("final").samples_s) == 50


def test_a_step_begins_nothing_that_would_end_after_the_deadline(capsys):
    now = iter(range(0, 1000, 10)).__next__
    begun = list(paced(["a", "b", "c", "d"], "step", deadline=45, clock=now))
    # Each takes 10 s by this clock and is looked at 10 s later: the third would end at 60.
    assert begun == ["a", "b"]
    assert "time is up; 2 of 4 are left" in capsys.readouterr().out


def test_a_part_of_the_suite_is_rehearsed_by_the_command_and_writes_no_result(tmp_path, capsys):
    where = ["--work", str(tmp_path / "work"), "--results", str(tmp_path / "results")]
    matmul.main(["--problems", "m=1 ", "--budget", "2", "--rounds", "2", "--cache", str(tmp_path / "c.db"), *where])
    assert "no result is written" in capsys.readouterr().out
    assert not (tmp_path / "results").exists()
    (row,) = [json.loads(line) for line in (tmp_path / "work" / "judged.jsonl").read_text().split("\n") if line]
    assert row["xla_us"] > 0
    assert "Hopper" in row["rival"]["refused"]


def test_a_text_that_no_problem_contains_is_told_with_those_there_are():
    with pytest.raises(SystemExit, match="no problem contains that; there are:\n  m=4096"):
        matmul.chosen(H200, ["no such model"])


@pytest.mark.slow
def test_a_library_is_timed_in_several_fresh_processes_in_turn_and_a_kernel_in_one(tmp_path):
    gpu = Gpu(index="", uuid="fresh", driver="", free_bytes=4 * GIB)
    tasks = {}
    for backend in ("xla", "scripted"):
        (tmp_path / backend).mkdir()
        tasks[backend] = Task(NOTED, NotedProblem(place=str(tmp_path / backend)), backend, {}, 2)
    with contextlib.closing(FreshProcesses(gpu, count=2)) as fresh:
        timed = time_in_rounds(fresh, tasks, rounds=3)
    assert timed.rounds.keys() == {"xla", "scripted"}
    assert len(list((tmp_path / "xla").iterdir())) == 2
    assert len(list((tmp_path / "scripted").iterdir())) == 1
