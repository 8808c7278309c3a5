"""The whole search on a CPU: what it tries, whom it lets win, what it stores, and what it says when nothing runs."""

import dataclasses
import re

import pytest
from operations import Double, DoubleLibrary, DoubleProblem

from scheduler.core.errors import NoCandidate, StoreError
from scheduler.core.hardware import CPU, find
from scheduler.core.records import Entry, Failure, Measurement, key_of
from scheduler.measure.runner import InProcess
from scheduler.model.pruning import illegal
from scheduler.prediction.predict import explain, predict
from scheduler.prediction.transfer import recheck
from scheduler.search.runoff import FEWEST_ROUNDS
from scheduler.search.tuner import tune
from scheduler.store.store import Store
from search_spaces import Operation, Space
from search_spaces.matmul import MATMUL, MatmulProblem

PROBLEM = DoubleProblem(n=8)
SAFE = ("ok", "slow", "wrong", "unbuilt")


class SafeDouble(Double):
    """Without the schedule that ends the process: this file searches in its own."""

    def space(self, problem, target):
        return dataclasses.replace(super().space(problem, target), choices={"tile": (1, 2, 4, 8), "behave": SAFE})


SAFE_DOUBLE = Operation("double", DoubleProblem, (SafeDouble(), DoubleLibrary()))


@pytest.fixture(scope="module")
def searched():
    store, seen = Store(":memory:"), []
    record = tune(SAFE_DOUBLE, PROBLEM, budget=64, store=store, progress=seen.append)
    return record, store, seen


def test_a_search_tries_the_library_and_every_schedule_once_where_the_budget_allows(searched):
    record, store, _ = searched
    trials = store.trials(record.key)
    assert record.tried == len(trials) == 17
    assert record.space == 17
    assert len({(trial.backend, tuple(sorted(trial.schedule.items()))) for trial in trials}) == 17
    assert trials[0].backend == "xla"


def test_every_trial_ends_measured_or_with_its_reason(searched):
    record, store, _ = searched
    outcomes = {
        behave: [t.outcome for t in store.trials(record.key) if t.schedule.get("behave") == behave] for behave in SAFE
    }
    assert all(isinstance(outcome, Measurement) for outcome in outcomes["ok"] + outcomes["slow"])
    assert all(isinstance(outcome, Failure) and outcome.stage == "verify" for outcome in outcomes["wrong"])
    assert all(isinstance(outcome, Failure) and outcome.stage == "lower" for outcome in outcomes["unbuilt"])


def test_the_record_holds_the_winner_the_library_and_the_best_of_the_kernel(searched):
    record, store, _ = searched
    assert store.get(record.key) == record
    assert record.best(frozenset({"xla"})) is not None
    assert record.best(frozenset({"scripted"})).schedule["behave"] == "ok"
    assert record.winner.schedule.get("behave", "library") in ("ok", "library")
    assert record.confidence.rounds == FEWEST_ROUNDS
    assert record.versions == {"xla": 1, "scripted": 1}


def test_progress_counts_every_trial_and_keeps_the_best_so_far(searched):
    _, _, seen = searched
    assert [p.done for p in seen] == list(range(18))
    assert (seen[0].last, seen[0].best) == (None, None)
    best = [p.best.outcome.median_s for p in seen if p.best]
    assert best == sorted(best, reverse=True)
    assert seen[-1].eta_s == 0


def test_a_budget_bounds_the_trials_and_none_is_refused():
    assert tune(SAFE_DOUBLE, PROBLEM, budget=5).tried == 5
    with pytest.raises(ValueError, match="budget=0 is out of range; give an integer from 1"):
        tune(SAFE_DOUBLE, PROBLEM, budget=0)


@pytest.mark.parametrize(
    ("refused", "lost"),
    [
        (["save_trials"], ["search continues", "double n=8.*: 3 of 3 trials"]),
        (["put"], ["double n=8.*: the record"]),
        (["save_trials", "put"], ["search continues", "double n=8.*: 3 of 3 trials, the record"]),
    ],
)
def test_a_store_that_refuses_to_the_end_is_told_with_what_is_not_stored(refused, lost, monkeypatch):
    def refuse(*_):
        raise StoreError("the disk is full")

    store = Store(":memory:")
    for write in refused:
        monkeypatch.setattr(store, write, refuse)
    monkeypatch.setattr("scheduler.search.trials.PAUSES_S", (0.0, 0.0))
    with pytest.warns(RuntimeWarning, match="the disk is full") as warned:
        record = tune(SAFE_DOUBLE, PROBLEM, budget=3, store=store)
    assert record.tried == 3
    messages = [str(one.message) for one in warned if one.category is RuntimeWarning]
    for message, text in zip(messages, lost, strict=True):
        assert re.search(text, message), message
    assert (store.get(record.key) is None) == ("put" in refused)
    assert bool(store.trials(record.key)) == ("save_trials" not in refused)


def test_seconds_bound_the_trials_too():
    assert tune(SAFE_DOUBLE, PROBLEM, budget=64, seconds=1e-9).tried == 1


def test_nothing_that_ran_is_an_error_that_counts_the_reasons():
    class Never(SafeDouble):
        def space(self, problem, target):
            space = super().space(problem, target)
            return dataclasses.replace(space, choices={"tile": (1, 3), "behave": ("wrong",)})

    class NeverLibrary(DoubleLibrary):
        def run(self, problem, schedule, target, /, *args, **params):
            raise ValueError("no library today")

    broken = Operation("double", DoubleProblem, (Never(), NeverLibrary()))
    with pytest.raises(
        NoCandidate,
        match=r"tile divides n: 1.*lower: ValueError: no library today .*test_tuner.py:\d+\): 1.*verify: 8 of 8",
    ):
        tune(broken, PROBLEM, budget=8)


def test_without_measuring_the_library_answers_unless_it_is_left_out():
    problem = MatmulProblem(256, 256, 256, dtype="float32")
    free = predict(MATMUL, problem, CPU)
    assert free.backend == "xla"
    kept = predict(MATMUL, problem, CPU, backends=frozenset({"interpret"}))
    assert kept.backend == "interpret"
    assert illegal(MATMUL.kernel("interpret"), problem, CPU, kept.schedule) is None


def test_an_operation_whose_kernels_cannot_do_a_problem_says_why():
    with pytest.raises(NoCandidate, match="interpret: runs in Pallas's interpreter"):
        predict(MATMUL, MatmulProblem(64, 64, 64), find("NVIDIA A100-SXM4-80GB"), backends=frozenset({"interpret"}))


def test_an_explanation_accounts_for_every_schedule():
    for _, told in explain(MATMUL, MatmulProblem(100, 300, 64), CPU):
        if not isinstance(told, str):
            assert told.size == sum(told.dropped.values()) + len(told.points)


def test_a_record_is_served_until_a_kernel_or_the_space_changes(searched):
    record, _, _ = searched
    assert recheck(SAFE_DOUBLE, PROBLEM, CPU, record) == record.winner
    assert recheck(SAFE_DOUBLE, PROBLEM, CPU, record, backends=frozenset({"scripted"})).backend == "scripted"

    class Newer(SafeDouble):
        version = 2

    newer = Operation("double", DoubleProblem, (Newer(), DoubleLibrary()))
    assert recheck(newer, PROBLEM, CPU, record) == "the scripted kernel is now version 2, and version 1 was measured"

    class Narrower(SafeDouble):
        def space(self, problem, target):
            return Space(super().space(problem, target).schedule, {"tile": (16,), "behave": ("ok",)})

    narrower = Operation("double", DoubleProblem, (Narrower(), DoubleLibrary()))
    said = recheck(narrower, PROBLEM, CPU, record, backends=frozenset({"scripted"}))
    assert "is not among 16" in said


def test_a_record_from_before_a_kernel_existed_reopens_the_race(searched):
    record, _, _ = searched
    only_library = dataclasses.replace(record, versions={"xla": 1}, entries=(record.best(frozenset({"xla"})),))
    assert recheck(SAFE_DOUBLE, PROBLEM, CPU, only_library) == "it was measured before the scripted kernel existed"
    assert isinstance(recheck(SAFE_DOUBLE, PROBLEM, CPU, only_library, backends=frozenset({"xla"})), Entry)


def test_a_schedule_that_does_not_fit_on_chip_is_illegal_with_the_bytes():
    tiny = dataclasses.replace(CPU, onchip_bytes=1000)
    said = illegal(
        MATMUL.kernel("interpret"),
        MatmulProblem(64, 64, 64),
        tiny,
        {"tile_m": 64, "tile_n": 64, "tile_k": 64, "minor": "m"},
    )
    assert said == "it needs 40960 bytes of on-chip memory and a block of cpu has 1000"


def test_a_key_names_operation_chip_and_canonical_problem():
    key = key_of(MATMUL, MatmulProblem(4, 5, 6), CPU)
    assert (key.operation, key.problem) == ("matmul", '{"k":6,"m":4,"n":5}')
    assert InProcess().hardware.id == key.hardware
