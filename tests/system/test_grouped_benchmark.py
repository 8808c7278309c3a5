"""The benchmark of grouped products: its points, its rivals, and the figures that it boils them down to."""

import contextlib
import json
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hopper import H200, lower

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import grouped as benchmark
import grouped_moe
import grouped_rivals
from grouped_points import KINDS, REHEARSED, points
from independent import WithTorch, time_in_rounds
from torch_process import TorchProcess

from scheduler.measure.runner import InProcess, Task

pytestmark = pytest.mark.slow


def test_every_point_is_tuned_for_all_distributions_and_timed_for_one():
    every = points()
    assert len({str(point) for point in every}) == len(every) == 60
    assert {point.kind for point in every} == {*KINDS, "decode"}
    for point in every:
        assert (point.tuned.variant_count, point.problem.variant_count) == (3, 1)
        if point.dense is not None:
            assert point.dense.flops == point.problem.flops


def test_jax_has_a_configuration_for_every_point_of_a_16_bit_product():
    for point in points():
        if point.kind == "gated":
            continue
        _, timed = benchmark.OPERATIONS[point.kind]
        assert timed.kernel("jax").supports(point.problem, H200.target) is None, str(point)


@pytest.mark.parametrize("kind", ["forward", "rows", "weights"])
def test_a_configuration_of_jax_lowers(kind):
    point = next(point for point in points() if point.kind == kind)
    kernel = benchmark.OPERATIONS[kind][1].kernel("jax")
    space = kernel.space(point.problem, H200.target)
    lower(kernel, point.problem, next(space.schedules(space.points())))


def test_tokamax_is_left_out_where_it_is_not_installed():
    reason = grouped_rivals.Tokamax().supports(points()[0].problem, H200.target)
    assert reason is None or "needs tokamax" in reason


@pytest.fixture
def python_of_torch(tmp_path):
    """An interpreter that answers each request with times, or with an error for one of the layouts."""
    path = tmp_path / "python"
    path.write_text(
        f"#!{sys.executable}\nimport json, sys\n"
        "for line in sys.stdin:\n"
        "    request = json.loads(line)\n"
        "    answer = 'no memory' if request['layout'] == 'k' else [request['rows'] * 1e-6] * request['repetitions']\n"
        "    print(json.dumps(answer), flush=True)\n"
    )
    path.chmod(0o755)
    return str(path)


def test_torch_takes_part_in_the_rounds_of_a_runner(python_of_torch):
    problem = REHEARSED[0].problem
    fresh = WithTorch(InProcess(), TorchProcess(python_of_torch, Path("unused")), benchmark._request)
    tasks = {
        "xla": Task(grouped_rivals.FORWARD_AND_RIVALS, problem, "xla", {}, 2),
        **{layout: Task(grouped_rivals.FORWARD_AND_RIVALS, problem, "torch", {"layout": layout}, 2) for layout in "nk"},
    }
    with contextlib.closing(fresh):
        outcome = time_in_rounds(fresh, tasks, 3)
    assert outcome.times("n").samples_s == (problem.rows * 1e-6,) * 6
    assert len(outcome.times("xla").samples_s) == 6
    assert outcome.failures["k"].detail == "no memory"


def test_torch_that_ends_is_a_failure():
    torch = TorchProcess("/bin/true", Path("unused"))
    assert torch.seconds({}) == "the process of torch has ended"
    torch.close()


def row(kind, **figures):
    ratios = {f"{mine}_vs_{other}": 1.0 for mine in ("pallas", "final") for other in benchmark.OTHERS}
    base = {"point": f"{kind} some skewed", "kind": kind, "pallas_us": 1.0, "pallas_of_bandwidth": 0.5}
    base |= {"least_rows": benchmark.MANY_ROWS}
    return base | ratios | figures


def test_the_figures_are_those_of_their_kinds():
    figures = benchmark.summary(
        [
            row("forward", pallas_vs_torch=2.0, pallas_vs_tokamax=1.5),
            row("forward", pallas_vs_torch=0.5, pallas_vs_xla=None),
            row("decode", pallas_vs_torch=8.0, pallas_of_bandwidth=0.9),
            row("rows", pallas_vs_dense=0.8, final_vs_xla=0.7),
            row("rows", pallas_vs_dense=0.1, least_rows=benchmark.MANY_ROWS - 1),
            row("weights", pallas_vs_dense=0.9),
            {"point": grouped_moe.FORWARD, "optimize_vs_jit": 3.0},
        ]
    )
    assert figures["points"] == 6
    assert figures["fwd_vs_torch_geomean"] == pytest.approx(2.0)
    assert figures["fwd_vs_torch_worst"] == 0.5
    assert figures["dx_of_dense_rate"] == pytest.approx(0.8)
    assert figures["dw_of_dense_rate"] == pytest.approx(0.9)
    assert figures["decode_of_bandwidth_worst"] == 0.9
    assert figures["final_vs_xla_worst"] == 0.7
    assert (figures["moe_layer_forward"], figures["moe_layer_backward"]) == (3.0, None)


def test_a_rehearsal_searches_times_and_writes_every_figure(tmp_path):
    out = tmp_path / "out.json"
    where = ["--work", str(tmp_path / "work"), "--results", str(tmp_path), "--out", str(out)]
    command = ["--cache", str(tmp_path / "cache.db"), "--budget", "2", "--rounds", "1", *where]
    benchmark.main(command)
    (file,) = tmp_path.glob("grouped-cpu*.json")
    written = json.loads(file.read_text())
    assert written["summary"].keys() == benchmark.summary([]).keys()
    assert written["summary"]["points"] == len(REHEARSED)
    assert written["summary"]["moe_layer_forward"] > 0
    assert written["summary"]["moe_layer_backward"] > 0
    assert json.loads(out.read_text())["summary"] == written["summary"]
    benchmark.main(command)  # finds every row again
    assert json.loads(out.read_text())["rows"] == written["rows"]


def test_an_unknown_rival_is_no_rival():
    with pytest.raises(SystemExit, match="there are"):
        benchmark.main(["--skip", "nothing"])


def test_the_layer_of_experts_is_the_sum_of_its_experts():
    of = grouped_moe.REHEARSED
    x, router, gate, up, down = of.arguments()
    found = grouped_moe.layer(of.active, x, router, gate, up, down)
    scores = jnp.exp(x @ router)
    scores /= scores.sum(-1, keepdims=True)
    right = np.zeros(x.shape)
    for token in range(of.tokens):
        for expert in np.argsort(-scores[token])[: of.active]:
            hidden = x[token] @ gate[expert]
            hidden = hidden / (1 + jnp.exp(-hidden)) * (x[token] @ up[expert])
            right[token] += float(scores[token, expert]) * np.asarray(hidden @ down[expert])
    np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-5)
