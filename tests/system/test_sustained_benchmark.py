"""Schedules under sustained load beside bursts: rehearsed where kernels are interpreted, and what the figures say."""

import sys
from pathlib import Path

import pytest

from scheduler.core import hardware
from scheduler.store.store import Store
from search_spaces.matmul import MATMUL, MatmulProblem

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import sustained

pytestmark = pytest.mark.slow


def test_a_rehearsal_times_xla_and_one_schedule_of_each_kind_both_ways(monkeypatch):
    for name, value in {"SAMPLE_S": 0.01, "SETTLE_S": 0.0, "REST_S": 0.0, "BURSTS": 2}.items():
        monkeypatch.setattr(sustained, name, value)
    problem = MatmulProblem(32, 32, 32, dtype="float32")
    row = sustained.row(MATMUL, problem, hardware.detect(), Store(":memory:"), schedules=2, rounds=3)
    assert not row["failures"]
    assert {line["backend"] for line in row["schedules"]} == {"xla", "interpret"}
    tiles = [tuple(sorted(line["schedule"].items())) for line in row["schedules"] if line["backend"] != "xla"]
    assert len(set(tiles)) == len(tiles) <= 2
    for line in row["schedules"]:
        assert (len(line["burst_samples_us"]), len(line["sustained_samples_us"])) == (2, 3)
        assert min(line["burst_us"], line["sustained_us"]) > 0
    times = [line["sustained_us"] for line in row["schedules"]]
    assert times == sorted(times)


def line(burst_us, sustained_us, backend="mosaic_gpu", stored=False):
    return {"backend": backend, "burst_us": burst_us, "sustained_us": sustained_us, "stored": stored}


def test_the_summary_says_how_alike_the_orders_are_and_what_the_winner_of_bursts_loses():
    turned = {"schedules": [line(1.0, 3.0), line(2.0, 2.0, stored=True), line(0.1, 0.1, "xla")]}
    alike = {"schedules": [line(1.0, 2.0, stored=True), line(2.0, 4.0)]}
    figures = sustained.summary([turned, alike])
    assert figures["tau_mean"] == pytest.approx(0.0)
    assert figures["burst_winner_over_best_worst"] == pytest.approx(1.5)
    assert figures["stored_over_best_worst"] == pytest.approx(1.0)
    assert sustained.summary([])["tau_mean"] is None
