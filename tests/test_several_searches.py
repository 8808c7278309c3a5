"""Several problems searched at once on one pool: what is held together, who is asked, how often anything is built."""

import contextlib
import dataclasses
import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from logged import LOGGED, OUT_OF_REACH, LoggedProblem, builds, told
from operations import CROWDED, DOUBLE, CrowdedProblem, DoubleProblem

from scheduler.core.errors import WorkerError
from scheduler.core.hardware import CPU, GIB
from scheduler.core.identity import key_of
from scheduler.core.records import Entry, Environment, Failure, Measurement, Record
from scheduler.measure.benches_at_hand import BenchesAtHand
from scheduler.measure.gpu import Gpu
from scheduler.measure.pool import AGREEING, AGREEING_COMPILATIONS, LIBRARY_COMPILATIONS, Pool, _Compiled
from scheduler.measure.rotation import needed_bytes
from scheduler.measure.runner import InProcess, RunnerOptions, Task
from scheduler.search import finalists
from scheduler.search.final_comparison import Rival
from scheduler.search.reverify import reverify
from scheduler.search.tuner import tune
from scheduler.store.store import Store

pytestmark = pytest.mark.one_jax

WORKERS = 3
FREE_BYTES = 18 * GIB // 5  # a share holds two small problems


@pytest.fixture(scope="module")
def pool():
    with Pool(
        Gpu(index="", uuid="searches", driver="", free_bytes=FREE_BYTES), RunnerOptions(workers=WORKERS, searches=2)
    ) as pool:
        pool._division.settle()
        yield pool


def test_one_problem_is_taken_at_a_time_where_the_wall_clock_sees_what_compiles_beside():
    with Pool(Gpu(index="", uuid="one search", driver="", free_bytes=2 * GIB), RunnerOptions(workers=2)) as pool:
        assert (pool.searches, pool.hardware.abilities.clock) == (1, "wall")
    assert InProcess().searches == 1


@pytest.fixture
def log(tmp_path):
    (tmp_path / "log").touch()
    return tmp_path / "log"


def logged(log, n):
    return LoggedProblem(n, str(log))


def task(problem, tile=1):
    return Task(LOGGED, problem, "scripted", {"tile": tile}, 2)


def library(problem):
    return Task(LOGGED, problem, "xla", {}, 2)


def what(problem):
    return LOGGED, problem, "cold"


def large(pool):
    """A problem that not all workers of `pool` can hold at once."""
    problem = DoubleProblem(2**24)
    assert pool._shares.bytes(WORKERS) < needed_bytes(problem, CPU) < pool._shares.bytes(1)
    return problem


def pids(pool):
    return {worker.pid for worker in pool._workers}


def test_a_job_of_two_searches_at_once_builds_each_candidate_once_in_processes_started_once(pool, log):
    before, problems = pids(pool), [logged(log, n) for n in (8, 16, 24)]

    def search(problem):
        with contextlib.closing(Store(":memory:")) as store:
            return tune(LOGGED, problem, budget=5, store=store, runner=pool)

    with ThreadPoolExecutor(pool.searches) as threads:
        records = list(threads.map(search, problems))
    assert all(record.tried == 5 and len(record.entries) >= 2 for record in records)
    assert pids(pool) == before
    built = builds(log)
    # A finalist is traced twice more, to see whether its program is the same each time; it is compiled once.
    assert all(built[problem.n, str(tile)] in (1, 3) for problem in problems for tile in (1, 2, 4, 8))
    assert all(1 <= built[problem.n, "library"] <= WORKERS for problem in problems)
    assert len([line for line in told(log) if line[2] == "reference"]) <= WORKERS * len(problems)


def test_problems_beside_each_other_keep_what_was_compiled_for_them(pool, log):
    one, other = logged(log, 64), logged(log, 72)
    with pool.holding(*what(one)), pool.holding(*what(other)):
        for problem in (one, other):
            assert isinstance(pool.measure(task(problem)), Measurement)
        for _ in range(3):
            for problem in (one, other):
                assert isinstance(pool.measure(task(problem), again=True), Measurement)
    assert set(builds(log).values()) == {1}


def test_records_verified_at_once_build_each_rival_once_in_processes_started_once(pool, log):
    before, problems = pids(pool), [logged(log, n) for n in (176, 184, 192)]
    records = [stored(problem) for problem in problems]
    verdicts = {verdict.record.key: verdict for verdict in reverify(records, operation=LOGGED, runner=pool)}
    assert verdicts.keys() == {record.key for record in records}
    assert all(verdict.state in ("holds", "slower") for verdict in verdicts.values())
    assert pids(pool) == before
    built = builds(log)
    assert all(count in (1, 3) for (_, name), count in built.items() if name != "library")  # confirmed: traced again
    assert all(1 <= built[problem.n, "library"] <= WORKERS for problem in problems)


def test_a_library_that_is_out_of_reach_is_compiled_once_for_a_record_that_is_verified(pool, log):
    problem = logged(log, 200)
    (verdict,) = reverify([stored(problem, OUT_OF_REACH)], operation=OUT_OF_REACH, runner=pool)
    library = next(rival for rival in verdict.rivals if rival.backend == "xla")
    assert library.now.median_s > 1.5 * verdict.now.median_s
    assert builds(log)[problem.n, "library"] == 1


def test_a_library_is_compiled_in_further_processes_while_it_is_confirmed_and_by_none_in_the_run_off(pool, log):
    problem = logged(log, 208)
    with pool.holding(*what(problem)):
        assert isinstance(pool.measure(library(problem)), Measurement)
        assert builds(log)[problem.n, "library"] == 1
        assert pool.confirm(library(problem)) is None
        compiled = builds(log)[problem.n, "library"]
        assert compiled == min(WORKERS, AGREEING_COMPILATIONS)
        for _ in range(4):
            assert isinstance(pool.measure(library(problem), again=True), Measurement)
        assert builds(log)[problem.n, "library"] == compiled


def stored(problem, operation=LOGGED):
    """A record of it, of another day."""
    entries = [
        Entry(backend, 1, schedule, Measurement(1e-3, (1e-3,), "wall", "warm"), 1e-3)
        for backend, schedule in (("scripted", {"tile": 2}), ("scripted", {"tile": 4}), ("xla", {}))
    ]
    day = Environment("0.9.9", "0.9.9", "", "2025-01-01T00:00:00Z")
    key = key_of(operation, problem, CPU)
    return Record(key, tuple(entries), {"scripted": 1, "xla": 1}, day, budget=5, tried=5, space=5)


def test_what_does_not_fit_beside_what_is_held_waits_until_that_is_over_and_then_comes_before_the_next(pool, log):
    held, ended = threading.Event(), []

    def ask(problem, operation, name):
        with pool.holding(operation, problem):
            held.set()
            ended.append(name)

    with ThreadPoolExecutor(2) as threads:
        with pool.holding(LOGGED, logged(log, 80)):
            before = pids(pool)
            first = threads.submit(ask, large(pool), DOUBLE, "large")
            wait_for(lambda: len(pool._division._queue) == 1)
            second = threads.submit(ask, logged(log, 88), LOGGED, "small")
            wait_for(lambda: len(pool._division._queue) == 2)
            assert not held.is_set()
            assert isinstance(pool.measure(task(logged(log, 80))), Measurement), "who is held goes on"
            assert pids(pool) == before
        first.result()
        second.result()
    assert ended == ["large", "small"]


def wait_for(true):
    """Until another thread has done what it is about to do; whoever hangs is ended by the test's limit."""
    while not true():
        threading.Event().wait(0.01)


def test_what_has_only_so_many_seconds_is_held_by_itself(pool, log):
    one, other = logged(log, 96), logged(log, 104)
    with ThreadPoolExecutor(1) as threads:
        with pool.holding(*what(one), to_itself=True):
            waiting = threads.submit(pool.measure, task(other))
            wait_for(lambda: len(pool._division._queue) == 1)
            assert what(other) not in pool._division.held()
        assert isinstance(waiting.result(), Measurement)


def test_a_finalists_worker_compiles_nothing_of_another_problem_until_its_own_is_over(pool, log):
    timed, others = logged(log, 112), logged(log, 120)
    with pool.holding(*what(timed)):
        assert isinstance(pool.measure(task(timed)), Measurement)
        assert isinstance(pool.measure(task(timed), again=True), Measurement)
        (worker,) = pool._compiled.holders(task(timed))
        own = worker.pid
        with pool.holding(*what(others)), ThreadPoolExecutor(4) as threads:
            tasks = [task(others, tile) for tile in (1, 2, 4, 8)]
            assert all(isinstance(outcome, Measurement) for outcome in threads.map(pool.measure, tasks))
            assert all(pid != own for n, pid, _ in told(log) if n == others.n)
    with ThreadPoolExecutor(WORKERS) as threads, pool.holding(*what(others)):
        assert pool._division._claims == {}


def test_to_confirm_a_finalist_claims_no_worker(pool, log):
    problem = logged(log, 121)
    with pool.holding(*what(problem)):
        for asked in (task(problem), library(problem)):
            assert isinstance(pool.measure(asked), Measurement)
            assert pool.confirm(asked) is None
        assert pool._division._claims == {}
        assert isinstance(pool.measure(task(problem), again=True), Measurement)
        assert pool._division._claims == {pool._compiled.holders(task(problem))[0]: [what(problem)]}


def test_who_is_claimed_by_two_problems_is_the_seconds_as_soon_as_the_first_is_over(pool, log):
    first, second = logged(log, 123), logged(log, 125)
    division = pool._division
    with pool.holding(*what(second)):
        with pool.holding(*what(first)):
            for problem in (first, second):
                division.claim(what(problem), pool._workers)
            assert isinstance(pool.measure(task(first)), Measurement)
            with ThreadPoolExecutor(1) as threads:
                waiting = threads.submit(pool.measure, task(second))
                wait_for(lambda: len(division._waiting) == 1)
                assert isinstance(pool.measure(task(first, 2)), Measurement)
                assert not waiting.done()
                division.release(what(first))
                assert isinstance(waiting.result(), Measurement)
                division.hold(what(first))
        assert division._claims == {worker: [what(second)] for worker in pool._workers}
    assert division._claims == {}


def test_a_run_off_claims_all_who_have_compiled_the_library_at_once(pool, log):
    problem = logged(log, 122)
    with pool.holding(*what(problem)):
        assert isinstance(pool.measure(library(problem)), Measurement)
        assert pool.confirm(library(problem)) is None
        compiled = pool._compiled.holders(library(problem))
        assert len(compiled) > 1
        assert isinstance(pool.measure(library(problem), again=True), Measurement)
        assert pool._division._claims == {worker: [what(problem)] for worker in compiled}


def test_all_that_race_are_asked_at_once_before_the_first_round_where_other_problems_may_be_at_their_workers(pool):
    everybody, asked = threading.Barrier(3), []

    def time_again(rival):
        if len(asked) < 3:
            asked.append(rival.label)
            everybody.wait(30)
        return Measurement(1e-3, (1e-3,) * 3, "cupti", "cold")

    ended = finalists.run_off(pool, [Rival(label, False, 0) for label in "abc"], time_again, seed=0)
    assert sorted(asked) == ["a", "b", "c"]
    assert ended.failures == {}


def test_each_problem_has_its_part_of_the_workers_and_the_oldest_what_is_left(pool, log):
    old, young = logged(log, 128), logged(log, 136)
    division = pool._division
    with pool.holding(*what(old)), pool.holding(*what(young)), ThreadPoolExecutor(8) as threads:
        with contextlib.ExitStack() as taken:
            for _ in range(WORKERS):
                taken.enter_context(division.worker(what(old)))
            asked = [threads.submit(pool.measure, task(old, tile)) for tile in (1, 2, 4, 8)]
            wait_for(lambda: len(division._waiting) == 4)
            asked.append(threads.submit(pool.measure, task(young)))
            wait_for(lambda: len(division._waiting) == 5)
        assert all(isinstance(each.result(), Measurement) for each in asked)
    order = [n for n, _, tile in told(log) if tile != "reference"]
    assert young.n in order[:WORKERS], "though it came last"
    assert order.count(old.n) == 4


def test_a_worker_takes_what_it_has_a_bench_of_before_what_is_older(pool, log):
    old, young = logged(log, 137), logged(log, 138)
    division = pool._division
    with pool.holding(*what(old)), pool.holding(*what(young)), contextlib.ExitStack() as taken:
        with division.worker(what(young)) as (own, _):
            others = [taken.enter_context(division.worker(what(old))) for _ in range(WORKERS - 1)]
        order = []

        def took(problem):
            with division.worker(what(problem)) as (worker, _):
                order.append(problem)
                return worker

        with ThreadPoolExecutor(2) as threads, division.worker(what(young)) as (again, _):
            assert again is own
            elder = threads.submit(took, old)
            wait_for(lambda: len(division._waiting) == 1)
            asked = [elder, threads.submit(took, young)]
            wait_for(lambda: len(division._waiting) == 2)
            division._busy[others[0][0]] = what(young)  # both have less than their part
        assert [each.result() for each in asked] == [own, own]
        assert order == [young, old]


def test_what_lacks_memory_beside_another_problem_does_not_make_that_one_fail(pool, log, tmp_path):
    (tmp_path / "place").mkdir()
    crowded = CrowdedProblem(place=str(tmp_path / "place"))
    beside = logged(log, 144)
    with pool.holding(CROWDED, crowded), pool.holding(*what(beside)), ThreadPoolExecutor(6) as threads:
        greedy = [Task(CROWDED, crowded, "scripted", {}, 2)] * 2
        outcomes = list(threads.map(pool.measure, [*greedy, *(task(beside, tile) for tile in (1, 2, 4, 8))]))
        assert all(isinstance(outcome, Measurement) for outcome in outcomes)
        assert isinstance(pool.measure(task(beside, 2), again=True), Measurement)


def test_a_closed_pool_ends_those_that_wait_to_be_held_or_for_a_worker(log):
    gpu = Gpu(index="", uuid="closing searches", driver="", free_bytes=GIB)
    with Pool(gpu, RunnerOptions(workers=1)) as pool, ThreadPoolExecutor(4) as threads:
        with pool.holding(*what(logged(log, 152)), to_itself=True), pool._division.worker(what(logged(log, 152))):
            asked = [threads.submit(pool.measure, task(logged(log, n))) for n in (152, 152, 160, 168)]
            wait_for(lambda: len(pool._division._queue) == 2 and len(pool._division._waiting) == 2)
            pool.close()
        for each in asked:
            with pytest.raises(WorkerError, match="stopped"):
                each.result()


class Scripted:
    """A library's times by process, in the order in which these compile it."""

    def __init__(self, problem):
        self.compiled, self.task = _Compiled(), library(problem)

    def compile(self, *times_s, programs=""):
        for number, (time_s, program) in enumerate(zip(times_s, programs or [""] * len(times_s), strict=True)):
            self.compiled.ran(self.task, number, time_s, program)
        return self.compiled.want_more(self.task)


def test_a_library_is_compiled_no_further_where_the_first_processes_agree(log):
    agree = [1e-3, 1e-3 * (1 + AGREEING / 2), 1e-3 * (1 - AGREEING / 3)]
    differ = [1e-3, 1e-3, 1.03e-3, 1e-3, 1.03e-3]
    assert len(agree) == AGREEING_COMPILATIONS
    assert Scripted(logged(log, 8)).compile(*agree[:-1])
    assert not Scripted(logged(log, 8)).compile(*agree)
    for count in range(1, LIBRARY_COMPILATIONS):
        assert Scripted(logged(log, 8)).compile(*differ[:count])
    assert not Scripted(logged(log, 8)).compile(*differ)
    noisy = [1e-3, 1.03e-3, 1e-3]
    assert not Scripted(logged(log, 8)).compile(*noisy, programs="aaa"), "one program, whose time is hard to tell"
    assert Scripted(logged(log, 8)).compile(*noisy, programs="aab")


def test_a_library_that_takes_as_long_as_it_is_known_to_take_is_compiled_once(log):
    one = Scripted(logged(log, 8))
    one.task = dataclasses.replace(one.task, library_s=1e-3)
    assert not one.compile(1e-3 * (1 + AGREEING / 2))
    other = Scripted(logged(log, 8))
    other.task = dataclasses.replace(other.task, library_s=1e-3)
    assert other.compile(1e-3 * (1 + 2 * AGREEING))


def test_a_librarys_further_processes_compile_it_at_the_same_time_until_those_that_are_at_it_may_agree(log):
    scripted, workers = Scripted(logged(log, 8)), range(LIBRARY_COMPILATIONS + 1)
    further = functools.partial(scripted.compiled.further, scripted.task, workers)
    with further() as nobody:
        assert nobody is None, "it is not known to run"
    assert scripted.compile(1e-3)
    with further() as one, further() as other:
        assert (one, other) == (1, 2)
        with further() as nobody:
            assert nobody is None
        scripted.compiled.ran(scripted.task, one, 1.1e-3, "")
        scripted.compiled.ran(scripted.task, other, 1.2e-3, "")
    with further() as more:
        assert more == 3
        with further() as nobody:
            assert nobody is None
        scripted.compiled.ran(scripted.task, more, 1e-3, "")
    with further() as last:
        assert last == 4
        scripted.compiled.ran(scripted.task, last, 1e-3, "")
    with further() as nobody:
        assert nobody is None
    with scripted.compiled.further(task(logged(log, 8)), workers) as nobody:
        assert nobody is None, "who is no library is compiled once"


class Bench:
    """Wrong where its operands are damaged, as any candidate may damage them."""

    def __init__(self):
        self.damaged = False

    def intact(self):
        return not self.damaged

    def answer(self):
        return Failure("verify", "off") if self.damaged else None


def test_an_innocent_candidate_is_not_blamed_for_what_one_of_another_problem_damaged():
    made = []
    benches = BenchesAtHand(lambda name: made.append(name) or Bench())

    def damage(bench):
        benches._of("other").bench.damaged = True

    benches.ask("other", Bench.intact, beside=("one",))
    benches.ask("one", damage, beside=("other",))
    assert benches.ask("other", Bench.answer, beside=("one",)) is None
    assert made == ["other", "one", "other"]


def test_a_process_keeps_what_is_under_way_and_nothing_else():
    made = []
    benches = BenchesAtHand(lambda name: made.append(name) or Bench())
    for name, beside in (("a", ()), ("b", ("a",)), ("a", ("b",)), ("c", ("a",)), ("a", ("c",)), ("b", ("a", "c"))):
        benches.ask(name, Bench.intact, beside=beside)
    assert made == ["a", "b", "c", "b"]
