"""The account of a space: every schedule is dropped, tried or untried."""

import dataclasses

import pytest

from scheduler.core.hardware import CPU, find
from scheduler.core.records import Failure, Measurement, Trial
from scheduler.inspect.explain import Access, explain
from search_spaces.matmul import MATMUL, MatmulProblem
from search_spaces.rows.formulas import SOFTMAX, SoftmaxProblem

PROBLEM = MatmulProblem(64, 48, 100, "float32")
TODAY = MATMUL.kernel("interpret").version
TIME = Measurement(1e-3, (1e-3,), "wall", "warm")


def of_backend(backend, trials=(), problem=PROBLEM, hardware=CPU, **options):
    return next(a for a in explain(MATMUL, problem, hardware, trials, **options) if a.backend == backend)


def trial(number, schedule, outcome=TIME, version=TODAY):
    return Trial(number, "interpret", version, schedule, outcome, 1e-3)


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA H200", "NVIDIA A100-SXM4-80GB"])
@pytest.mark.parametrize("problem", [PROBLEM, MatmulProblem(1000, 1000, 1000), MatmulProblem(1, 1, 1)], ids=str)
def test_every_schedule_of_every_kernel_is_accounted_for(kind, problem):
    for account in explain(MATMUL, problem, find(kind), []):
        assert account.size == sum(account.dropped.values()) + len(account.tried) + account.untried
        assert bool(account.refused) == (account.size == 0)


def test_trials_move_schedules_from_untried_to_tried():
    before = of_backend("interpret")
    schedules = [ranked.schedule for ranked in before.first[:2]]
    failure = Failure("verify", "max error 1")
    after = of_backend("interpret", [trial(0, schedules[0]), trial(1, schedules[1], failure), trial(2, schedules[0])])
    assert (len(after.tried), after.untried) == (2, before.untried - 2)
    assert [t.number for t in after.tried if isinstance(t.outcome, Failure)] == [1]


def test_trials_of_another_version_or_of_no_legal_schedule_do_not_count():
    best = of_backend("interpret").first[0].schedule
    odd = dict(best) | {"tile_m": 7}
    assert of_backend("interpret", [trial(0, best, version=0), trial(1, odd)]).tried == ()


def test_the_models_first_come_best_first_with_what_their_time_is_made_of():
    first = of_backend("interpret", top=4).first
    assert len(first) == 4
    assert [ranked.predicted_s for ranked in first] == sorted(ranked.predicted_s for ranked in first)
    for ranked in first:
        assert ranked.onchip_bytes > 0
        assert any(seconds > 0 for seconds in ranked.terms.values())
        assert dataclasses.asdict(ranked)["terms"] == dict(ranked.terms)


def test_a_kernel_that_tells_how_it_reaches_memory_is_shown_with_it():
    h200, problem = find("NVIDIA H200"), SoftmaxProblem(4096, 4096)
    [first] = next(a for a in explain(SOFTMAX, problem, h200, [], top=1) if a.backend == "mosaic_gpu").first
    assert first.access == Access(transactions=2 * 4096 * 4096 * 2 / 512, coalescing=1.0, bytes=16.0)
    odd = next(a for a in explain(SOFTMAX, SoftmaxProblem(4096, 4095), h200, [], top=1)).first[0]
    assert odd.access.bytes == 2
    assert odd.access.transactions > 7 * first.access.transactions
    assert of_backend("interpret").first[0].access is None
    assert of_backend("xla").first[0].schedule == {}
