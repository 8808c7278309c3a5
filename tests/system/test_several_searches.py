"""Several problems searched at once on one pool: what is held together, and how often anything is built."""

import contextlib
import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from logged import LOGGED, LoggedProblem, builds, told
from operations import DOUBLE, GREEDY, REPEATED, DoubleProblem, GreedyProblem
from processes import started

from scheduler.core.errors import WorkerError
from scheduler.core.hardware import CPU, GIB
from scheduler.core.records import Entry, Environment, Failure, Measurement, Record, key_of
from scheduler.measure.bench_cache import BenchCache
from scheduler.measure.buffers import needed_buffer_bytes
from scheduler.measure.gpu import Gpu
from scheduler.measure.pool import Pool
from scheduler.measure.runner import InProcess, RunnerOptions, Task
from scheduler.search import jobs
from scheduler.search.job_queue import DeviceExecutor
from scheduler.search.reverify import reverify
from scheduler.search.task import SearchOptions
from scheduler.search.task import Task as JobTask
from scheduler.search.tuner import tune
from scheduler.store.store import Store

pytestmark = pytest.mark.slow

WORKERS = 2


@pytest.fixture(scope="module")
def pool():
    with Pool(
        Gpu(index="", uuid="searches", driver="", free_bytes=2 * GIB), RunnerOptions(workers=WORKERS, searches=2)
    ) as pool:
        yield started(pool)


def test_one_problem_is_taken_at_a_time_where_the_wall_clock_sees_what_compiles_beside(pool):
    assert pool.hardware.abilities.clock == "wall"
    with Pool(Gpu(index="", uuid="one search", driver="", free_bytes=2 * GIB), RunnerOptions(workers=1)) as one:
        assert one.searches == 1
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


def large():
    """A problem that leaves no memory for another in the pool."""
    problem = DoubleProblem(3 * 2**23)
    assert GIB < needed_buffer_bytes(problem, CPU) < 3 * GIB // 2
    return problem


def pids(pool):
    return {pool._measuring.pid, *pool._compilers.pids}


def test_a_job_of_two_searches_at_once_starts_no_process_and_traces_each_candidate_a_known_number_of_times(pool, log):
    before, problems = pids(pool), [logged(log, n) for n in (8, 16, 24)]

    def search(problem):
        with contextlib.closing(Store(":memory:")) as store:
            return tune(LOGGED, problem, budget=5, store=store, runner=pool)

    with ThreadPoolExecutor(pool.searches) as threads:
        records = list(threads.map(search, problems))
    assert all(record.tried == 5 and len(record.entries) >= 2 for record in records)
    assert pids(pool) == before
    built = builds(log)
    # Each calls Python: it is traced in a compile process, and again where it is measured. A finalist is traced twice
    # more, to see whether its program is the same each time.
    assert all(built[problem.n, str(tile)] in (2, 4) for problem in problems for tile in (1, 2, 4, 8))
    assert all(built[problem.n, "library"] == 1 for problem in problems)
    measuring = [line for line in told(log) if line[2] == "reference" and line[1] == pool._measuring.pid]
    assert len(measuring) <= 2 * len(problems), "its shape, and its jaxpr: others compile it"


def test_problems_beside_each_other_keep_what_was_compiled_for_them(pool, log):
    one, other = logged(log, 64), logged(log, 72)
    with pool.reserve(*what(one)), pool.reserve(*what(other)):
        for problem in (one, other):
            assert isinstance(pool.measure(task(problem)), Measurement)
        compiled = builds(log)
        for _ in range(3):
            for problem in (one, other):
                assert isinstance(pool.measure(task(problem), again=True), Measurement)
    assert builds(log) == compiled
    assert set(compiled.values()) == {2}


def test_records_verified_at_once_build_each_rival_once_in_processes_started_once(pool, log):
    before, problems = pids(pool), [logged(log, n) for n in (176, 184, 192)]
    records = [stored(problem) for problem in problems]
    verdicts = {verdict.record.key: verdict for verdict in reverify(records, operation=LOGGED, runner=pool)}
    assert verdicts.keys() == {record.key for record in records}
    assert all(verdict.state in ("holds", "slower") for verdict in verdicts.values())
    assert pids(pool) == before
    built = builds(log)
    assert all(count in (2, 4) for (_, name), count in built.items() if name != "library")  # confirmed: traced again
    assert all(built[problem.n, "library"] == 1 for problem in problems)


def test_a_job_that_processes_without_a_device_help_gives_the_same_records():
    def entries(options):
        tasks = [JobTask(REPEATED, DoubleProblem(n), SearchOptions(budget=5)) for n in (512, 1024)]
        results = list(
            jobs.run(tasks, [DeviceExecutor.for_operation(tasks[0].operation, options)], store=Store(":memory:"))
        )
        assert {result.state for result in results} == {"tuned"}
        return {
            (str(result.task), entry.backend, *entry.schedule.items())
            for result in results
            for entry in result.record.entries
        }

    assert entries(RunnerOptions(workers=2)) == entries(RunnerOptions())


def stored(problem, operation=LOGGED):
    """A record of it, of another day."""
    entries = [
        Entry(backend, 1, schedule, Measurement(1e-3, (1e-3,), "wall", "warm"), 1e-3)
        for backend, schedule in (("scripted", {"tile": 2}), ("scripted", {"tile": 4}), ("xla", {}))
    ]
    day = Environment("0.9.9", "0.9.9", "", "2025-01-01T00:00:00Z")
    key = key_of(operation, problem, CPU)
    return Record(key, tuple(entries), {"scripted": 1, "xla": 1}, day, budget=5, tried=5, space=5)


def wait_for(true):
    """Until another thread has done what it is about to do; whoever hangs is ended by the test's limit."""
    while not true():
        threading.Event().wait(0.01)


def test_what_does_not_fit_beside_what_is_held_waits_until_that_is_over_and_then_comes_before_the_next(pool, log):
    held, ended = threading.Event(), []

    def ask(problem, operation, name):
        with pool.reserve(operation, problem):
            held.set()
            ended.append(name)

    with ThreadPoolExecutor(2) as threads:
        with pool.reserve(DOUBLE, large()):
            before = pids(pool)
            first = threads.submit(ask, dataclasses.replace(large(), n=large().n + 8), DOUBLE, "large")
            wait_for(lambda: len(pool._waiting) == 1)
            second = threads.submit(ask, logged(log, 88), LOGGED, "small")
            wait_for(lambda: len(pool._waiting) == 2)
            assert not held.is_set()
            measured = pool.measure(Task(DOUBLE, large(), "xla", {}, 2))
            assert isinstance(measured, Measurement), "who is held goes on"
            assert pids(pool) == before
        first.result()
        second.result()
    assert ended == ["large", "small"]


def test_what_has_only_so_many_seconds_is_held_by_itself(pool, log):
    one, other = logged(log, 96), logged(log, 104)

    def measure():
        with pool.reserve(*what(other)):
            return pool.measure(task(other))

    with ThreadPoolExecutor(1) as threads:
        with pool.reserve(*what(one), exclusive=True):
            waiting = threads.submit(measure)
            wait_for(lambda: len(pool._waiting) == 1)
            assert what(other) not in pool._reserved
        assert isinstance(waiting.result(), Measurement)


def test_the_device_answers_the_problem_that_is_held_longest_first(pool, log):
    old, young = logged(log, 128), logged(log, 136)
    order = []

    def ask(problem):
        with pool._device(what(problem)):
            order.append(problem.n)

    with pool.reserve(*what(old)), pool.reserve(*what(young)), ThreadPoolExecutor(4) as threads:
        with pool._device(what(young)):
            asked = [threads.submit(ask, problem) for problem in (young, young, old, old)]
            wait_for(lambda: len(pool._requests) == 4)
        for each in asked:
            each.result()
    assert order == [old.n, old.n, young.n, young.n]


def test_what_lacks_memory_beside_another_problem_does_not_make_that_one_fail(pool, log):
    greedy, beside = GreedyProblem(), logged(log, 144)
    with pool.reserve(GREEDY, greedy), pool.reserve(*what(beside)), ThreadPoolExecutor(6) as threads:
        tasks = [Task(GREEDY, greedy, "scripted", {}, 2), *(task(beside, tile) for tile in (1, 2, 4, 8))]
        first, *others = threads.map(pool.measure, tasks)
        assert first.stage == "memory"
        assert all(isinstance(outcome, Measurement) for outcome in others)
        assert isinstance(pool.measure(task(beside, 2), again=True), Measurement)


def test_a_closed_pool_ends_those_that_wait_for_the_device(log):
    gpu = Gpu(index="", uuid="closing searches", driver="", free_bytes=GIB)
    with Pool(gpu, RunnerOptions(workers=1)) as pool, ThreadPoolExecutor(3) as threads:
        with pool._device(what(logged(log, 152))):
            asked = [threads.submit(pool.measure, library(logged(log, n))) for n in (152, 160, 168)]
            wait_for(lambda: len(pool._requests) == 3)
            pool.close()
        for each in asked:
            with pytest.raises(WorkerError, match="stopped"):
                each.result()


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
    benches = BenchCache(lambda name: made.append(name) or Bench())

    def damage(bench):
        benches._of("other").bench.damaged = True

    benches.ask("other", Bench.intact, others=("one",))
    benches.ask("one", damage, others=("other",))
    assert benches.ask("other", Bench.answer, others=("one",)) is None
    assert made == ["other", "one", "other"]


def test_a_process_keeps_what_is_under_way_and_nothing_else():
    made = []
    benches = BenchCache(lambda name: made.append(name) or Bench())
    for name, beside in (("a", ()), ("b", ("a",)), ("a", ("b",)), ("c", ("a",)), ("a", ("c",)), ("b", ("a", "c"))):
        benches.ask(name, Bench.intact, others=beside)
    assert made == ["a", "b", "c", "b"]
