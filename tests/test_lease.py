"""Several processes, one cache: a problem that two are asked to tune is tuned once, and no record is lost."""

import dataclasses
import logging
import os
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
from scheduler.store.lease import leased
from scheduler.store.store import Store

pytestmark = pytest.mark.one_jax


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache.db"


class Clock:
    """The time of day, which passes only where somebody sleeps."""

    now = 1e9

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "time", lambda: clock.now)
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


def test_a_lease_that_expires_is_taken_over(path, clock):
    store = Store(path)
    assert store.lease(values.KEY, "another-host/1/x", 60) == "another-host/1/x"
    started = clock.now
    with leased(store, values.KEY) as record:
        assert record is None
    assert 60 < clock.now - started <= 60 + 2 * lease.POLL_S


def test_the_lease_of_a_process_of_this_host_that_died_is_taken_over_at_once(path):
    store = Store(path)
    code = (
        f"import os, sys; sys.path[:0] = [{str(Path(__file__).parent)!r}]; import values\n"
        f"from scheduler.store.lease import leased; from scheduler.store.store import Store\n"
        f"held = leased(Store({str(path)!r}), values.KEY); held.__enter__(); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1]).returncode == 9
    assert store.lease(values.KEY, "x", 60) != "x"
    with leased(store, values.KEY) as record:
        assert record is None


class Told(Store):
    """Tells of each lease that it has given or renewed."""

    def __init__(self, path):
        super().__init__(path)
        self.given = threading.Semaphore(0)

    def lease(self, key, owner, seconds):
        holder = super().lease(key, owner, seconds)
        self.given.release()
        return holder


def test_a_lease_is_renewed_while_it_is_held(path, monkeypatch, clock):
    monkeypatch.setattr(lease, "RENEW_S", 0.01)
    store = Told(path)
    with leased(store, values.KEY):
        for _ in range(3):
            clock.now += 0.9 * lease.LEASE_S
            while store.given.acquire(blocking=False):
                pass
            for _ in range(2):  # the first may have begun before the clock was put forward
                store.given.acquire()
        assert Store(path).lease(values.KEY, "x", 60) != "x"
    assert Store(path).lease(values.KEY, "x", 60) == "x"


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
    here = Path(__file__).parent
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
