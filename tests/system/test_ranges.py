"""A range of an extent: searched at a few points, it answers what lies between them, and tells how well."""

import contextlib
import dataclasses
import itertools
import sqlite3
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import stepped
import values
from modes import frozen
from operations import DoubleLibrary, DoubleProblem
from stepped import STEPPED, Stepped, Told, best_s, seconds
from typer.testing import CliRunner

import scheduler
from scheduler import tuned, tuned_matmul
from scheduler.cli.app import app
from scheduler.contrib.fleet.driver import order
from scheduler.core.errors import CacheMiss, DeviceLost, StoreError
from scheduler.core.hardware import CPU, find
from scheduler.core.neighbours import HeldOut, Range, range_from_text, range_to_text
from scheduler.core.records import Entry, Measurement, Record, family_of, key_of
from scheduler.dispatch import dispatch
from scheduler.prediction.between import RangeAnswer, answer, between
from scheduler.search import jobs
from scheduler.search.job_queue import DeviceExecutor, expected_s
from scheduler.search.ranges import BRIEF_PER_STEP, HELD_OUT, NEAREST, ladder, plan_text
from scheduler.search.task import Malformed, RangeTask, SearchOptions, Task
from scheduler.store import misses, text_files
from scheduler.store.database import Database
from scheduler.store.store import Store, build_shipped, default_url
from search_spaces import Operation
from search_spaces.matmul import MATMUL, MatmulProblem

pytestmark = pytest.mark.slow

HERE = Path(__file__).parents[1]
OWN = f"{HERE / 'stepped.py'}:STEPPED"


def task(low=1, high=1024, budget=16, operation=STEPPED):
    return jobs.task_of(operation, {"n": f"{low}..{high}"}, budget=budget)


def run(store, runner=None, *, of=None, **how):
    return list(jobs.run([of or task()], store=store, runner=runner or Told(), **how))


def lookup(store, n, operation=STEPPED, backends=None):
    def records(key):
        return filter(None, [store.get(key)])

    return between(operation, DoubleProblem(n), CPU, store.ranges.all(), records, backends=backends)


@pytest.fixture(scope="module")
def tuned_range():
    """A range from 1 to 1024, with the store that holds it and what ran for it."""
    store, runner = Store(":memory:"), Told()
    results = run(store, runner)
    return store, results, runner


# What is written


@pytest.mark.parametrize("written", ["m = [1, 64]", 'm = "1..64"'])
def test_a_job_says_a_range_as_two_integers_or_as_a_command_does(written):
    (one,) = jobs.parse(f'operation = "matmul"\nbudget = 7\n[[problem]]\n{written}\nn = 8\nk = 8\n')
    assert isinstance(one, RangeTask)
    assert (one.field, one.low, one.high, one.budget) == ("m", 1, 64, 7)
    assert str(one) == "matmul m=1..64 n=8 k=8 dtype=bfloat16"
    assert one == jobs.task_of(MATMUL, {"m": "1..64", "n": "8", "k": "8"}, budget=7)


def test_a_range_of_an_extent_at_its_default_is_said():
    (one,) = jobs.parse('operation = "matmul"\n[[problem]]\nm = 8\nn = 8\nk = 8\nbatch = [1, 4]\n')
    assert str(one) == "matmul batch=1..4 m=8 n=8 k=8 dtype=bfloat16"


@pytest.mark.parametrize(
    ("table", "complaint"),
    [
        ("m = [1, 2, 3]\nn = 8\nk = 8", "write one [[problem]] per value"),
        ("m = [1]\nn = 8\nk = 8", "must be a value or a range of two integers"),
        ("m = [1, 2.5]\nn = 8\nk = 8", "must be a value or a range of two integers"),
        ('m = [1, "8"]\nn = 8\nk = 8', "must be a value or a range of two integers"),
        ("m = [true, 8]\nn = 8\nk = 8", "must be a value or a range of two integers"),
        ("m = [8, 1]\nn = 8\nk = 8", "write m=1..8"),
        ("m = [8, 8]\nn = 8\nk = 8", "write m=8"),
        ("m = [0, 8]\nn = 8\nk = 8", "an extent must be at least 1"),
        ("m = [-4, 8]\nn = 8\nk = 8", "an extent must be at least 1"),
        ("m = [1, 8]\nn = [1, 8]\nk = 8", "only one field may be a range, found m and n"),
        ("m = 8\nn = 8\nk = 8\ntranspose_a = [0, 1]", "transpose_a=0..1: only an extent may be a range"),
        ("m = 8\nn = 8\nk = 8\ndtype = [1, 2]", "dtype=1..2: only an extent may be a range"),
        ("m = [1, 8]\nn = 8", "missing k"),
        ("mm = [1, 8]\nn = 8\nk = 8", "did you mean 'm'"),
        ("m = [1, 8]\nn = 8\nk = 8\nbudget = [1, 2]", "budget=[1, 2] is a list; give an integer from 1 to"),
    ],
)
def test_what_is_no_range_is_refused_with_what_is_wanted(table, complaint):
    (bad,) = jobs.parse(f'operation = "matmul"\n[[problem]]\n{table}\n')
    assert isinstance(bad, Malformed)
    assert complaint in bad.reason


def test_a_range_of_what_shapes_no_array_is_refused():
    (bad,) = jobs.parse(
        'operation = "flash_attention"\n[[problem]]\nbatch = 1\nq_len = 64\nkv_len = 64\nheads = 1\nkv_heads = 1\n'
        "head_dim = 64\ncausal = true\nwindow_left = [8, 32]\n"
    )
    assert isinstance(bad, Malformed)
    assert "no array's shape depends on window_left" in bad.reason


@pytest.mark.parametrize(
    ("ends", "points"),
    [
        ((1, 8), [1, 2, 4, 8]),
        ((3, 9), [3, 4, 8, 9]),
        ((5, 7), [5, 7]),
        ((1000, 1100), [1000, 1024, 1100]),
        ((64, 65), [64, 65]),
    ],
)
def test_the_ladder_has_both_ends_and_the_powers_of_two_between_them(ends, points):
    assert ladder(*ends) == points


def test_a_huge_range_has_a_short_ladder():
    assert len(ladder(1, 10**6)) == 21
    assert plan_text(task(1, 10**6)).startswith("21 searches of 16 trials, at most 60 of 8 between them, and 5 of 16")


# What is searched


def test_the_points_close_in_on_where_the_best_schedule_changes(tuned_range):
    store, results, _ = tuned_range
    made = results[-1].range
    assert (made.low, made.high, made.points[0], made.points[-1]) == (1, 1024, 1, 1024)
    for changes in (30, 462):
        low, high = made.around(changes) or (changes, changes)
        assert high <= (1 + NEAREST) * low + 2
    assert sum(r.record.brief for r in results[:-1]) <= BRIEF_PER_STEP * (len(ladder(1, 1024)) - 1)
    assert store.ranges.all() == [made]


def test_every_value_between_is_answered_nearly_as_fast_as_can_be_and_never_behind_the_library(tuned_range):
    store, results, _ = tuned_range
    for n in {*range(1, 1025, 9), *range(27, 34), *range(440, 480, 3)} - set(results[-1].range.points):
        found = lookup(store, n)
        assert isinstance(found, RangeAnswer), n
        time_s = seconds(n, found.backend, found.schedule.get("tile", 0))
        assert time_s <= 1.06 * best_s(n), n
        assert time_s <= 1.01 * seconds(n, "xla"), n


def test_values_are_held_out_that_are_no_points_and_tell_how_good_the_answers_are(tuned_range):
    _, results, _ = tuned_range
    made = results[-1].range
    assert len(made.held_out) == HELD_OUT
    for held in made.held_out:
        assert held.value not in made.points
        assert held.best_s == pytest.approx(best_s(held.value))
        assert held.library_s == pytest.approx(seconds(held.value, "xla"))
        assert held.of_best == pytest.approx(best_s(held.value) / held.answered_s)
    assert made.worst.of_best == min(held.of_best for held in made.held_out)
    assert made.worst.of_best <= made.of_best <= 1


def test_a_search_in_full_is_not_made_needless_by_a_brief_one(tuned_range):
    _, results, _ = tuned_range
    brief = next(result for result in results[:-1] if result.record.brief)
    again = Task(STEPPED, brief.task.problem, 16)
    copy = Store(":memory:")
    copy.put(brief.record)
    (result,) = jobs.run([again], store=copy, runner=Told())
    assert (result.state, result.record.brief) == ("tuned", False)
    assert "between two points of a range" in result.reason
    (known,) = jobs.run([dataclasses.replace(brief.task, part_of=None)], store=copy, runner=Told())
    assert known.state == "known"  # but a brief one by one in full


def test_a_range_that_is_tuned_is_known_and_nothing_runs_again(tuned_range):
    store, results, _ = tuned_range
    runner = Told()
    again = run(store, runner)
    assert {result.state for result in again} == {"known"}
    assert runner.measured == []
    assert again[-1].range == results[-1].range


def test_forced_it_is_searched_again_with_the_same_points(tuned_range):
    store, results, _ = tuned_range
    again = run(store, force=True)
    assert {result.state for result in again} == {"tuned"}
    assert again[-1].range.points == results[-1].range.points


@pytest.mark.parametrize("dies_after", [7, 60, 150])
def test_an_interrupted_range_goes_on_and_measures_nothing_twice(tuned_range, dies_after):
    _, results, whole = tuned_range
    store, first, second = Store(":memory:"), Told(dies_after=dies_after), Told()
    with contextlib.suppress(KeyboardInterrupt):
        run(store, first)
    resumed = run(store, second)
    assert resumed[-1].range.points == results[-1].range.points
    assert [h.value for h in resumed[-1].range.held_out] == [h.value for h in results[-1].range.held_out]
    made = [*first.measured, *second.measured]
    assert len(made) == len(set(made))
    assert sorted(made) == sorted(whole.measured)


def test_at_several_places_the_points_are_the_same(tuned_range, tmp_path):
    _, results, whole = tuned_range
    runners, store = [Told(), Told(), Told()], Store(tmp_path / "cache.db")
    where = [DeviceExecutor.of(runner) for runner in runners]
    several = list(jobs.run([task()], where, store=store))
    assert several[-1].range.points == results[-1].range.points
    assert sorted(m for runner in runners for m in runner.measured) == sorted(whole.measured)
    assert all(runner.measured for runner in runners)


def test_a_second_process_that_runs_the_same_job_searches_nothing_twice(tmp_path):
    store, other = Store(tmp_path / "cache.db"), Store(tmp_path / "cache.db")
    one, two = Told(), Told()
    running = jobs.run([task(1, 64)], store=store, runner=one)
    for _ in range(3):
        next(running)
    second = run(other, two, of=task(1, 64))
    first = list(running)
    assert first[-1].range.points == second[-1].range.points
    made = [*one.measured, *two.measured]
    assert len(made) == len(set(made))


def test_progress_says_how_much_is_to_come_and_ends_with_all_of_it(tuned_range):
    steps, store = [], Store(":memory:")
    results = list(jobs.run([task()], store=store, runner=Told(), progress=steps.append))
    first, last = steps[0].job, steps[-1].job
    rungs = len(ladder(1, 1024))
    assert first.total == 1 + rungs + (rungs - 1) + HELD_OUT  # the ladder, a look between its rungs, what is held out
    assert last.total == len(results)
    assert all(step.job.done < step.job.total for step in steps)
    assert last.done == len(results) - 2  # the last search is under way, and then the range has ended


def test_beside_a_range_other_problems_of_the_job_are_tuned(tuned_range):
    _, results, _ = tuned_range
    other = Task(STEPPED, DoubleProblem(5000), 4)
    found = list(jobs.run([task(), other], store=Store(":memory:"), runner=Told()))
    assert [r.state for r in found if r.task is other] == ["tuned"]
    (whole,) = (r for r in found if isinstance(r.task, RangeTask))
    assert whole.range.points == results[-1].range.points


def test_where_every_place_is_lost_the_range_has_failed_and_says_so():
    class Lost(Told):
        def measure(self, task, *, again=False):
            if len(self.measured) == 40:
                raise DeviceLost("it fell off the bus")
            return super().measure(task, again=again)

    store = Store(":memory:")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = list(jobs.run([task()], [DeviceExecutor.of(Lost())], store=store))
    whole = results[-1]
    assert isinstance(whole.task, RangeTask)
    assert [result.task for result in results].count(whole.task) == 1
    tuned_points = {r.task.problem.n for r in results[:-1] if r.state == "tuned"}
    assert tuned_points
    assert {r.state for r in results[:-1] if r.task.problem.n not in tuned_points} == {"failed"}
    assert max(tuned_points) < 1024
    assert whole.range is None or whole.range.points[-1] == max(tuned_points)


def test_the_same_range_twice_in_a_job_is_searched_once(tuned_range):
    runner = Told()
    found = list(jobs.run([task(1, 64), task(1, 64)], store=Store(":memory:"), runner=runner))
    assert [r.state for r in found if isinstance(r.task, RangeTask)] in (["tuned", "known"], ["tuned", "tuned"])
    assert len(runner.measured) == len(set(runner.measured))


def test_a_range_of_two_values_has_nothing_between():
    (*points, whole) = run(Store(":memory:"), of=task(7, 8))
    assert [point.record.key.problem for point in points] == ['{"n":7}', '{"n":8}']
    assert (whole.range.points, whole.range.held_out, whole.range.of_best) == ((7, 8), (), None)


def test_memory_that_ends_in_the_range_ends_what_is_answered():
    store = Store(":memory:")
    results = run(store, Told(largest=600))
    made = results[-1].range
    assert 600 / (1 + NEAREST) - 2 <= made.points[-1] <= 600
    assert results[-1].state == "tuned"
    assert f"n={made.points[-1] + 1}..1024 is left out: the device has no room" in results[-1].reason
    assert {r.state for r in results if r.task is not results[-1].task and r.task.problem.n > 600} == {"failed"}
    assert lookup(store, 601) == ""
    assert isinstance(lookup(store, made.points[-1] - 1), RangeAnswer)


def test_where_next_to_nothing_can_run_there_is_no_range_and_a_reason():
    store = Store(":memory:")
    whole = run(store, Told(largest=1))[-1]
    assert (whole.state, whole.range) == ("failed", None)
    assert "fewer than two of its points have a record: the device has no room" in whole.reason
    assert store.ranges.all() == []


class FromHundred(Stepped):
    def supports(self, problem, target):
        return "it takes a hundred at least" if problem.n < 100 else None


class Multiples(Stepped):
    def supports(self, problem, target):
        return None if problem.n % 8 == 0 else "it takes multiples of eight"


def test_where_the_kernel_does_nothing_at_the_low_end_the_library_answers():
    operation, store = Operation("from_hundred", DoubleProblem, (FromHundred(), DoubleLibrary())), Store(":memory:")
    whole = run(store, of=task(1, 256, operation=operation))[-1]
    assert whole.range.points[0] == 1
    for n in set(range(1, 256)) - set(whole.range.points):
        assert lookup(store, n, operation).backend == ("xla" if n < 100 else "scripted"), n


def test_what_is_not_legal_for_a_value_leaves_its_place_to_the_next_that_is():
    operation, store = Operation("multiples", DoubleProblem, (Multiples(), DoubleLibrary())), Store(":memory:")
    whole = run(store, of=task(8, 256, operation=operation))[-1]
    for n in set(range(8, 256)) - set(whole.range.points):
        assert lookup(store, n, operation).backend == ("scripted" if n % 8 == 0 else "xla"), n
    pallas = lookup(store, 65, operation, backends=frozenset({"scripted"}))
    assert "no schedule of scripted that ran at either point is legal here" in pallas


class Even(DoubleProblem):
    def __post_init__(self):
        if self.n % 2 and self.n > 1:
            raise ValueError(f"n={self.n} is odd")
        super().__post_init__()


def test_values_that_are_no_problems_are_passed_over():
    operation, store = Operation("even", Even, (Stepped(), DoubleLibrary())), Store(":memory:")
    made = run(store, of=jobs.task_of(operation, {"n": "2..100"}, budget=8))[-1].range
    assert all(n % 2 == 0 for n in made.points)
    assert made.held_out
    assert all(held.value % 2 == 0 for held in made.held_out)


def test_a_range_whose_answer_is_wrong_at_a_value_held_out_answers_nothing(tuned_range):
    _, results, _ = tuned_range
    points = set(results[-1].range.points)
    store = Store(":memory:")
    whole = run(store, Told(wrong=lambda n, tile: n not in points))[-1]
    assert (whole.state, whole.range) == ("failed", None)
    assert "which fails: verify: wrong at" in whole.reason
    assert store.ranges.all() == []


def test_the_backends_of_a_task_are_those_of_its_searches():
    store = Store(":memory:")
    of = jobs.task_of(STEPPED, {"n": "1..64"}, budget=8, backends=frozenset({"xla"}))
    whole = run(store, of=of)[-1]
    assert {record.winner.backend for record in store.records()} == {"xla"}
    assert whole.range.worst.of_best == 1


# What answers


def test_of_two_ranges_that_overlap_the_one_with_the_nearer_points_answers(tuned_range):
    store, _, _ = tuned_range
    records = list(store.records())
    copy = Store(":memory:")
    for record in records:
        copy.put(record)
    wide, narrow = _range((1, 1024)), dataclasses.replace(_range((64, 128)), low=64, high=128)
    copy.ranges.put(wide)
    copy.ranges.put(narrow)
    assert lookup(copy, 100).range == narrow
    assert lookup(copy, 300).range == wide
    copy.forget(Key64)
    found = lookup(copy, 100)
    assert found.range == wide  # which knows of a record at both ends still


Key64 = key_of(STEPPED, DoubleProblem(64), CPU)


def _range(points, operation="stepped", low=1, high=1024):
    return Range(operation, CPU.id, "{}", "n", low, high, points, values.ENVIRONMENT)


def test_without_the_record_of_a_point_there_is_no_answer_and_a_reason(tuned_range):
    store, _, _ = tuned_range
    empty = Store(":memory:")
    empty.ranges.put(store.ranges.all()[0])
    assert "n=64: its record is gone" in lookup(empty, 65)


def test_points_measured_by_another_version_of_a_kernel_answer_nothing(tuned_range):
    store, _, _ = tuned_range

    class Newer(Stepped):
        version = 2

    newer = Operation("stepped", DoubleProblem, (Newer(), DoubleLibrary()))
    assert "the scripted kernel is now version 2, and version 1 was measured" in lookup(store, 100, newer)


def test_another_family_another_chip_and_what_is_beyond_lie_in_no_range():
    problem = MatmulProblem(100, 64, 64)
    of = Range("matmul", CPU.id, family_of(problem, "m"), "m", 1, 128, (64, 128), values.ENVIRONMENT)

    def reason(other, hardware=CPU):
        return between(MATMUL, other, hardware, [of], lambda key: ())

    assert "its record is gone" in reason(problem)
    for other in (
        dataclasses.replace(problem, m=128),
        dataclasses.replace(problem, m=129),
        dataclasses.replace(problem, m=63),
        dataclasses.replace(problem, n=65),
        dataclasses.replace(problem, dtype="float32"),
        dataclasses.replace(problem, batch=2),
        dataclasses.replace(problem, activation="relu"),
    ):
        assert reason(other) == "", other
    assert reason(problem, find("NVIDIA H200")) == ""


def test_rows_that_mean_nothing_answer_nothing(tuned_range):
    store, _, _ = tuned_range
    problem = DoubleProblem(100)
    strange = [
        dataclasses.replace(_range((64, 128)), field="flops", problem=problem.canonical()),
        dataclasses.replace(_range((64, 128)), field="__class__", problem=problem.canonical()),
    ]
    assert between(STEPPED, problem, CPU, strange, lambda key: [store.get(key)]) == ""
    for time_s in (0.0, -1.0):
        broken = store.get(Key64)
        broken = dataclasses.replace(broken, entries=(dataclasses.replace(broken.winner, measurement=_took(time_s)),))
        found = between(STEPPED, problem, CPU, [_range((64, 128))], lambda key, broken=broken: [broken])
        assert "its record has a time that is not positive" in found
    huge = _range((64, 2**62), high=2**62)
    assert "its record is gone" in between(STEPPED, problem, CPU, [huge], lambda key: ())


def test_what_is_between_is_told_by_the_gains_at_both_points():
    """Hand-made: of two schedules each was timed where it won, and the library at both points."""

    def record(n, library_s, **times):
        entries = [Entry("scripted", 1, {"tile": int(t[1:])}, _took(s), 0.0) for t, s in times.items()]
        entries.append(Entry("xla", 1, {}, _took(library_s), 0.0))
        entries.sort(key=lambda entry: entry.measurement.median_s)
        key = key_of(STEPPED, DoubleProblem(n), CPU)
        return Record(key, tuple(entries), {"scripted": 1, "xla": 1}, values.ENVIRONMENT, 8, 8, 4)

    def at(n, *records):
        by_key = {r.key: r for r in records}
        found = between(STEPPED, DoubleProblem(n), CPU, [_range((64, 256))], lambda key: [by_key[key]])
        return found.backend, found.schedule.get("tile"), found.library_s / found.predicted_s

    low, high = record(64, 1.0, t1=0.5), record(256, 1.0, t8=0.5)
    assert at(100, low, high)[:2] == ("scripted", 1)
    assert at(200, low, high)[:2] == ("scripted", 8)
    assert at(128, low, high)[:2] == ("scripted", 8)  # a tie is the upper one's
    assert at(128, low, high)[2] == pytest.approx(2**0.5)
    # The library has won above, and the best of the others was behind it by so much: nobody answers in its place.
    assert at(128, low, record(256, 1.0, t8=4.0)) == ("xla", None, 1.0)
    assert at(128, record(64, 1.0, t1=0.995), record(256, 1.0, t1=0.995))[0] == "xla"  # a tie is the library's
    assert at(128, record(64, 1.0, t1=0.9), record(256, 1.0, t1=0.9)) == ("scripted", 1, pytest.approx(1 / 0.9))


def _took(seconds):
    return Measurement(seconds, (seconds,), "wall", "warm")


def test_a_range_comes_after_a_record_and_before_the_model(tuned_range):
    store, results, _ = tuned_range
    asked = {"records": list(store.records()), "ranges": store.ranges.all()}
    point, held = results[-1].range.points[3], results[-1].range.held_out[0].value
    assert answer(STEPPED, DoubleProblem(point), CPU, **asked).source == "record"
    assert answer(STEPPED, DoubleProblem(held), CPU, **asked).source == "record"  # its search has left one
    assert answer(STEPPED, DoubleProblem(77), CPU, **asked).source == "range"
    assert answer(STEPPED, DoubleProblem(2000), CPU, **asked).source == "model"


@pytest.fixture
def own(tuned_range):
    """The user's own store, with the range."""
    store, _, _ = tuned_range
    with contextlib.closing(Store(default_url())) as mine:
        for record in store.records():
            mine.put(record)
        mine.ranges.put(store.ranges.all()[0])
    scheduler.reload()
    yield default_url()
    scheduler.reload()


def decide(n, **options):
    return dispatch.decide(STEPPED, DoubleProblem(n), "cpu", dispatch.options(STEPPED, **options))


@pytest.mark.parametrize("on_miss", ["error", "model", "tune", "xla"])
def test_a_call_between_two_points_is_a_hit_whatever_a_miss_would_do(own, monkeypatch, on_miss):
    monkeypatch.setenv("TILE_SCHEDULER_MISSES", "on")
    decision = decide(77, on_miss=on_miss)
    assert (decision.kernel.backend, decision.schedule.tile, decision.missed) == ("scripted", 8, None)
    assert decision.reason.startswith("the range n=1..1024: measured at n=")
    assert tuned(STEPPED)(jnp.ones(77), on_miss=on_miss).tolist() == [2.0] * 77
    assert misses.flush_misses(600)
    with contextlib.closing(Store(own)) as store:
        assert store.misses.all() == []


def test_beyond_the_range_a_call_misses(own):
    with pytest.raises(CacheMiss, match="no schedule for stepped n=1025"):
        decide(1025, on_miss="error")


def test_a_call_that_no_longer_can_be_answered_says_why(own):
    with contextlib.closing(Store(own)) as store:
        for record in list(store.records()):
            store.forget(record.key)
    with pytest.raises(CacheMiss, match=r"the range n=1\.\.1024 cannot be used: n=\d+: its record is gone"):
        decide(77, on_miss="error")


def test_a_call_with_a_record_asks_the_store_once_and_one_without_any_range_once_more(own, monkeypatch):
    asked = []
    select = Database.select

    def recorded(self, query, *values):
        asked.append(str(query))
        return select(self, query, *values)

    monkeypatch.setattr(Database, "select", recorded)
    decide(64)
    assert len(asked) == 1
    asked.clear()
    with contextlib.closing(Store(own)) as store:
        store.ranges.forget(store.ranges.all()[0])
    scheduler.reload()
    asked.clear()
    decide(77, on_miss="xla")
    assert sum("FROM ranges" in query for query in asked) == 2  # of the user's own store, and of the shipped one
    assert sum("FROM schedules" in query for query in asked) == 2


def test_two_processes_answer_alike_and_a_store_that_may_only_be_read_answers(own):
    first = decide(77).schedule
    with frozen(Path(own)):
        scheduler.reload()
        assert decide(77).schedule == first


def test_predict_says_what_the_range_answers(own):
    found = scheduler.predict(STEPPED, {"n": 77})
    assert (found.source, found.backend, found.schedule) == ("range", "scripted", {"tile": 8})


def test_a_batch_that_joins_the_rows_lies_in_the_range_of_rows(caplog):
    problem = MatmulProblem(48, 8, 8, "float32")
    space = MATMUL.kernel("interpret").space(problem, CPU.target)
    schedule = next(iter(_legal(space)))
    with contextlib.closing(Store(default_url())) as store:
        for m in (32, 64):
            key = key_of(MATMUL, dataclasses.replace(problem, m=m), CPU)
            versions = {kernel.backend: kernel.version for kernel in MATMUL.kernels if _supports(kernel, problem)}
            entries = (
                Entry("interpret", versions["interpret"], schedule, _took(1.0), 0.0),
                Entry("xla", versions["xla"], {}, _took(2.0), 0.0),
            )
            store.put(Record(key, entries, versions, values.ENVIRONMENT, 8, 8, 4))
        family = family_of(problem, "m")
        store.ranges.put(Range("matmul", CPU.id, family, "m", 32, 64, (32, 64), values.ENVIRONMENT))
    scheduler.reload()
    with caplog.at_level("DEBUG", logger="scheduler"):
        x, w = jnp.ones((6, 8, 8)), jnp.ones((8, 8))
        jax.vmap(lambda x: tuned_matmul(x, w, on_miss="error"))(x)
    assert any("m=48" in line and "interpret is selected: the range m=32..64" in line for line in caplog.messages)


def _legal(space):
    for values_ in itertools.product(*space.choices.values()):
        point = dict(zip(space.choices, values_, strict=True))
        with contextlib.suppress(ValueError):
            if space.broken(space.decode(point)) is None:
                yield point


def _supports(kernel, problem):
    return kernel.supports(problem, CPU.target) is None


# What is kept

HELD = HeldOut(77, "scripted", {"tile": 8}, 2e-4, 1.9e-4, None)
ONE = dataclasses.replace(_range((1, 2, 1024)), held_out=(HELD, dataclasses.replace(HELD, value=78, library_s=3e-4)))


def test_a_range_as_text_is_the_same_range():
    assert range_from_text(range_to_text(ONE)) == ONE
    assert ONE.of_library == pytest.approx(1.5)
    assert ONE.worst.value == 77


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("[1, 2, 1024]", "[1]"), "at least two are wanted"),
        (("[1, 2, 1024]", "[2, 1, 1024]"), "ascending from 1 to 1024"),
        (("[1, 2, 1024]", "[1, 1025]"), "ascending from 1 to 1024"),
        (('"low": 1', '"low": 0'), "ascending from 1 to 1024"),
        (('"problem": {}', '"problem": {"n": 4}'), "one without n is wanted"),
        (('"problem": {}', '"problem": "x"'), "one without n is wanted"),
        (('"format": 1', '"format": 2'), "upgrade tile-scheduler"),
        (('"points"', '"pints"'), "points is missing"),
        (("0.0002", "NaN"), "answered_s"),
    ],
)
def test_text_that_is_no_range_is_refused(change, complaint):
    text = range_to_text(ONE)
    assert change[0] in text
    with pytest.raises(ValueError, match=complaint):
        range_from_text(text.replace(*change))


def test_a_store_keeps_one_range_of_the_same_problems_and_ends():
    store = Store(":memory:")
    newer = dataclasses.replace(ONE, points=(1, 1024))
    other = dataclasses.replace(ONE, high=2048)
    for one in (ONE, newer, other):
        store.ranges.put(one)
    assert store.ranges.all() == [newer, other]
    assert store.ranges.all(operation="stepped", hardware=CPU.id) == [newer, other]
    assert store.ranges.all(operation="another") == []
    assert (store.ranges.forget(newer), store.ranges.forget(newer)) == (1, 0)
    assert store.ranges.all() == [other]


def test_a_row_that_is_no_range_is_skipped_and_said(tmp_path, caplog):
    store = Store(tmp_path / "cache.db")
    store.ranges.put(ONE)
    store.ranges.put(dataclasses.replace(ONE, high=2048))
    with contextlib.closing(sqlite3.connect(tmp_path / "cache.db")) as connection:
        connection.execute("UPDATE ranges SET range = 'nonsense' WHERE high = 1024")
        connection.commit()
    assert [one.high for one in store.ranges.all()] == [2048]
    assert "a range of stepped" in caplog.text


def test_ranges_travel_with_records_as_lines_and_in_directories(tmp_path):
    records = [values.record()]
    text = text_files.export_text(records, [ONE])
    assert text_files.import_lines(text) == (records, [ONE])
    assert text_files.import_text(text) == records
    with pytest.raises(StoreError, match="line 2: points"):
        text_files.import_lines(text.replace('"points": [1, 2, 1024]', '"points": [2]'))
    text_files.add_records(tmp_path, records)
    assert text_files.read_ranges(tmp_path) == []
    other = dataclasses.replace(ONE, field="k")
    text_files.add_ranges(tmp_path, [ONE])
    text_files.add_ranges(tmp_path, [other, dataclasses.replace(ONE, points=(1, 1024))])
    kept = [other, dataclasses.replace(ONE, points=(1, 1024))]
    assert text_files.read_ranges(tmp_path) == kept
    assert text_files.add_ranges(tmp_path, []) == []
    build_shipped(tmp_path, tmp_path / "cache.db")
    assert Store(tmp_path / "cache.db", readonly=True).ranges.all() == kept


def test_a_fleet_is_told_what_to_try_first_and_that_a_search_is_brief(tuned_range):
    store, results, _ = tuned_range
    brief = next(result.task for result in results if getattr(result.task, "brief", False))
    sent = order(brief, SearchOptions(), CPU, values.ENVIRONMENT, store)
    assert (sent.first, sent.brief) == (brief.first, True)
    assert brief.first


def test_what_is_likely_to_come_is_less_than_what_was_stated():
    of = task()
    assert expected_s(of.at(32), CPU) > expected_s(dataclasses.replace(of.at(32), budget=8), CPU)


# The command line


def command(*words, code=0):
    done = CliRunner().invoke(app, list(map(str, words)))
    assert done.exit_code == code, done.output + done.stderr
    return done.stdout, done.stderr


def test_from_the_command_line_a_range_is_tuned_listed_shown_explained_carried_and_forgotten(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("scheduler.search.job_queue.start_runner", lambda *_: Told())
    out, said = command("tune", OWN, "n=20..34", "--budget", 3)
    assert "stepped n=20..34: 3 searches of 3 trials, at most 6 of 3 between them, and 5 of 3" in said
    assert "n=20..34 uses the records at" in out
    assert "held-out: " in out
    assert "of the best at worst (n=" in out
    out, _ = command("list")
    assert "stepped n=20..34 on cpu" in out
    out, _ = command("show", OWN, "n=20..34")
    assert "n=34" in out
    with contextlib.closing(Store(default_url())) as store:
        (made,) = store.ranges.all()
        between_them = [n for n in range(20, 34) if store.get(key_of(STEPPED, DoubleProblem(n), CPU)) is None]
    out, _ = command("explain", OWN, f"n={between_them[0]}")
    assert "From a range, a call gets" in out
    _, said = command("show", OWN, f"n={between_them[0]}", code=1)
    assert "nothing is stored for stepped" in said
    out, _ = command("export")
    assert range_to_text(made) in out
    (tmp_path / "carried.jsonl").write_text(out)
    _, said = command("forget", OWN, "n=20..34")
    assert "the records at its points remain" in said
    command("forget", OWN, "n=20..34", code=1)
    command("show", OWN, "n=20..34", code=1)
    _, said = command("import", tmp_path / "carried.jsonl")
    assert "and 1 ranges" in said
    with contextlib.closing(Store(default_url())) as store:
        assert store.ranges.all() == [made]
    _, said = command("forget", "--all")
    assert "forgot the range stepped n=20..34" in said
    with contextlib.closing(Store(default_url())) as store:
        assert (store.ranges.all(), list(store.records())) == ([], [])


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("tune", "matmul", "m=8..1", "n=8", "k=8"), "write m=1..8"),
        (("tune", "matmul", "m=1..8", "n=1..8", "k=8"), "only one field may be a range"),
        (("tune", "matmul", "m=1..8", "n=8", "k=8", "--first-error"), "--first-error"),
        (("explain", "matmul", "m=1..8", "n=8", "k=8"), "m=1..8 is not an integer"),
    ],
)
def test_a_range_that_a_command_cannot_take_is_a_usage_error(words, complaint):
    _, said = command(*words, code=2)
    assert complaint in " ".join(said.replace("│", " ").split())


def test_a_miss_that_lies_in_a_range_tuned_since_is_settled(own, monkeypatch):
    monkeypatch.setenv("TILE_SCHEDULER_MISSES", "on")
    monkeypatch.setattr(misses, "BATCH_S", 0.05)
    with contextlib.closing(Store(own)) as store:
        (made,) = store.ranges.all()
        store.ranges.forget(made)
        scheduler.reload()
        decide(77, on_miss="xla")
        assert misses.flush_misses(600)
        out, _ = command("misses", "--own", OWN)
        assert "n=77" in out
        store.ranges.put(made)
    out, _ = command("misses", "--own", OWN)
    assert "Records cover all 1 misses" in out


def test_the_times_that_are_told_change_their_best_twice():
    won = [min((0, 1, 8), key=lambda tile: seconds(n, "scripted" if tile else "xla", tile)) for n in (29, 31, 461, 463)]
    assert won == [1, 8, 8, 0]
    assert stepped.best_s(31) == seconds(31, "scripted", 8)
