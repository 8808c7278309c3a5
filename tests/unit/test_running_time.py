"""Timeouts count the time in which a process could run."""

import os
import signal
import subprocess
import time
import types
from pathlib import Path

import pytest

from scheduler.core.records import Failure
from scheduler.measure import subprocess_pipe
from scheduler.measure.protocol import Answer, Request
from scheduler.measure.subprocess_pipe import WAKE_S, Overrun, RunningTime
from scheduler.measure.worker_process import WorkerProcess


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


def test_a_process_that_was_stopped_spends_none(monkeypatch):
    stopped, now = subprocess.Popen(["sleep", "1000"]), [0.0]
    monkeypatch.setattr(subprocess_pipe, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    try:
        os.kill(stopped.pid, signal.SIGSTOP)
        while Path(f"/proc/{stopped.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
        spent = RunningTime(stopped.pid)
        for _ in range(450):
            now[0] += WAKE_S
            spent.seconds()
        assert (spent.seconds(), spent.waited_s) == (0.0, pytest.approx(90))
    finally:
        stopped.kill()
        stopped.wait()


@pytest.mark.parametrize("waits", [True, False])
def test_a_timeout_says_whether_the_process_had_to_wait(waits, host, monkeypatch):
    def poll(timeout_ms):
        if timeout_ms:
            (runnable, ran_ns, waited_ns), passed_s = host.threads["1"], timeout_ms / 1000
            host.now += passed_s
            share = 0.5 if waits else 0.0
            host.threads = {"1": (runnable, ran_ns + 1, waited_ns + int(1e9 * share * passed_s))}
        return []

    child = object.__new__(subprocess_pipe.Child)
    child._process = types.SimpleNamespace(pid=1, poll=lambda: None)
    child._channel = types.SimpleNamespace(fileno=lambda: 0, sendall=lambda line: None)
    child._unread = b""
    events = types.SimpleNamespace(register=lambda *_: None, poll=poll)
    monkeypatch.setattr(subprocess_pipe, "select", types.SimpleNamespace(poll=lambda: events, POLLIN=1))
    with pytest.raises(Overrun) as caught:
        child.ask(Answer(None), "compile", lambda _: 10.0, lambda *_: None)
    assert caught.value.contended is waits
    assert host.now == pytest.approx(20 if waits else 10)


@pytest.mark.parametrize(("contended", "attempts"), [(True, 2), (False, 1)])
def test_a_timeout_of_a_process_that_had_to_wait_is_retried_once(contended, attempts, monkeypatch):
    asked = []

    def ask(request, *_):
        asked.append(request)
        raise Overrun("run", 10.0, contended)

    worker = WorkerProcess(None, None)
    worker._child = types.SimpleNamespace(ask=ask)
    monkeypatch.setattr(worker, "_replace", lambda: "")
    request = Request("measure", "double", "{}", "scripted", {}, 1, "warm", None, False)
    result = worker.request(request, lambda _: 10.0, lambda *_: None)
    assert result.outcome == Failure("timeout", "run did not end within 10 s")
    assert len(asked) == attempts
