"""Searching a list: no candidate twice, no failure again, and the best found in few trials."""

import dataclasses
import functools
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import hopper_sweep
import numpy as np
import optuna
import pytest
from counting import bytecodes
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.core.hardware import find
from scheduler.model.calibration import observed
from scheduler.model.cost import CostModel
from scheduler.search import samplers, sweep
from scheduler.search.samplers import expected_improvement, predict
from scheduler.search.search import Search
from search_spaces import Space
from search_spaces.matmul import MATMUL

H200 = find("NVIDIA H200")
SWEEPS = Path(__file__).parents[2] / "sweeps" / "nvidia-h200"


@dataclasses.dataclass(frozen=True)
class Candidate:
    backend: str
    schedule: Mapping[str, int | bool | str]
    predicted_s: float
    floor_s: float = 0.0


def grid(count, seed=0):
    """Candidates with fields of every type, whose prediction tells little, and their true times."""
    draw = np.random.default_rng(seed)
    candidates, seconds = [], []
    for index in range(count):
        tile, stages, order, flag = 16 << (index % 6), 1 + index // 6 % 7, "mnk"[index // 42 % 3], index // 126 % 2 == 1
        time_s = 1e-4 * (1 + (np.log2(tile) - 7) ** 2 / 4 + (stages - 4) ** 2 / 9 + 0.4 * (order != "n") + 0.2 * flag)
        schedule = {"tile": tile, "stages": stages, "order": order, "flag": flag, "unroll": 1 + index // 252}
        candidates.append(Candidate("pallas", schedule, time_s * np.exp(draw.normal(0, 0.5))))
        seconds.append(float(time_s * (1 + 0.01 * (index // 252))))
    return candidates, seconds


def spend(search, seconds, in_flight=1, seed=0):
    """Ask and tell until the search stops; the indices in the order asked."""
    order, running, draw = [], [], random.Random(seed)
    while True:
        while len(running) < in_flight and (index := search.ask()) is not None:
            order.append(index)
            running.append(index)
        if not running:
            return order
        index = running.pop(draw.randrange(len(running)))
        search.tell(index, seconds[index])


def test_a_budget_of_64_measures_64_candidates_once_each():
    candidates, seconds = grid(1000)
    search = Search(candidates, budget=64)
    order = spend(search, seconds)
    assert len(order) == len(set(order)) == search.asked == 64
    assert search.best == min((seconds[index], index) for index in order)[::-1]
    assert search.reason == "the budget of 64 trials is spent"


@pytest.mark.parametrize("budget", [40, 41, 1000])
def test_a_list_within_the_budget_is_enumerated(budget):
    candidates, seconds = grid(40)
    orders = [spend(Search(candidates, budget=budget, seed=seed, first=[7, 3]), seconds) for seed in (0, 1)]
    assert all(sorted(order) == list(range(40)) for order in orders)
    assert all(order[:2] == [7, 3] for order in orders)


def test_fifteen_in_flight_are_fifteen_different_ones():
    candidates, seconds = grid(500)
    search = Search(candidates, budget=60)
    assert len({search.ask() for _ in range(15)}) == 15
    assert len(set(spend(Search(candidates, budget=60), seconds, in_flight=15))) == 60


def test_everything_may_be_asked_for_before_anything_is_told():
    candidates, _ = grid(100)
    search = Search(candidates, budget=30)
    asked = [search.ask() for _ in range(31)]
    assert asked[30] is None
    assert len(set(asked[:30])) == 30


@pytest.mark.parametrize("in_flight", [1, 8])
def test_the_same_seed_asks_in_the_same_order(in_flight):
    candidates, seconds = grid(500)
    one, same, other = (spend(Search(candidates, budget=30, seed=s), seconds, in_flight) for s in (5, 5, 6))
    assert one == same != other


def test_incumbents_come_first_and_the_models_favourite_next():
    candidates, seconds = grid(500)
    order = spend(Search(candidates, budget=20, first=[333, 12, 333]), seconds)
    assert order[:2] == [333, 12]
    assert order[2] == min(range(500), key=lambda index: candidates[index].predicted_s)


def knowing(candidates, seconds):
    """The same candidates, of a model that is right about them."""
    return [dataclasses.replace(c, predicted_s=s) for c, s in zip(candidates, seconds, strict=True)]


def test_a_model_that_is_right_is_followed_but_for_a_probe_in_each_fifth_place():
    candidates, seconds = grid(500)
    order = spend(Search(knowing(candidates, seconds), budget=40), seconds)
    ranked = sorted(range(500), key=lambda index: seconds[index])
    followed = [index for place, index in enumerate(order) if place % 5 != 4]
    assert [seconds[index] for index in followed] == [seconds[index] for index in ranked[: len(followed)]]
    probes = [seconds[index] for place, index in enumerate(order) if place % 5 == 4]
    assert np.median(probes) > seconds[ranked[100]]


def test_a_model_that_is_wrong_by_one_factor_throughout_is_followed():
    candidates, seconds = grid(500)
    slow = [dataclasses.replace(c, predicted_s=3 * s) for c, s in zip(candidates, seconds, strict=True)]
    assert spend(Search(slow, budget=40), seconds) == spend(Search(knowing(candidates, seconds), budget=40), seconds)


def test_what_cannot_beat_the_fastest_is_left_out_and_counted():
    candidates, seconds = grid(300)
    fastest = min(seconds)
    bounded = [dataclasses.replace(c, floor_s=0.9 * s) for c, s in zip(candidates, seconds, strict=True)]
    search = Search(bounded, budget=300, first=[seconds.index(fastest)])
    order = spend(search, seconds)
    left_out = set(range(300)) - set(order)
    assert search.reason == "nothing untried can beat the fastest, by its lower bound"
    assert search.excluded == len(left_out) > 200
    assert all(0.9 * seconds[index] > fastest for index in left_out)
    assert search.best == (seconds.index(fastest), fastest)


def test_a_failure_or_a_search_without_bounds_leaves_nothing_out():
    candidates, seconds = grid(60)
    search = Search(candidates, budget=100)
    assert len(spend(search, [None, *seconds[1:]])) == 60
    assert search.excluded == 0


def test_a_search_that_has_found_what_there_is_gives_up_and_says_so():
    candidates, seconds = grid(1000)
    right = knowing(candidates, seconds)
    patient = Search(right, budget=300, patience=20)
    order = spend(patient, seconds)
    assert 20 < len(order) < 150
    assert patient.reason == "the last 20 trials brought nothing, and less than 0.1% is expected"
    assert patient.best[1] == min(seconds)
    assert len(spend(Search(right, budget=100, seed=1), seconds)) == 100


def test_no_failure_is_proposed_again_and_its_neighbourhood_is_left():
    candidates, seconds = grid(500)
    fails = {index for index in range(500) if candidates[index].schedule["tile"] == 128}  # the best tile
    outcomes = [None if index in fails else seconds[index] for index in range(500)]
    search = Search(candidates, budget=60)
    order = spend(search, outcomes)
    assert len(set(order)) == 60
    assert len(fails.intersection(order[30:])) < 10, "a sixth of all candidates would be 5 of 30, the best ones more"
    assert search.best[0] not in fails


def test_a_search_in_which_everything_fails_ends():
    candidates, _ = grid(300)
    search = Search(candidates, budget=25)
    assert len(set(spend(search, [None] * 300))) == 25
    assert search.best is None


@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(0, 60),
    budget=st.integers(0, 30),
    seed=st.integers(0, 3),
    moves=st.lists(st.integers(-20, 20), max_size=80),
    failing=st.sets(st.integers(0, 59)),
)
def test_every_candidate_is_asked_for_at_most_once_whatever_is_told_when(count, budget, seed, moves, failing):
    candidates, seconds = grid(count)
    first = [index for index in (3, 1) if index < count]
    search = Search(candidates, budget=budget, seed=seed, first=first)
    asked, running = [], []
    for move in [*moves, *[0] * (budget + 1)]:  # a negative move tells one of those running, any other asks
        if move < 0 and running:
            index = running.pop(move % len(running))
            search.tell(index, None if index in failing else seconds[index])
        elif (index := search.ask()) is not None:
            asked.append(index)
            running.append(index)
        else:
            assert len(asked) == min(budget, count)
            assert search.reason
    assert len(asked) == len(set(asked)) == search.asked == min(budget, count)
    told = [index for index in asked if index not in running and index not in failing]
    assert (search.best is None) == (not told)


def test_a_list_of_several_backends_with_different_fields_is_searched():
    one, seconds = grid(200)
    other = [Candidate("triton", {"warps": 1 << (i % 5), "tile": 16 << (i % 4)}, 2e-4) for i in range(20)]
    candidates = [*one, *other, Candidate("xla", {}, 1.2e-4)]
    seconds = [*seconds, *[3e-4] * 20, 0.9e-4]
    search = Search(candidates, budget=50, first=[220])
    order = spend(search, seconds)
    assert len(set(order)) == 50
    assert order[0] == 220
    assert search.best == (220, 0.9e-4)


def test_candidates_that_are_all_alike_to_the_model_are_searched():
    candidates = [Candidate("pallas", {"tile": 64}, 1e-3) for _ in range(30)]
    assert len(set(spend(Search(candidates, budget=20), [1e-3] * 30))) == 20


def test_what_was_not_asked_for_cannot_be_told():
    candidates, seconds = grid(100)
    search = Search(candidates, budget=10)
    with pytest.raises(ValueError, match="not being measured"):
        search.tell(3, 1e-3)
    index = search.ask()
    for no_time in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="a failure is None"):
            search.tell(index, no_time)
    search.tell(index, seconds[index])
    with pytest.raises(ValueError, match="tell it once"):
        search.tell(index, seconds[index])


def test_an_index_beyond_the_list_cannot_come_first():
    with pytest.raises(ValueError, match=r"indices of 100 candidates, found \[100\]"):
        Search(grid(100)[0], budget=10, first=[1, 100])


def test_optuna_stays_quiet_and_keeps_its_users_verbosity(capfd):
    optuna.logging.set_verbosity(optuna.logging.INFO)
    candidates, seconds = grid(100)
    spend(Search(candidates, budget=15), [None, *seconds[1:]])
    assert optuna.logging.get_verbosity() == optuna.logging.INFO
    assert capfd.readouterr() == ("", "")


# --- how soon the best is found ---


def hopper(problem, seed):
    """The whole space of JAX's Hopper matmul for `problem`, with times such as another chip might show."""
    m, n, k = problem
    names = ["tile_m", "tile_n", "tile_k", "max_concurrent_steps"]
    names += ["grid_minor_dim", "grid_tile_width", "wg_dimension", "cluster_dimension"]
    choices = [(64, 128, 256), (64, 128, 256), (64, 128), (2, 3, 4, 5, 6), (0, 1), (1, 4, 8, 16), (0, 1), (-1, 0, 1)]
    points = Space(dict, dict(zip(names, choices, strict=True))).points()
    footprint = hopper_sweep.footprint(m, n, k, points)
    runs = (footprint.onchip_bytes <= H200.onchip_bytes) & (footprint.registers <= 210)
    points = points.take(runs)
    footprint = hopper_sweep.footprint(m, n, k, points)
    other = dataclasses.replace(
        H200, l2_bytes_per_s=7e12, onchip_bytes_per_clock=90, memory_latency_s=1.1e-6, cores=120
    )
    crooked = np.random.default_rng(seed)
    # Every field has effects that the model does not know.
    factor = np.ones(len(points))
    for name in names:
        values, which = np.unique(getattr(points, name), return_inverse=True)
        factor *= np.exp(crooked.normal(0, 0.06, len(values)))[which]
    seconds = CostModel(other).seconds(footprint) * factor
    return hopper_candidates(points, CostModel(H200).seconds(footprint)), seconds.tolist()


def hopper_candidates(points, predicted_s):
    dimension = {-1: "none", 0: "m", 1: "n"}
    candidates = []
    for index, seconds in enumerate(predicted_s.tolist()):
        row = points.row(index)
        row |= {name: dimension[row[name]] for name in ("grid_minor_dim", "wg_dimension", "cluster_dimension")}
        candidates.append(Candidate("mosaic_gpu", row, seconds))
    return candidates


@pytest.mark.parametrize("in_flight", [1, 15])
@pytest.mark.parametrize("problem", [(4096, 4096, 4096), (512, 8192, 1024)])
def test_64_trials_come_within_three_percent_of_the_best_of_a_whole_space(problem, in_flight):
    shares, at_random = [], []
    for seed in range(4):
        candidates, seconds = hopper(problem, seed)
        assert len(candidates) > 1000
        order = spend(Search(candidates, budget=64, seed=seed), seconds, in_flight)
        shares.append(min(seconds) / min(seconds[index] for index in order))
        drawn = np.random.default_rng(seed).permuted(np.tile(seconds, (50, 1)), axis=1)[:, :64].min(axis=1)
        at_random.append(min(seconds) / float(np.mean(drawn)))
    assert np.median(shares) >= 0.97
    assert min(shares) >= 0.93
    assert np.mean(shares) > np.mean(at_random) + 0.03


def test_a_model_that_ranks_backwards_is_overcome():
    candidates, seconds = hopper((4096, 4096, 4096), seed=0)
    backwards = [dataclasses.replace(c, predicted_s=1 / s) for c, s in zip(candidates, seconds, strict=True)]
    order = spend(Search(backwards, budget=64), seconds)
    assert min(seconds) / min(seconds[index] for index in order) >= 0.97


def test_sixteen_trials_of_recorded_schedules_come_within_three_percent():
    for (m, n, k), schedules, measured_s, _ in hopper_sweep.sweeps():
        predicted = CostModel(H200).seconds(hopper_sweep.footprint(m, n, k, schedules))
        candidates = hopper_candidates(schedules, predicted)
        for seed in range(3):
            order = spend(Search(candidates, budget=16, seed=seed), measured_s.tolist())
            assert measured_s.min() / measured_s[order].min() >= 0.97


@functools.cache
def swept(name):
    """A recorded sweep: candidates as the model predicts them, and their measured seconds."""
    ((problem, trials),) = sweep.recorded_measurements(MATMUL, SWEEPS / f"matmul-{name}.jsonl.gz").trials.items()
    kernel = MATMUL.kernel("mosaic_gpu")
    seen = observed(kernel, problem, H200, trials)
    predicted = CostModel(H200).seconds(kernel.footprint(problem, seen.schedules, H200.target))
    rows = [seen.schedules.row(index) for index in range(len(seen.seconds))]
    candidates = [Candidate(kernel.backend, row, float(s)) for row, s in zip(rows, predicted, strict=True)]
    return candidates, seen.seconds.tolist()


def share(candidates, seconds, budget):
    """The worst of three searches: what it found, as a share of the best."""
    found = [
        min(seconds[index] for index in spend(Search(candidates, budget=budget, seed=seed), seconds))
        for seed in range(3)
    ]
    return min(seconds) / max(found)


@pytest.mark.parametrize("name", ["m8-n14336-k4096", "m1024-n1024-k2048", "m2048-n576-k7168"])
def test_on_a_recorded_sweep_the_model_is_followed_and_overcome_where_it_is_turned_upside_down(name):
    candidates, seconds = swept(name)
    assert share(candidates, seconds, 16) >= 0.99
    upside_down = [dataclasses.replace(c, predicted_s=1e-10 / c.predicted_s) for c in candidates]
    in_its_order = sorted(range(len(seconds)), key=lambda index: upside_down[index].predicted_s)[:32]
    assert min(seconds) / min(seconds[index] for index in in_its_order) < 0.8
    assert share(upside_down, seconds, 32) >= 0.95


def test_a_shuffled_model_is_overcome():
    candidates, seconds = swept("m2048-n2048-k2048")
    shuffled = np.random.default_rng(0).permutation([c.predicted_s for c in candidates])
    knows_nothing = [dataclasses.replace(c, predicted_s=float(s)) for c, s in zip(candidates, shuffled, strict=True)]
    at_random = np.random.default_rng(0).permuted(np.tile(seconds, (200, 1)), axis=1)[:, :32].min(axis=1)
    assert share(knows_nothing, seconds, 32) > min(seconds) / np.median(at_random)


def test_asking_among_three_thousand_candidates_takes_no_more_python_than_among_three_hundred():
    def taken(count):
        candidates, seconds = grid(count)
        search, asked, counts = Search(candidates, budget=16), [], []
        while asked[-1:] != [None]:
            counts.append(bytecodes(lambda: asked.append(search.ask())))
            if asked[-1] is not None:
                search.tell(asked[-1], seconds[asked[-1]])
        assert len(asked) == 17
        return np.median(counts)

    assert taken(3000) <= 1.1 * taken(300)


# --- the Gaussian process ---


def test_a_process_meets_its_observations_and_is_unsure_far_from_them():
    x = np.linspace(0, 1, 12)[:, None]
    y = np.sin(6 * x[:, 0])
    at = np.array([[x[4, 0]], [0.41], [3.0]])
    mean, deviation = predict(x, y, at)
    assert mean[:2] == pytest.approx(np.sin(6 * at[:2, 0]), abs=0.05)
    assert deviation[2] > 5 * deviation[1] > 0


def test_the_improvement_expected_of_a_certain_point_is_its_gain():
    gain = expected_improvement(np.array([1.0, 3.0]), np.array([1e-9, 1e-9]), best=2.0)
    assert gain == pytest.approx([1.0, 0.0])
    sure, unsure = expected_improvement(np.array([2.0, 2.0]), np.array([0.1, 1.0]), best=2.0)
    assert unsure == pytest.approx(10 * sure)


def test_a_process_over_few_and_over_many_times_is_one_formula(monkeypatch):
    random, (few, many) = np.random.default_rng(0), (samplers._THREADED, 0)
    x, y, at = random.random((40, 9)), random.random(40), random.random((300, 9))
    expected = []
    for threaded in (few, many):
        monkeypatch.setattr(samplers, "_THREADED", threaded)
        expected.append(np.concatenate(predict(x, y, at)))
    assert expected[0] == pytest.approx(expected[1], rel=1e-9)


def test_the_surrogate_leaves_the_other_cores_to_the_workers_that_compile():
    """Seconds of cores, whoever else is at them; the threads of a BLAS spin between one proposal and the next."""
    program = """
import sys, time
import numpy as np
from scheduler.search.samplers import predict
random = np.random.default_rng(0)
x, y, at = random.random((40, 12)), random.random(40), random.random((1500, 12))
predict(x, y, at)
before = time.process_time() - time.thread_time()
for _ in range(10):
    predict(x, y, at)
    time.sleep(0.05)
sys.exit(time.process_time() - time.thread_time() - before > 0.1)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_importing_the_model_loads_no_optuna():
    program = "import sys, scheduler.model.pruning, scheduler.model.cost; sys.exit('optuna' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
