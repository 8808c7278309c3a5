"""A job at several places: each problem is tuned once, at one of them, whatever becomes of the others."""

import contextlib
import dataclasses
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
from operations import DOUBLE, DoubleProblem
from rehearsal import Rehearsal

from scheduler.core import progress
from scheduler.core.errors import CandidateFailed, DeviceLost, UnknownChip, WorkerError
from scheduler.core.hardware import CPU
from scheduler.core.progress import JobPace, Progress
from scheduler.core.records import Failure
from scheduler.measure import compilers
from scheduler.measure.pool import start_runner
from scheduler.measure.runner import RunnerOptions
from scheduler.search import job_queue, jobs
from scheduler.search.job_queue import DeviceExecutor, Queue, Queued, expected_s
from scheduler.search.task import Malformed, SearchOptions, Task
from scheduler.store.store import Store
from search_spaces.matmul import MATMUL, MatmulProblem

pytestmark = pytest.mark.slow


class Noting(Rehearsal):
    """Notes whose candidates it measured; the device is lost over the problems `fatal`."""

    def __init__(self, *fatal):
        super().__init__()
        self.problems, self.fatal, self.closed = set(), set(fatal), False

    def measure(self, task, *, again=False):
        self.problems.add(task.problem.n)
        if task.problem.n in self.fatal:
            raise DeviceLost(f"it fell off the bus over {task.problem.n}")
        return super().measure(task, again=again)

    def close(self):
        self.closed = True


class Meeting(Noting):
    """Its first trial waits until all others that share the barrier have begun one, too."""

    def __init__(self, barrier, *fatal):
        super().__init__(*fatal)
        self.barrier = barrier

    def measure(self, task, *, again=False):
        if not self.problems:
            self.problems.add(task.problem.n)
            self.barrier.wait(60)
        return super().measure(task, again=again)


def place(*runners, name="A"):
    """A device whose runner is each of these in turn, as it is started again; it starts no more often."""
    left = list(runners)

    def start():
        if not left:
            raise WorkerError("it does not answer")
        started = left.pop(0)
        if isinstance(started, Exception):
            raise started
        return started

    return DeviceExecutor(start, name)


def tasks(*sizes, budget=3, **options):
    return [Task(DOUBLE, DoubleProblem(n), SearchOptions(budget, **options)) for n in sizes]


def run(of, *where, store=None, **how):
    return list(jobs.run(of, where, store=store or Store(":memory:"), **how))


def states(results):
    return {result.task.problem.n: result.state for result in results}


def test_each_problem_is_tuned_once_from_its_first_trial_to_its_last_at_one_of_the_places(tmp_path):
    barrier = threading.Barrier(3)
    runners = [Meeting(barrier) for _ in range(3)]
    store = Store(tmp_path / "cache.db")
    results = run(tasks(*range(1, 13)), *(place(runner, name=str(i)) for i, runner in enumerate(runners)), store=store)
    assert states(results) == dict.fromkeys(range(1, 13), "tuned")
    assert sorted(n for runner in runners for n in runner.problems) == list(range(1, 13))
    assert all(runner.closed for runner in runners)
    assert {result.record.key for result in results} == {record.key for record in store.records()}
    assert all(len(store.trials(result.record.key)) == result.record.tried == 3 for result in results)


def test_the_same_problem_twice_in_a_job_is_searched_once(tmp_path):
    runners = Noting(), Noting()
    results = run(tasks(8, 8), *map(place, runners), store=Store(tmp_path / "cache.db"))
    assert sorted(result.state for result in results) == ["known", "tuned"]
    assert [runner.problems for runner in runners].count({8}) == 1


def test_what_cannot_be_read_and_what_is_known_comes_first():
    store = Store(":memory:")
    run(tasks(4, 8), place(Noting()), store=store)
    results = run(
        [*tasks(1, 4), Malformed("double n=x", "no"), *tasks(8)], place(Noting()), place(Noting()), store=store
    )
    assert [result.state for result in results] == ["failed", "known", "known", "tuned"]


def test_one_place_takes_problems_as_they_are_written_and_several_the_longest_first():
    def order(count, **how):
        began = []
        run(
            [*tasks(1, budget=2), *tasks(2, budget=9), *tasks(4, budget=5)],
            *(place(Noting()) for _ in range(count)),
            progress=lambda step: began.append(step.task.options.budget) if step.search.done == 0 else None,
            **how,
        )
        return began

    assert order(1) == [2, 9, 5]
    assert set(order(2)[:2]) == {9, 5}
    assert set(order(2, in_order=True)[:2]) == {2, 9}


def test_a_longer_search_is_expected_of_more_trials_and_of_larger_problems_and_none_of_the_library_alone():
    def expected(problem, **how):
        return expected_s(Task(MATMUL, problem, SearchOptions(**how)), CPU)

    small, large = MatmulProblem(64, 64, 64, dtype="float32"), MatmulProblem(2048, 2048, 2048, dtype="float32")
    assert expected(small, budget=64) > expected(small, budget=8)
    assert expected(large) > expected(small)
    assert expected(large, seconds=1.0) == 1.0
    assert expected(small, backends=frozenset({"xla"})) < expected(small, budget=8)


def test_a_place_that_is_lost_costs_its_problem_nothing_but_time_and_is_used_no_more():
    barrier = threading.Barrier(2)
    broken, whole = Meeting(barrier, *range(100)), Meeting(barrier)
    with pytest.warns(RuntimeWarning, match="A is no longer used: it does not answer") as warned:
        results = run(tasks(*range(1, 6)), place(broken), place(whole, name="B"))
    assert states(results) == dict.fromkeys(range(1, 6), "tuned")
    assert len(broken.problems) == len(warned) == 1
    assert broken.closed
    assert whole.problems == set(range(1, 6))


def test_a_place_that_starts_again_gets_a_second_chance_and_no_third():
    second = Noting(2)
    with pytest.warns(RuntimeWarning, match="A is no longer used: it fell off the bus over 2"):
        results = run(tasks(1, 2, 4), place(Noting(1), second, Noting()))
    assert states(results) == {1: "tuned", 2: "failed", 4: "failed"}
    assert "no executor is left to search it (A: it fell off the bus over 2)" in results[-1].reason


def test_a_problem_over_which_two_places_are_lost_has_failed_and_the_others_go_on():
    first, second = place(Noting(8), Noting(8)), place(Noting(8), Noting(8), name="B")
    results = run([*tasks(8, budget=9), *tasks(1, 2, 4)], first, second)
    assert states(results) == {8: "failed", 1: "tuned", 2: "tuned", 4: "tuned"}
    (failed,) = (result for result in results if result.state == "failed")
    assert "was lost with its search, and then" in failed.reason
    assert {"A", "B"} <= set(failed.reason)


def test_a_single_place_that_starts_again_tries_the_problem_once_more():
    results = run(tasks(8, 4), place(Noting(8), Noting()))
    assert states(results) == {8: "tuned", 4: "tuned"}


@pytest.mark.parametrize("searches", [2, 5])
def test_a_lane_that_has_nothing_to_do_leaves_the_problem_of_a_lost_place_until_that_has_started_again(searches):
    first = Noting(8)
    first.searches = searches
    results = run(tasks(8), place(first, Noting()))
    assert states(results) == {8: "tuned"}


def test_all_searches_at_a_place_that_is_lost_are_made_again():
    class Two(Noting):
        searches = 2

        def __init__(self):
            super().__init__()
            self.both, self.ended = threading.Barrier(2), threading.Event()

        def measure(self, task, *, again=False):
            self.both.wait(60)
            if task.problem.n == 1:
                raise DeviceLost("it fell off the bus")
            assert self.ended.wait(60)
            raise WorkerError("the worker processes were stopped")

        def close(self):
            self.ended.set()

    results = run(tasks(1, 2, 4), place(Two(), Noting()), in_order=True)
    assert states(results) == {1: "tuned", 2: "tuned", 4: "tuned"}


def test_a_place_that_does_not_start_leaves_the_problems_to_the_others():
    with pytest.warns(RuntimeWarning, match="A is no longer used: no memory"):
        results = run(tasks(1, 2), place(WorkerError("no memory")), place(Noting(), name="B"))
    assert states(results) == {1: "tuned", 2: "tuned"}


def test_a_job_without_a_place_raises_why():
    with pytest.raises(UnknownChip, match="never heard of it"):
        run(tasks(1), place(UnknownChip("never heard of it")))
    with (
        pytest.warns(RuntimeWarning, match="is no longer used"),
        pytest.raises(WorkerError, match=r"[AB]: no [12]; [AB]: no [12]"),
    ):
        run(tasks(1), place(WorkerError("no 1")), place(WorkerError("no 2"), name="B"))


def test_a_place_of_another_chip_is_refused():
    class Other(Noting):
        hardware = dataclasses.replace(CPU, kind="another", cores=7)

    with pytest.warns(RuntimeWarning, match="is no longer used: it is .*, and the job is tuned for"):
        results = run(tasks(1, 2, 4), place(Noting()), place(Other(), name="B"))
    assert states(results) == {1: "tuned", 2: "tuned", 4: "tuned"}
    assert len({result.record.key.hardware for result in results}) == 1


def test_a_search_whose_time_is_over_is_not_begun_and_has_no_result():
    begun = []

    def bound(task):
        begun.append(task)
        options = dataclasses.replace(task.options, budget=2)
        return dataclasses.replace(task, options=options) if len(begun) < 3 else None

    results = run(tasks(1, 2, 4, 8), place(Noting()), bound=bound)
    assert [(result.task.options.budget, result.record.tried) for result in results] == [(3, 2), (3, 2)]
    assert len(begun) == 4


def test_an_error_of_one_place_ends_the_job_at_all():
    class Wrong(Meeting):
        def measure(self, task, *, again=False):
            super().measure(task, again=again)
            raise ZeroDivisionError("a defect of this program")

    barrier = threading.Barrier(2)
    runners = Wrong(barrier), Meeting(barrier)
    with pytest.raises(ZeroDivisionError):
        run(tasks(*range(1, 50)), *map(place, runners))
    assert all(runner.closed for runner in runners)
    assert len(runners[1].problems) < 48


def test_the_first_failure_ends_a_job_that_wants_it():
    class Failing(Noting):
        def measure(self, task, *, again=False):
            return Failure("verify", "wrong") if task.backend == "scripted" else super().measure(task, again=again)

    with pytest.raises(CandidateFailed, match="wrong"):
        run(tasks(1, 2, 4, first_error=True), place(Failing()))


def test_results_that_nobody_waits_for_end_the_job():
    runner = Noting()
    several = jobs.run(tasks(*range(1, 50)), [place(runner)], store=Store(":memory:"))
    assert next(several).state == "tuned"
    several.close()
    assert runner.closed
    assert len(runner.problems) < 49


def test_a_device_that_is_closed_while_it_starts_leaves_no_runner():
    starting, closed, runner = threading.Event(), threading.Event(), Noting()

    def start():
        starting.set()
        assert closed.wait(60)
        return runner

    device = DeviceExecutor(start)

    def close():
        assert starting.wait(60)
        device.close()
        closed.set()

    thread = threading.Thread(target=close)
    thread.start()
    with pytest.raises(WorkerError, match="was closed"):
        device.open()
    thread.join()
    assert runner.closed


def test_gpus_share_compile_processes_and_keep_what_was_asked_for(monkeypatch):
    started = []

    def start(operation, options, compilers=None):
        started.append((options.device, options.workers, compilers and compilers.count, compilers))
        raise WorkerError("there is none")

    monkeypatch.setattr(job_queue, "start_runner", start)
    monkeypatch.setattr(compilers, "cores", lambda: 64)
    monkeypatch.setattr(compilers, "PROCESS_BYTES", 1)
    for indices, options in (([0, 2, 3, 5], None), ([1], None), ([0, 1], RunnerOptions(workers=3, run_timeout_s=9))):
        devices = job_queue.gpu_executors(DOUBLE, indices, options)
        for device in devices:
            with pytest.raises(WorkerError):
                device.open()
        for device in devices:
            device.close()
    assert [one[:3] for one in started] == [
        (0, 15, 60), (2, 15, 60), (3, 15, 60), (5, 15, 60), (1, None, None), (0, 3, 6), (1, 3, 6)
    ]  # fmt: skip
    assert len({id(one[3]) for one in started[:4]}) == 1
    assert started[0][3]._closed, "once all of its users are closed"


def test_worker_processes_of_two_places_tune_a_job_together(tmp_path):
    both, seen = threading.Barrier(2), set()

    def start():
        runner = start_runner(DOUBLE, RunnerOptions(workers=1))
        both.wait(120)
        return runner

    two = [DeviceExecutor(start, name) for name in "AB"]
    store = Store(tmp_path / "cache.db")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = run(tasks(8, 16, 24, 32), *two, store=store, progress=lambda step: seen.add(step.executor))
    assert states(results) == dict.fromkeys((8, 16, 24, 32), "tuned")
    assert seen == {"A", "B"}


# What is next


def queued(name, **more):
    return Queued(Task(DOUBLE, DoubleProblem(name)), 1.0, "", **more)


def opened(places, *where):
    """A queue for so many places, of which these have opened, and these."""
    queue = Queue(places)
    for one in where:
        queue.opened(one)
    return queue, *where


def test_what_another_process_is_at_comes_after_all_others():
    queue, here = opened(1, place())
    one, two = queued(1), queued(2)
    queue.put([one, two])
    assert queue.take(here) is one
    queue.defer(one, here)
    assert queue.take(here) is two
    queue.done(here)
    assert queue.take(here) is one  # once it is time to ask again
    assert one.busy == 1
    queue.done(here)
    assert queue.take(here) is None


def test_what_was_lost_at_a_place_is_left_to_another_as_long_as_there_is_one():
    queue, here, there = opened(2, place(), place())
    one, two = queued(1), queued(2)
    queue.put([one, two])
    queue.requeue_lost(queue.take(here), here)
    assert queue.take(here) is None, "it is not there"
    queue.opened(here)
    assert queue.take(here) is two
    assert queue.take(there) is one
    queue.requeue_lost(one, there)
    assert queue.remove_executor(there) == []
    assert queue.take(here) is one
    queue.requeue_lost(one, here)
    queue.done(here)
    assert queue.remove_executor(here) == [one]


def open_place(searches=2):
    one = place()
    one.searches = searches
    return one


def taken_at_once(queue, where):
    """What it takes without waiting for anybody; None where it leaves the next one to others."""
    with queue._changed:
        found = queue._next(queue._states[id(where)])
    return found if found is None else queue.take(where)


def test_a_place_takes_one_while_others_start_and_leaves_the_last_ones_to_those_that_have_fewer():
    queue, here = opened(2, open_place())
    there = open_place()
    each = [queued(number) for number in range(1, 6)]
    queue.put(each)
    assert queue.take(here) is each[0]
    assert taken_at_once(queue, here) is None, "the other one is starting"
    queue.opened(there)
    assert queue.take(there) is each[1]
    assert taken_at_once(queue, here) is each[2]
    assert taken_at_once(queue, there) is each[3]
    queue.done(there)
    queue.done(there)
    assert taken_at_once(queue, here) is None, "the last one is for who has none"
    assert taken_at_once(queue, there) is each[4]


def test_who_does_not_start_is_waited_for_so_long_and_no_longer(monkeypatch):
    queue, here = opened(2, open_place())
    each = [queued(1), queued(2)]
    queue.put(each)
    assert queue.take(here) is each[0]
    assert taken_at_once(queue, here) is None
    monkeypatch.setattr(job_queue, "STARTING_S", 0.0)
    assert taken_at_once(queue, here) is each[1]


class Shared(Noting):
    """Two problems are searched there at once; to hold the first one takes until `go`."""

    searches = 2

    def __init__(self):
        super().__init__()
        self.current, self.first, self.go = [], threading.Event(), threading.Event()

    @contextlib.contextmanager
    def reserve(self, operation, problem, l2="cold", *, exclusive=False):
        self.current.append(problem.n)
        self.first.set()
        if len(self.current) == 1:
            assert self.go.wait(60)
        yield


def test_lanes_of_a_place_take_problems_one_after_the_other_as_these_are_held():
    shared = Shared()
    with ThreadPoolExecutor(1) as threads:
        results = threads.submit(run, tasks(8, 16), place(shared), in_order=True)
        shared.first.wait()
        time.sleep(0.5)  # in which a second that does not wait is held; however slow a host is, one that waits is not
        assert shared.current == [8], "the second would come before the first"
        shared.go.set()
        assert [result.state for result in results.result()] == ["tuned", "tuned"]
    assert shared.current == [8, 16]


def test_nothing_is_left_to_a_place_whose_lanes_are_all_at_work():
    queue, here, there = opened(2, open_place(3), open_place(1))
    each = [queued(number) for number in range(4)]
    queue.put(each)
    assert [queue.take(here), queue.take(there), queue.take(here)] == each[:3]
    assert taken_at_once(queue, here) is each[3]


def test_an_end_wakes_those_who_wait():
    queue, here = opened(1, place())
    queue.put([queued(1)])
    assert queue.take(here) is not None
    taken = []
    thread = threading.Thread(target=lambda: taken.append(queue.take(here)))
    thread.start()
    queue.end()
    thread.join()
    assert taken == [None]


# How long it takes


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 0.0

    monkeypatch.setattr(progress.time, "perf_counter", lambda: Clock.now)
    return Clock


def at(done, budget=10, eta_s=1.0):
    return Progress(done, budget, None, None, 0.0, eta_s)


def test_the_time_left_is_the_work_left_at_the_rate_so_far_over_all_places(clock):
    pace = JobPace(9)
    for which in range(8):
        pace.expect(which, 5.0)
    pace.lanes = 2
    pace.end("known", searched=False)
    pace.begin(0)
    pace.begin(1)
    assert pace.now().eta_s is None
    clock.now = 10.0
    pace.end(0, searched=True)
    pace.end(1, searched=True)
    assert dataclasses.astuple(pace.now()) == (3, 9, 10.0, 30.0)  # six that take 10 s each, by two
    pace.begin(2)
    clock.now = 15.0
    pace.step(2, at(10))  # it has its final comparison before it
    assert pace.now().eta_s == pytest.approx(27.5)
    pace.put_back(2)
    assert pace.now().eta_s == pytest.approx(30.0)
    for which in range(2, 8):
        pace.end(which, searched=False)
    assert pace.now().eta_s == 0


def test_the_time_left_is_no_less_than_what_the_longest_search_needs_alone(clock):
    pace = JobPace(2)
    pace.lanes = 8
    pace.expect("long", 100.0)
    pace.expect("short", 1.0)
    pace.begin("long")
    pace.begin("short")
    clock.now = 10.0
    pace.end("short", searched=True)
    pace.step("long", at(2))
    assert pace.now().eta_s == pytest.approx(90 * 20 / 11)


def test_nothing_is_told_from_the_first_trials(clock):
    pace = JobPace(1)
    pace.expect(0, 1.0)
    pace.begin(0)
    clock.now = 1.0
    pace.step(0, at(1, eta_s=None))
    assert pace.now().eta_s is None
    pace.step(0, at(10))
    assert pace.now().eta_s == pytest.approx(1.0)
