"""What was measured of similar problems answers for a new one, as far as it can run there."""

import collections
import dataclasses
import math

import pytest
from failures import failures
from invented import H200, NOW, Alone

import scheduler
from scheduler.core.hardware import find, identified
from scheduler.core.records import Entry, Key, Measurement, Record, key_of
from scheduler.dispatch import dispatch
from scheduler.model.constants import BETWEEN_CHIPS, calibrations
from scheduler.model.pruning import illegal
from scheduler.prediction.predict import choose, predict
from scheduler.prediction.transfer import WORTH_A_TRIAL, distance, nearest, recheck, telling_records
from scheduler.search.baseline import similar_records
from scheduler.search.tuner import tune
from scheduler.store.store import Store, shipped
from search_spaces import load
from search_spaces.matmul import MATMUL, MatmulProblem
from search_spaces.rows.formulas import SOFTMAX, SoftmaxProblem

PALLAS = frozenset({"mosaic_gpu"})
H100 = find("H100")
TODAY = MATMUL.kernel("mosaic_gpu").version
WIDE = MatmulProblem(128, 8192, 8192)
# Legal for 128 rows, and neither the top prediction there nor far behind it.
WON = {
    "tile_m": 64,
    "tile_n": 128,
    "tile_k": 128,
    "stages": 4,
    "consumers": "cooperative_n",
    "cluster": "m",
    "grid_minor_dim": "n",
}
WON |= {"grid_tile_width": 1, "epi_tile_n": 64}


def record(problem=WIDE, schedule=WON, ours_s=30e-6, library_s=40e-6, version=TODAY, operation=MATMUL):
    def timed(seconds):
        return Measurement(seconds, (seconds,), "cupti", "cold")

    entries = (Entry("mosaic_gpu", version, schedule, timed(ours_s), 1e-5), Entry("xla", 1, {}, timed(library_s), 1e-5))
    return Record(key_of(operation, problem, H200), entries, {"mosaic_gpu": version, "xla": 1}, NOW, 64, 64, 18000)


def test_problems_are_as_far_apart_as_their_sizes_are_doubled():
    assert distance(WIDE, WIDE) == 0
    assert distance(WIDE, MatmulProblem(64, 8192, 16384)) == 2
    assert distance(MatmulProblem(64, 8192, 16384), WIDE) == 2
    assert distance(WIDE, dataclasses.replace(WIDE, dtype="float16")) == math.inf
    assert distance(WIDE, dataclasses.replace(WIDE, transpose_b=True)) == math.inf


def test_the_nearest_come_first_and_a_problem_is_not_its_own_neighbour():
    far, near = record(MatmulProblem(1024, 8192, 8192)), record(MatmulProblem(96, 8192, 8192))
    beyond = record(MatmulProblem(8192, 8192, 8192))
    foreign = dataclasses.replace(near, key=Key("matmul", H200.id, '{"q":3}'))
    found = nearest(MATMUL, WIDE, H200, [far, record(WIDE), beyond, foreign, near], within=3)
    assert [n.record for n in found] == [near, far]
    assert nearest(MATMUL, WIDE, H200, [far, near], within=1) == found[:1]
    assert found[0].weight == pytest.approx(0.75)
    assert found[1].weight == 1 / 8


def test_a_schedule_that_won_next_door_and_was_not_checked_for_rows_like_these_is_no_answer(monkeypatch):
    monkeypatch.setattr(
        type(SOFTMAX.kernel("mosaic_gpu")),
        "verified",
        lambda kernel, problem, schedules, target: (schedules.residency == "registers") | (problem.columns % 256 == 0),
    )
    whole, ragged = SoftmaxProblem(4096, 8192), SoftmaxProblem(4096, 8193)
    won = {"residency": "smem", "warps": 4, "vector": 8, "accesses": 4, "register_chunks": 1}
    rows = SOFTMAX.kernel("mosaic_gpu")
    assert [illegal(rows, problem, H200, won) for problem in (whole, ragged)] == [None, None]
    told = record(whole, won, ours_s=30e-6, library_s=60e-6, version=rows.version, operation=SOFTMAX)
    assert predict(SOFTMAX, SoftmaxProblem(4096, 8448), H200, records=[told]).schedule == won
    assert predict(SOFTMAX, ragged, H200, records=[told]).schedule != won


def test_a_changed_size_is_answered_with_the_schedule_that_won_next_to_it():
    problem = MatmulProblem(128, 8192, 7168)
    alone = predict(MATMUL, problem, H200, backends=PALLAS)
    assert dict(alone.schedule) != WON
    assert alone.neighbour == ""
    told = predict(MATMUL, problem, H200, backends=PALLAS, records=[record()])
    assert dict(told.schedule) == WON
    assert told.neighbour == str(WIDE)
    assert f"measured at {WIDE}, 0.2 doublings away" in told.reason
    assert told.predicted_s < alone.predicted_s


def test_a_schedule_that_cannot_run_here_corrects_only_the_times():
    problem = MatmulProblem(128, 8192, 256)  # too few steps for so many stages to fill
    alone = predict(MATMUL, problem, H200, backends=PALLAS)
    near = record(MatmulProblem(128, 8192, 512), ours_s=20e-6)
    told = predict(MATMUL, problem, H200, backends=PALLAS, records=[near])
    assert told.schedule == alone.schedule
    assert told.predicted_s != alone.predicted_s
    assert "corrected by the times" in told.reason


def test_a_record_of_another_version_or_of_another_dtype_tells_nothing():
    alone = predict(MATMUL, MatmulProblem(112, 8192, 8192), H200, backends=PALLAS)
    others = [record(version=77), record(dataclasses.replace(WIDE, dtype="float16"))]
    told = predict(MATMUL, MatmulProblem(112, 8192, 8192), H200, backends=PALLAS, records=others)
    assert (told.schedule, told.predicted_s) == (alone.schedule, alone.predicted_s)


def test_a_small_gain_counts_where_a_neighbour_vouches_for_both():
    problem = MatmulProblem(112, 8192, 8192)
    assert predict(MATMUL, problem, H200, records=[record(ours_s=37e-6)]).backend == "mosaic_gpu"
    assert predict(MATMUL, problem, H200, records=[record(ours_s=42e-6)]).backend == "xla"


def test_a_problem_near_a_tuned_one_uses_its_winner_if_that_is_legal_and_the_model_expects_no_loss():
    def told(m, ours_s):
        problem = dataclasses.replace(WIDE, m=m)
        return predict(MATMUL, problem, H200, records=[record(ours_s=ours_s, library_s=40e-6)])

    assert (dict(told(112, 38e-6).schedule), told(112, 38e-6).faster) == (WON, None)
    assert told(124, 38e-6).backend == "xla"  # predicted to be slower than the library
    assert dict(told(129, 30e-6).schedule) != WON  # not legal with a third row of tiles
    assert told(64, 38e-6).faster is not None  # a doubling away, the chance of a gain decides


def test_a_problem_near_one_where_the_library_won_uses_the_library():
    lost = dataclasses.replace(record(), entries=record(ours_s=42e-6).entries[::-1])
    told = predict(MATMUL, MatmulProblem(112, 8192, 8192), H200, records=[lost])
    assert (told.backend, told.neighbour) == ("xla", str(WIDE))
    assert predict(MATMUL, MatmulProblem(112, 8192, 8192), H200, backends=PALLAS, records=[lost]).schedule == WON


def test_a_call_that_nothing_is_stored_for_is_answered_by_the_shipped_records_next_to_it():
    problem = MatmulProblem(112, 8192, 8192)
    asked = dispatch.decide(MATMUL, problem, "cuda", dispatch.options(MATMUL, target=H200.kind))
    assert asked.kernel.backend == "mosaic_gpu"
    assert str(WIDE) in asked.reason
    assert scheduler.predict(MATMUL, problem, hardware=H200.kind).neighbour == str(WIDE)


@pytest.mark.slow
def test_a_prediction_says_what_the_problem_s_own_record_says():
    records = collections.defaultdict(list)
    for each in shipped().records():
        records[each.key.operation, each.key.hardware].append(each)

    def check(one):
        operation = load(one.key.operation)
        problem = operation.problem.from_canonical(one.key.problem)
        chip = identified(one.key.hardware)
        told = predict(operation, problem, chip, records=records[operation.name, chip.id])
        if isinstance(held := recheck(operation, problem, chip, one), str):  # neither is it what a call gets
            assert "measured on" not in told.reason
            return
        assert (told.backend, dict(told.schedule)) == (held.backend, dict(held.schedule))
        assert told.predicted_s == held.measurement.median_s
        if (library := one.best(frozenset({"xla"}))) is not None:
            assert told.library_s == library.measurement.median_s
        assert ("not measured, on" if one.estimated else "measured on") in told.reason

    assert failures(check, [one for of_one in records.values() for one in of_one], lambda one: one.key) == []


def test_what_no_longer_holds_is_no_prediction_but_the_neighbours_are():
    old = record(version=TODAY - 1)
    told = predict(MATMUL, WIDE, H200, backends=PALLAS, records=[old, record(MatmulProblem(128, 8192, 7168))])
    assert "measured on" not in told.reason
    assert told.neighbour


@pytest.mark.slow
def test_every_shipped_record_helps_its_neighbours_as_far_as_it_can_run_there():
    records = list(shipped().records(operation="matmul", hardware=H200.id))
    for one in records:
        problem = MatmulProblem.from_canonical(one.key.problem)
        grown = dataclasses.replace(problem, m=2 * problem.m)
        told = predict(MATMUL, grown, H200, records=[r for r in records if r.key != key_of(MATMUL, grown, H200)])
        assert told.neighbour
        assert told.predicted_s > 0


def test_a_search_begins_with_the_winners_next_to_it():
    class Told(Alone):
        asked = ()

        def measure(self, task, *, again=False):
            self.asked += (dict(task.schedule),)
            seconds = 100e-6 + 1e-9 * len(self.asked)
            return Measurement(seconds, (seconds,), "cupti", "cold")

    store, runner = Store(":memory:"), Told()
    store.put(record())
    problem = MatmulProblem(112, 8192, 8192)
    made = tune(MATMUL, problem, budget=4, store=store, runner=runner)
    assert runner.asked[:2] == ({}, WON)
    assert made.stopped == "the budget of 4 trials is spent"


def test_a_chip_without_records_uses_the_schedule_and_the_scaled_time_of_a_sibling():
    alone = predict(MATMUL, WIDE, H100, backends=PALLAS)
    told = predict(MATMUL, WIDE, H100, backends=PALLAS, records=[record()])
    assert dict(alone.schedule) != dict(told.schedule) == WON
    assert told.source == "model"
    assert "from NVIDIA H200, scaled" in told.reason
    assert alone.neighbour == ""
    # The problem is limited by memory, so the time grows as the bandwidth shrinks.
    slower = told.predicted_s / 30e-6
    assert 1.2 < slower < 1.02 * H200.hbm_bytes_per_s / H100.hbm_bytes_per_s


def test_a_search_on_a_chip_without_records_starts_from_the_shipped_winners_of_a_sibling():
    measured = next(r for r in shipped().records() if r.key.operation == "matmul" and r.key.hardware == H200.id)
    problem = MatmulProblem.from_canonical(measured.key.problem)
    found = similar_records(MATMUL, problem, H100, Store(":memory:"))
    assert found[0] == measured
    assert {r.key.hardware for r in found} == {H200.id}
    first = nearest(MATMUL, problem, H100, found, within=WORTH_A_TRIAL)[0]
    assert (first.problem, first.hardware) == (problem, H200)
    assert similar_records(MATMUL, problem, H200, Store(":memory:")) == []


def test_a_schedule_of_a_sibling_that_does_not_fit_this_chip_is_not_used():
    small = dataclasses.replace(H100, kind="a small H100", onchip_bytes=100 * 1024)
    told = predict(MATMUL, WIDE, small, backends=PALLAS, records=[record()])
    assert dict(told.schedule) != WON
    assert "corrected by the times" in told.reason


def test_a_record_of_this_chip_is_asked_before_those_of_its_siblings():
    problem, mine = MatmulProblem(120, 8192, 8192), dataclasses.replace(record(), key=key_of(MATMUL, WIDE, H100))
    store = Store(":memory:")
    store.put(record())
    assert [one.key.hardware for one in telling_records(store, MATMUL, problem, H100)] == [H200.id]
    assert [one.key.hardware for one in telling_records(store, MATMUL, WIDE, H100)] == [H200.id]
    store.put(mine)
    assert [one.key.hardware for one in telling_records(store, MATMUL, problem, H100)] == [H100.id]


def test_a_chip_without_measurements_is_predicted_with_the_constants_of_its_nearest_sibling():
    borrowed, own = (calibrations("matmul", chip, shared_only=True) for chip in (H100, H200))
    assert borrowed == own
    fitted_here = {backend: dataclasses.replace(one, hardware=H100.id) for backend, one in own.items()}
    measured, scaled = (choose(MATMUL, MATMUL.library, WIDE, H100, fitted, ()) for fitted in (fitted_here, borrowed))
    assert scaled.predicted_s == measured.predicted_s
    assert scaled.deviation == pytest.approx(math.hypot(measured.deviation, BETWEEN_CHIPS))
    assert "from NVIDIA H200, scaled" in scaled.words
    assert "scaled" not in measured.words
