"""Timeouts count the time in which a process could run."""

import types

import pytest

from scheduler.measure import subprocess_pipe
from scheduler.measure.subprocess_pipe import RunningTime


@pytest.fixture
def host(monkeypatch):
    """A clock, and the threads of the process: whether each is runnable, and the ns that it ran and waited."""
    host = types.SimpleNamespace(now=0.0, threads={"1": (True, 0, 0)})
    monkeypatch.setattr(subprocess_pipe, "time", types.SimpleNamespace(monotonic=lambda: host.now))
    monkeypatch.setattr(subprocess_pipe, "_threads", lambda pid: host.threads)
    return host


def seconds_of(host, *steps):
    time = RunningTime(1)
    for passed_s, threads in steps:
        host.now, host.threads = host.now + passed_s, threads
        time.seconds()
    return time.seconds()


def test_a_process_that_sleeps_or_computes_spends_its_time(host):
    asleep, computing = {"1": (False, 0, 0)}, {"1": (True, 2 * 10**8, 0)}
    assert seconds_of(host, (0.2, asleep), (0.2, asleep), (0.2, computing)) == pytest.approx(0.6)


def test_a_process_that_waits_for_a_core_spends_none(host):
    still_waiting, then_ran = {"1": (True, 0, 0)}, {"1": (True, 10**8, 5 * 10**8)}
    assert seconds_of(host, (0.2, still_waiting), (0.2, still_waiting), (0.2, then_ran)) == 0


def test_of_threads_that_wait_together_the_longest_wait_counts(host):
    assert seconds_of(host, (0.2, {"1": (True, 10**8, 10**8), "2": (False, 5, 15 * 10**7)})) == pytest.approx(0.05)


def test_a_calling_process_that_was_stopped_spends_one_interval_of_the_others_time(host):
    assert seconds_of(host, (90.0, {"1": (False, 0, 0)})) == pytest.approx(2 * subprocess_pipe.WAKE_S)
