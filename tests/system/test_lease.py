"""Several processes, one cache: a problem that two are asked to tune is tuned once, and no record is lost."""

import dataclasses
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import values
from operations import DOUBLE, DoubleProblem
from rehearsal import Rehearsal

from scheduler.search.tuner import tune
from scheduler.store import lease
from scheduler.store.lease import LeaseWatcher, leased, leased_if_free
from scheduler.store.store import Store

pytestmark = pytest.mark.slow


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache.db"


class Clock:
    """A clock that passes only where somebody sleeps, and a time of day that may be wrong."""

    now, wrong_by = 1e9, 0.0

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "time", lambda: clock.now + clock.wrong_by)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    return clock


@pytest.fixture
def waiting():
    """Set as soon as somebody says that they wait for another's record."""
    event = threading.Event()

    class Listener(logging.Handler):
        def emit(self, record):
            if "is being tuned by" in record.getMessage():
                event.set()

    log, listener = logging.getLogger("scheduler"), Listener()
    log.addHandler(listener)
    yield event
    log.removeHandler(listener)


def test_who_comes_second_waits_for_the_record_of_the_first(path, caplog, waiting):
    store, problem, entered = Store(path), DoubleProblem(8), threading.Event()

    def watch(progress):
        entered.set()
        waiting.wait()

    first = []
    thread = threading.Thread(
        target=lambda: first.append(tune(DOUBLE, problem, budget=5, store=store, runner=Rehearsal(), progress=watch))
    )
    thread.start()
    entered.wait()
    with caplog.at_level(logging.WARNING):
        second = tune(DOUBLE, problem, budget=5, store=Store(path), runner=Rehearsal())
    thread.join()
    assert second == first[0]
    assert len(store.trials(second.key)) == 5
    assert f"is being tuned by process {os.getpid()}" in caplog.text
    tune(DOUBLE, problem, budget=5, store=store, runner=Rehearsal(), force=True)
    assert len(store.trials(second.key)) == 10  # nobody else was at it: forced, it is tuned again


class Device(Rehearsal):
    """Measures with its operands in memory, or in the cache, as asked, which a CPU cannot."""

    def measure(self, task, *, again=False):
        return dataclasses.replace(super().measure(task, again=again), l2=task.l2)


def test_who_waited_takes_no_record_that_was_measured_otherwise_than_asked_for(path, waiting):
    problem, entered = DoubleProblem(8), threading.Event()

    def watch(progress):
        entered.set()
        waiting.wait()

    thread = threading.Thread(
        target=lambda: tune(DOUBLE, problem, budget=5, store=Store(path), runner=Device(), progress=watch)
    )
    thread.start()
    entered.wait()
    second = tune(DOUBLE, problem, budget=5, store=Store(path), runner=Device(), l2="warm")
    thread.join()
    assert second.winner.measurement.l2 == "warm"


def cold_clock(problem, hardware, l2="cold"):
    return "wall", l2


def test_what_was_measured_with_warm_operands_makes_no_search_with_cold_ones_needless(path, monkeypatch):
    monkeypatch.setattr("scheduler.search.baseline.timing_conditions", cold_clock)
    problem, store = DoubleProblem(8), Store(path)
    warm = tune(DOUBLE, problem, budget=5, store=store, runner=Device(), l2="warm")
    assert tune(DOUBLE, problem, budget=5, store=store, runner=Device(), l2="warm") == warm
    cold = tune(DOUBLE, problem, budget=5, store=store, runner=Device())
    assert cold.winner.measurement.l2 == "cold"
    assert tune(DOUBLE, problem, budget=5, store=store, runner=Device()) == cold


DAY_S = 86_400.0


@pytest.mark.parametrize("wrong_by", [-DAY_S, 0.0, DAY_S])
def test_a_lease_that_nobody_renews_is_taken_over_within_seconds_whatever_the_clocks_say(path, clock, wrong_by):
    store = Store(path)
    clock.wrong_by = wrong_by  # of who died; and of who comes
    assert store.lease(values.KEY, "another-host/1/x", 60).owner == "another-host/1/x"
    clock.wrong_by = 0.0
    started = clock.now
    with leased(store, values.KEY) as record:
        assert record is None
    assert lease.SILENT_S < clock.now - started <= lease.SILENT_S + 2 * lease.POLL_S


@pytest.mark.parametrize("wrong_by", [-DAY_S, DAY_S])
def test_a_lease_that_is_renewed_is_nobody_elses_whatever_the_clocks_say(path, clock, wrong_by):
    store, slept = Store(path), clock.sleep
    store.lease(values.KEY, "another-host/1/x", 60)

    def sleep(seconds):
        slept(seconds)
        if clock.now - 1e9 < 100:  # longer than the lease was for, and many times as long as a silent one is waited for
            clock.wrong_by = wrong_by
            store.lease(values.KEY, "another-host/1/x", 60)
            clock.wrong_by = 0.0

    time.sleep = sleep  # the fixture puts it back
    with leased(store, values.KEY):
        assert clock.now - 1e9 > 100


def test_the_same_number_of_a_process_elsewhere_is_another_process(path, clock):
    store, me = Store(path), f"{socket.gethostname()}/{2**22 + 1}"  # above Linux's largest
    for whose, at_once in (("pid-of-another-container.x", False), ("x", False), (f"{lease._processes()}.x", True)):
        store.lease(values.KEY, f"{me}/{whose}", 60)
        started = clock.now
        with leased(store, values.KEY):
            assert (clock.now == started) is at_once


@pytest.mark.parametrize("owner", ["", "x", "a/b/c", "a/-1/c", f"h/{10**30}/c", "/" * 9, "h/\u0661/c"])
def test_whatever_a_lease_says_of_its_owner_is_waited_for_no_longer(path, clock, owner):
    store = Store(path)
    store.lease(values.KEY, owner or " ", 60)
    with leased(store, values.KEY):
        assert clock.now - 1e9 <= lease.SILENT_S + 2 * lease.POLL_S


def test_the_lease_of_a_process_of_this_host_that_died_is_taken_over_at_once(path):
    store = Store(path)
    code = (
        f"import os, sys; sys.path[:0] = [{str(Path(__file__).parents[1])!r}]; import values\n"
        f"from scheduler.store.lease import leased; from scheduler.store.store import Store\n"
        f"held = leased(Store({str(path)!r}), values.KEY); held.__enter__(); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 9
    assert store.lease(values.KEY, "x", 60).owner != "x"
    with leased(store, values.KEY) as record:
        assert record is None


class Told(Store):
    """Tells of each lease that it has given or renewed."""

    def __init__(self, path):
        super().__init__(path)
        self.given = threading.Semaphore(0)

    def lease(self, key, owner, seconds, **how):
        holder = super().lease(key, owner, seconds, **how)
        self.given.release()
        return holder


def test_a_lease_is_renewed_while_it_is_held(path, monkeypatch, clock):
    monkeypatch.setattr(lease, "RENEW_S", 0.01)
    store = Told(path)
    with leased(store, values.KEY):
        for _ in range(3):
            clock.now += 0.9 * lease.SILENT_S
            while store.given.acquire(blocking=False):
                pass
            for _ in range(2):  # the first may have begun before the clock was put forward
                store.given.acquire()
        assert Store(path).lease(values.KEY, "x", 60).owner != "x"
    assert Store(path).lease(values.KEY, "x", 60).owner == "x"


SIXTEEN = """
import os, sys
sys.path[:0] = [{tests!r}, {root!r}]
from operations import DOUBLE, DoubleProblem
from rehearsal import Rehearsal
from scheduler.search import search, tuner  # once, before the processes part
from scheduler.store.store import Store

children = []
for i in range(16):
    if not (pid := os.fork()):
        for n in (8, 1000 + i):
            tuner.tune(DOUBLE, DoubleProblem(n), budget=6, store=Store({path!r}), runner=Rehearsal())
        os._exit(0)
    children.append(pid)
sys.exit(sum(os.waitpid(pid, 0)[1] != 0 for pid in children))
"""


def test_sixteen_processes_that_tune_into_one_file_lose_nothing_and_share_what_they_all_want(path):
    here = Path(__file__).parents[1]
    code = SIXTEEN.format(tests=str(here), root=str(here.parent), path=str(path))
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    store = Store(path)
    records = list(store.records())
    assert len(records) == 17
    for record in records:
        of_one_search = len(store.trials(record.key)) == 6
        assert of_one_search or record.key.problem == '{"n":8}'
    # All sixteen wanted this one. Who asks after it is done tunes again; who asked before took the first one's.
    shared = [len(store.trials(r.key)) for r in records if r.key.problem == '{"n":8}']
    assert shared[0] % 6 == 0
    assert shared[0] < 16 * 6


def test_who_has_something_else_to_do_does_not_wait_and_takes_over_what_nobody_renews(path, clock):
    store, others = Store(path), LeaseWatcher()
    store.lease(values.KEY, "another-host/1/x", 60)
    clock.now += 2 * lease.SILENT_S  # nobody has looked so far: that tells nothing
    for passed, free in ((0.0, False), (lease.SILENT_S - 1, False), (2, True)):
        clock.now += passed
        with leased_if_free(store, values.KEY, others) as other:
            assert (other is None) is free
            assert free or str(other) == "process 1 on another-host"
    assert store.lease(values.KEY, "x", 60).owner == "x"  # it was given back


def test_a_lease_that_is_renewed_between_two_looks_is_nobody_elses(path, clock):
    store, others = Store(path), LeaseWatcher()
    for _ in range(10):
        store.lease(values.KEY, "another-host/1/x", 60)
        with leased_if_free(store, values.KEY, others) as other:
            assert other.owner == "another-host/1/x"
        clock.now += 2 * lease.SILENT_S
