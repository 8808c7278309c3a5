"""What is done about misses: which are open, what a search may gain of them, and the searches of those worth it."""

import dataclasses
import json
import sqlite3
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from test_cli import DOCTOR, run

import scheduler
from scheduler import tuned_matmul
from scheduler.core.hardware import CPU, find, identified
from scheduler.core.records import Entry, Key, Miss
from scheduler.search import missed
from scheduler.search.jobs import SearchOptions, Task
from scheduler.search.missed import MIN_GAIN, Missed, TimeBudget, weigh, worth_tuning
from scheduler.store import misses
from scheduler.store.store import Store, shipped
from search_spaces.matmul import MATMUL, MatmulProblem

pytestmark = pytest.mark.slow

H200 = find("h200").id
A = jnp.ones((8, 8))


@pytest.fixture(autouse=True)
def _noting(_own_cache, monkeypatch):
    monkeypatch.setenv("TILE_SCHEDULER_MISSES", "on")
    monkeypatch.setattr(misses, "_writer", misses._Writer())
    scheduler.reload()
    yield
    assert misses.flush_misses(600)


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "cache.db")
    yield store
    store.close()


def miss(problem, lowered=1, hardware=H200, operation="matmul", line="/home/me/model.py:41", place=""):
    text = problem if isinstance(problem, str) else problem.canonical()
    return Miss(Key(operation, hardware, text), lowered, "2026-03-01T12:00:00Z", "2026-03-02T12:00:00Z", line, place)


def knowing(*records):
    """Stores of these records."""
    return lambda operation, problem, hardware: records


def product(m, n=4096, k=4096, **more):
    return MatmulProblem(m, n, k, **more)


# What may be gained


def test_the_largest_expected_gain_comes_first_and_counts():
    few, often = miss(product(24, 8000, 8000), 2), miss(product(40, 8000, 8000), 9)
    unknown = miss(product(24), hardware="Some Chip (7 cores, 1 GiB)")
    weighed = weigh([unknown, few, often], knowing(), identified)
    assert [one.miss for one in weighed] == [often, few, unknown]
    first, second, third = weighed
    assert first.gain_s == 9 * (first.library_s - first.best_s) > 2 * (second.library_s - second.best_s) > 0
    assert (third.library_s, third.gain_s, third.reason) == (None, None, "the chip is not in the table of chips")


def test_what_only_the_library_can_do_gains_nothing():
    (one,) = weigh([miss(product(64, dtype="float32", precision="highest"))], knowing(), identified)
    assert one.best_s == one.library_s > 0
    assert one.gain_s == 0
    assert "no kernel of matmul supports" in one.reason


def test_a_record_that_holds_settles_a_miss_and_one_that_does_not_leaves_it_open():
    record = next(shipped().records(operation="matmul", hardware=H200))
    one = miss(record.key.problem)
    (settled,) = weigh([one], knowing(record), identified)
    assert isinstance(settled.covered_by, Entry)
    assert worth_tuning([settled]) == ([], [])
    stale = dataclasses.replace(record, versions=dict.fromkeys(record.versions, 0))
    (open_,) = weigh([one], knowing(stale), identified)
    assert open_.covered_by is None
    assert open_.best_s is not None
    (again,) = weigh([one], knowing(stale, record), identified)
    assert again.covered_by == settled.covered_by


def case(number, library_s, best_s, lowered=1):
    return Missed(miss(str(number), lowered), MATMUL, product(8), None, library_s, best_s)


def test_what_promises_together_less_than_half_a_percent_is_left():
    large = case(0, 1.0, 0.9)
    small = [case(i, 0.1, 0.1 - 0.0011) for i in range(1, 5)]
    worth, left = worth_tuning([*small, large, case(5, 1.0, 1.1)])
    assert [one.miss.key.problem for one in worth] == ["0"]
    assert len(left) == 5
    assert sum(one.gain_s for one in left) < MIN_GAIN * 2.4
    worth, left = worth_tuning([*small, large, *(case(i, 0.1, 0.1 - 0.0011) for i in range(6, 30))])
    together = sum(one.gain_s for one in left)
    assert together < MIN_GAIN * 3.8 <= together + worth[-1].gain_s


def test_what_nobody_can_predict_is_searched_after_what_gains_and_before_the_rest():
    worth, left = worth_tuning([case(0, 1.0, None), case(1, 1.0, 0.5), case(2, 1.0, 2.0)])
    assert [one.miss.key.problem for one in worth] == ["1", "0"]
    assert [one.miss.key.problem for one in left] == ["2"]
    assert worth_tuning([]) == ([], [])


def test_searches_end_with_the_time_and_it_is_known_how_many_are_left(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(missed.time, "monotonic", lambda: now[0])
    tasks = [Task(MATMUL, product(m), SearchOptions(seconds=s)) for m, s in ((1, None), (2, 5.0), (3, None), (4, None))]
    within = TimeBudget(60)
    now[0] += 1000  # before the first is begun
    assert within(tasks[0]).options.seconds == 60
    now[0] += 20
    assert within(tasks[1]).options.seconds == 5
    now[0] += 39
    assert within(tasks[2]).options.seconds == 1
    now[0] += 2
    assert within(tasks[3]) is None
    assert within.left == 1
    unbounded = TimeBudget(None)
    assert [unbounded(task) for task in tasks] == tasks


# The commands


def test_misses_are_listed_until_they_are_settled_and_forgotten_when_asked(store, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    tuned_matmul(A, A)
    tuned_matmul(A[:4], A)
    line = sys._getframe().f_lineno - 2
    assert misses.flush_misses(600)
    out, _ = run("misses")
    assert "problem, and the calling line" in out
    assert "matmul m=8 n=8 k=8 dtype=float32" in out
    assert f"{Path(__file__).name}:{line}" in out.replace("\n", "")
    found = json.loads(run("misses", "--json")[0])
    assert [one["settled"] for one in found] == [False, False]
    assert found[0]["hardware"] == CPU.id
    assert {"lowered", "first", "last", "library_s", "best_s", "gain_s"} <= set(found[0])
    run("tune", "matmul", "m=8", "n=8", "k=8", "dtype=float32", "--budget", 1)
    assert [one["problem"]["m"] for one in json.loads(run("misses", "--json")[0])] == [4]
    assert len(json.loads(run("misses", "--all", "--json")[0])) == 2
    assert "covered: xla" in run("misses", "--all")[0]
    _, err = run("misses", "matmul", "m=4", "n=8", "k=8", "dtype=float32", "--forget")
    assert "forgot 1 misses" in err
    assert "Records cover all 1 misses" in run("misses")[0]
    run("misses", "--forget")
    assert "No misses are in" in run("misses")[0]
    assert [record.key.operation for record in store.records()] == ["matmul"]  # no record goes with a miss


def test_misses_of_an_operation_or_a_chip_are_chosen_by_their_names(store):
    store.misses.note([miss(product(24)), miss(product(24), hardware=CPU.id), miss("{}", operation="mine")])
    chosen = {
        words: len(json.loads(run("misses", *words, "--json")[0]))
        for words in (("matmul",), ("--hardware", "h200"), ("matmul", "--hardware", "h200"), ("mine",))
    }
    assert list(chosen.values()) == [2, 2, 1, 1]
    _, err = run("misses", "matmull", status=2)
    assert "no operation 'matmull'" in err


def test_what_is_missed_is_tuned_on_this_chip_and_what_is_left_out_is_said(store):
    for m in (8, 4):
        tuned_matmul(A[:m], A)
    assert misses.flush_misses(600)
    store.misses.note([miss(product(24)), miss("{}", hardware=CPU.id), miss("{}", 3, CPU.id, "mine", "", "my.py:MINE")])
    out, err = run("tune-missed")
    assert "No call on" in out
    assert f"1 problems on {H200} are left out: this chip is {CPU.id}" in err
    assert "1 problems of matmul are left out: the problem is no longer valid for matmul: missing m, n, k" in err
    assert "1 problems of mine are left out: mine is user-defined: give --own my.py:MINE" in err
    assert "2 problems are left out: their total expected gain is below 0.5%" in err  # of a CPU, XLA is the best
    results = json.loads(run("tune-missed", "--all", "--budget", 2, "--json")[0])["results"]
    assert [result["state"] for result in results] == ["tuned", "tuned"]
    assert {record.key.problem for record in store.records()} == {
        MatmulProblem(m, 8, 8, dtype="float32").canonical() for m in (8, 4)
    }
    assert "No call on" in run("tune-missed", "--all")[0]
    scheduler.reload()
    before = len(store.misses.all())
    tuned_matmul(A[:4], A, on_miss="error")  # now there is a record
    assert misses.flush_misses(600)
    assert len(store.misses.all()) == before


OWN = """
import scheduler

@scheduler.autotune(tile=(4, 8), reference=lambda x: x * 2)
def twice(x, *, tile):
    return x + x
"""


def test_an_operation_of_ones_own_is_tuned_where_it_is_named(tmp_path, store):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    twice = scheduler.tuned(f"{file}:twice")
    twice(jnp.ones((16,)))
    assert misses.flush_misses(600)
    (noted,) = store.misses.all()
    assert noted.place.endswith(":twice")
    (one,) = json.loads(run("misses", "--own", f"{file}:twice", "--json")[0])
    assert (one["best_s"], one["gain_s"]) == (None, None)
    assert "declares no footprint, so its time cannot be predicted" in one["reason"]
    result = json.loads(run("tune-missed", "--own", f"{file}:twice", "--budget", 3, "--json")[0])["results"]
    assert [one["state"] for one in result] == ["tuned"]


def test_the_parts_of_what_is_missed_are_all_of_it(store):
    store.misses.note([miss(MatmulProblem(m, 8, 8, dtype="float32"), hardware=CPU.id) for m in (1, 2, 3)])
    cut = {}
    for part in ("1/2", "2/2"):
        with sqlite3.connect(store.location) as connection:
            connection.execute("DELETE FROM schedules")
        words = ("tune-missed", "--all", "--part", part, "--budget", 1, "--json")
        cut[part] = {result["task"] for result in json.loads(run(*words)[0])["results"]}
    assert {part: len(tasks) for part, tasks in cut.items()} == {"1/2": 2, "2/2": 1}
    assert len(cut["1/2"] | cut["2/2"]) == 3


def test_a_search_of_what_is_missed_that_was_cut_short_goes_on(store, monkeypatch):
    store.misses.note([miss(MatmulProblem(32, 32, 32, dtype="float32"), hardware=CPU.id)])

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Store, "put", interrupt)
        run("tune-missed", "--all", "--budget", 3, status=130)
    ((_, trials),) = store.unfinished().items()
    (result,) = json.loads(run("tune-missed", "--all", "--budget", 3, "--json")[0])["results"]
    assert (result["state"], result["resumed"]) == ("tuned", len(trials))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--part", "3/2"), "a part i/n must have 1 <= i <= n, found 3/2"),
        (("--own", "nowhere.py:X"), "cannot load operation"),
    ],
)
def test_wrong_words_are_answered_with_what_is_wanted(words, said):
    _, err = run("tune-missed", *words, status=2)
    assert said in " ".join(err.replace("│", " ").split())


def test_doctor_says_how_many_there_are_and_how_to_have_none(store, monkeypatch):
    store.misses.note([miss(product(24))])
    found = {row["what"]: row["detail"] for row in json.loads(run("doctor", "--json", status=DOCTOR)[0])}
    assert found["misses"] == "1 logged (tile-scheduler misses); TILE_SCHEDULER_MISSES=off disables logging"
    monkeypatch.setenv("TILE_SCHEDULER_MISSES", "off")
    assert "not logged" in run("doctor", status=DOCTOR)[0]
    store.misses.forget([miss(product(24)).key])
    assert "TILE_SCHEDULER_MISSES turns logging off" in " ".join(run("misses")[0].split())
