"""The benchmark of attention: its points, and the figures it boils them down to."""

import json
import sys
from pathlib import Path

import pytest

from scheduler.core import hardware
from scheduler.search import jobs

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import attention as benchmark
import tokamax_attention
from attention_points import points
from attention_rivals import BACKWARD_RIVALS, FORWARD_RIVALS
from jax_attention import JAX_ATTENTION
from tokamax_attention import TOKAMAX_ATTENTION, fields

from search_spaces.flash_attention import FlashAttentionProblem

pytestmark = pytest.mark.slow

H200 = hardware.find("NVIDIA H200")


def test_points_are_apart_and_cudnn_is_asked_for_all_of_them():
    suite = points()
    assert len({(point.backward, point.problem) for point in suite}) == len(suite) == 73
    assert {point.kind for point in suite} == {"square", "grouped", "ragged", "window", "decode", "float16"}
    for point in suite:
        assert benchmark.timed_by(point).kernel("cudnn").supports(point.problem, H200.target) is None
    squares = [point.problem for point in suite if point.kind == "square"]
    assert {p.batch * p.q_len for p in squares} == {16384}
    assert {p.heads * p.head_dim for p in squares} == {2048}
    assert {1, 64} <= {point.problem.batch for point in suite if point.kind == "decode"}


def test_points_of_every_sort_come_first_and_to_each_of_two_gpus():
    suite = points()
    kinds = {(point.backward, point.kind) for point in suite}
    assert {(point.backward, point.kind) for point in suite[:20]} == kinds
    for part in ("1/2", "2/2"):
        mine = jobs.part(suite, part)
        assert {point.kind for point in mine} == {kind for _, kind in kinds}
        assert {(p.problem.head_dim, p.backward) for p in mine} == {(d, b) for d in (64, 128, 256) for b in (0, 1)}


def test_the_rival_of_jax_takes_float16():
    narrow = [point.problem for point in points() if point.kind == "float16"]
    for problem in narrow:
        assert JAX_ATTENTION.supports(problem, H200.target) is None
        assert len(JAX_ATTENTION.space(problem, H200.target).legal()[0]) >= 1
    assert all(
        JAX_ATTENTION.supports(p.problem, H200.target) for p in points() if p.kind == "square" and not p.backward
    )


def test_tokamax_is_refused_in_words_where_it_cannot_be_imported(monkeypatch):
    for name in ("tokamax", tokamax_attention.MODULE):
        monkeypatch.setitem(sys.modules, name, None)
    for point in points():
        rival = rivals_of(point)["tokamax"]
        assert "pip install tokamax" in rival.supports(point.problem, H200.target)


def test_tokamax_takes_each_point_by_a_handful_of_configs_that_fit(monkeypatch):
    monkeypatch.setattr(tokamax_attention, "_missing", lambda: None)
    for point in points():
        rival = rivals_of(point)["tokamax"]
        assert rival.supports(point.problem, H200.target) is None
        default, *others = (fields(one.config) for one in schedules_of(rival, point.problem))
        assert default is None
        assert 1 <= len(others) <= 5
        # No config of twice the queries and none of 3 stages leaves room for heads of 256 columns.
        assert point.problem.head_dim < 256 or others == [fields(widest(point))]


def widest(point):
    return (
        "block_q_dkv=64 block_kv_dkv=64 block_q_dq=64 block_kv_dq=64 num_stages=2 compute_wgs=1"
        if point.backward
        else "block_q=64 block_kv=64 num_stages=2"
    )


def test_tokamax_divides_keys_among_blocks_only_where_all_are_seen():
    def splits(**others):
        problem = FlashAttentionProblem(64, 1, 16384, 32, 4, 128, **others)
        configs = [fields(one.config) for one in schedules_of(TOKAMAX_ATTENTION, problem)]
        return [config["split_k"] for config in configs if config]

    assert splits() == [1, 2, 8, 32]
    assert splits(kv_lengths=True) == [1]


def test_tokamax_is_not_timed_with_statistics_or_float32():
    shape = (1, 64, 64, 2, 2, 64)
    assert "log-sum-exp" in TOKAMAX_ATTENTION.supports(FlashAttentionProblem(*shape, return_lse=True), H200.target)
    assert "16-bit" in TOKAMAX_ATTENTION.supports(FlashAttentionProblem(*shape, dtype="float32"), H200.target)


def rivals_of(point):
    return BACKWARD_RIVALS if point.backward else FORWARD_RIVALS


def schedules_of(rival, problem):
    space = rival.space(problem, H200.target)
    return list(space.schedules(space.legal()[0]))


def row(*, backward=False, kind="square", causal=False, vs_cudnn=1.1, final=1.1, model=0.95, cudnn_us=10.0):
    return {
        "backward": backward,
        "kind": kind,
        "causal": causal,
        "cudnn_us": cudnn_us,
        "pallas_us": vs_cudnn and 10.0,
        "pallas_vs_cudnn": vs_cudnn,
        "final_vs_cudnn": final,
        "final_vs_xla": 2.0,
        "pallas_vs_jax": None,
        "pallas_vs_tokamax": vs_cudnn and 2 * vs_cudnn,
        "model_vs_pallas": model,
    }


def test_the_summary_takes_the_points_that_each_figure_is_about():
    figures = benchmark.summary(
        [
            row(vs_cudnn=1.21),
            row(causal=True, vs_cudnn=1.0),
            row(backward=True, vs_cudnn=0.9),
            row(backward=True, causal=True, vs_cudnn=None, final=1.0, model=None),
            row(kind="decode", vs_cudnn=0.8, final=0.99, model=0.7),
            row(cudnn_us=None, vs_cudnn=0.1, final=None),
        ]
    )
    assert figures["points"] == 6
    assert figures["points_without_pallas"] == 1
    assert figures["pallas_vs_cudnn_geomean"] == pytest.approx(1.1)
    assert figures["pallas_vs_cudnn_worst"] == 1.0
    assert figures["causal_vs_cudnn_geomean"] == pytest.approx(1.0)
    assert figures["backward_vs_cudnn_geomean"] == pytest.approx(0.9)
    assert figures["backward_vs_cudnn_worst"] == pytest.approx(0.9)
    assert figures["decode_vs_cudnn_worst"] == 0.8
    assert figures["final_vs_cudnn_worst"] == 0.99
    assert figures["model_first_choice_worst"] == 0.7
    assert figures["pallas_vs_jax_geomean"] is None
    assert figures["pallas_vs_tokamax_geomean"] == pytest.approx(2.2)
    assert figures["pallas_vs_tokamax_worst"] == pytest.approx(2.0)
    assert figures["backward_vs_tokamax_worst"] == pytest.approx(1.8)
    assert figures["decode_vs_tokamax_worst"] == pytest.approx(1.6)


def test_a_rehearsal_searches_times_compares_and_writes_every_figure(tmp_path, capfd):
    where = ["--work", str(tmp_path / "work"), "--results", str(tmp_path), "--cache", str(tmp_path / "cache.db")]
    options = ["--budget", "3", "--rounds", "1", *where]
    benchmark.main(["--part", "1/2", *options])  # searches, and times what it has found
    assert not list(tmp_path.glob("attention-cpu*.json"))
    benchmark.main(["--seconds", "0", *options])  # writes what there is
    (file,) = tmp_path.glob("attention-cpu*.json")
    early = json.loads(file.read_text())
    left = [str(point) for point in jobs.part(benchmark.REHEARSED, "2/2")]
    assert len(early["rows"]) + len(left) == 3
    assert early["environment"]["missing"] == left
    benchmark.main(["--search", *options])
    benchmark.main(["--errors", *options])
    benchmark.main(options)
    written = json.loads(file.read_text())
    assert "missing" not in written["environment"]
    assert written["summary"].keys() == benchmark.summary([]).keys()
    assert written["summary"]["points"] == len(written["rows"]) == 3
    assert written["summary"]["final_vs_xla_worst"] > 0
    assert written["summary"]["pallas_vs_cudnn_worst"] is None
    for one in written["rows"]:
        assert one["pallas_us"]
        assert all(result["largest_absolute"] < 1e-3 for result in one["errors"]["pallas"])
