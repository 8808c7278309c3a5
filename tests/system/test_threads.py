"""Calls beside each other: results as they end, errors where they are asked for, and Ctrl-C at any moment."""

import _thread
import threading
import time

import pytest

from scheduler.core.interrupts import Threads

pytestmark = pytest.mark.slow


def test_results_come_as_they_end_and_as_many_run_at_once_as_there_are_threads():
    first = threading.Event()

    def call(name):
        if name == "slow":
            first.wait()
        else:
            first.set()
        return name.upper()

    with Threads(2, stop=lambda: None) as threads:
        assert list(threads.map(call, ["slow", "quick"])) == [("quick", "QUICK"), ("slow", "SLOW")]


def test_what_a_call_raises_is_raised_to_who_asks_and_what_has_not_begun_never_begins():
    begun, stopped = [], []

    def call(name):
        begun.append(name)
        if name == 0:
            raise ValueError("no")
        time.sleep(0.01)

    def run():
        with Threads(1, stop=lambda: stopped.append(True)) as threads:
            list(threads.map(call, range(100)))

    with pytest.raises(ValueError, match="no"):
        run()
    assert len(begun) < 100
    assert stopped == []  # an error is nobody's wish to stop


def test_an_interrupt_that_wakes_nobody_is_seen_and_stops_the_calls_under_way():
    ended = threading.Event()
    # It sets the flag that a signal sets, and wakes nobody: as a signal does just before its thread blocks.
    timer = threading.Timer(0.3, _thread.interrupt_main)
    timer.start()

    def run():
        with Threads(2, stop=ended.set) as threads:
            list(threads.map(lambda _: ended.wait(), ["hangs"]))

    with pytest.raises(KeyboardInterrupt):
        run()
    timer.join()
    assert ended.is_set()
