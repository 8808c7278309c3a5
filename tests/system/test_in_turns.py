"""Whole functions timed in turns."""

import dataclasses
import random

import filelock
import jax
import jax.numpy as jnp
import pytest

from scheduler.measure import gpu
from scheduler.rewriting import interleaved
from scheduler.rewriting.interleaved import Seconds, is_faster, margin_of, time_interleaved


class Device:
    """A device that computes calls one after the other, and a host that takes so long to launch one; it has the clock.

    Attributes:
      seconds: of each call of `run`.
      noise: the longest delay of a call of `call`, as a share of its time.
    """

    def __init__(self, seconds=0.0, launch=0.0, noise=0.0):
        self.seconds, self.launch, self.noise = seconds, launch, noise
        self.now, self.free, self.random = 0.0, 0.0, random.Random(0)

    def perf_counter(self):
        return self.now

    def run(self):
        return self.call(self.seconds)()

    def call(self, seconds):
        def run():
            self.now += self.launch
            self.free = max(self.free, self.now) + seconds * (1 + self.noise * self.random.random())
            return Result(self, self.free)

        return run


@dataclasses.dataclass
class Result:
    device: Device
    done: float

    def block_until_ready(self):
        self.device.now = max(self.device.now, self.done)


@pytest.mark.parametrize("ahead", [2, 3, 8])
@pytest.mark.parametrize("calls", [1, 4, 20])
def test_a_sample_waits_for_all_its_calls_and_the_device_for_the_first_alone(calls, ahead, monkeypatch):
    device = Device(0.004, launch=0.003)
    monkeypatch.setattr(interleaved, "time", device)
    assert interleaved.sample_seconds(device.run, calls, ahead) == pytest.approx(0.004 + 0.003 / calls)


@pytest.fixture
def device(monkeypatch):
    device = Device(noise=0.3)
    monkeypatch.setattr(interleaved, "time", device)
    return device


def test_what_takes_longer_is_slower_beyond_doubt(device):
    times = time_interleaved({"short": device.call(0.004), "long": device.call(0.006)}, seconds=2)
    assert is_faster(times["short"], times["long"])
    assert not is_faster(times["long"], times["short"])
    assert times["short"].rounds == times["long"].rounds >= 8
    assert 0.004 <= times["short"].median_s < 0.006 <= times["long"].median_s


def test_one_and_the_same_function_is_not_faster_than_itself(device):
    run = device.call(0.02)
    times = time_interleaved({"one": run, "other": run}, seconds=2)
    assert abs(margin_of(times["one"], times["other"]).middle) < 0.1
    assert not is_faster(times["one"], times["other"])
    assert not is_faster(times["other"], times["one"])


def test_a_margin_pairs_rounds_so_that_a_drift_of_both_drops_out():
    drift = [1.0, 1.5, 2.0, 1.2, 3.0, 1.1, 2.5, 1.9, 1.0, 1.4]
    one, other = Seconds(tuple(drift)), Seconds(tuple(1.02 * s for s in drift))
    found = margin_of(one, other)
    assert found.low == pytest.approx(0.02)
    assert found.high == pytest.approx(0.02)
    assert is_faster(one, other)


def test_too_few_rounds_leave_doubt():
    assert not is_faster(Seconds((1.0,) * 5), Seconds((2.0,) * 5))


def test_a_round_is_taken_as_often_as_asked_however_long_it_lasts(device):
    times = time_interleaved({"one": device.call(0.03)}, seconds=0.01, at_least_rounds=9)
    assert times["one"].rounds == 9
    assert times["one"].spread_s < 0.03


@pytest.mark.parametrize(
    ("seconds", "calls", "ahead"), [(0.00001, 2000, interleaved.MOST_AHEAD), (0.0005, 40, 6), (0.2, 1, 2)]
)
def test_short_calls_are_so_many_ahead_that_the_device_has_work_while_the_host_is_late(
    seconds, calls, ahead, monkeypatch
):
    device = Device(seconds)
    monkeypatch.setattr(interleaved, "time", device)
    sample, queue = interleaved._calls_and_ahead(device.run)
    assert sample == pytest.approx(calls, abs=1)
    assert queue == pytest.approx(ahead, abs=1)


def test_what_a_function_raises_is_raised():
    def broken():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        time_interleaved({"broken": broken})


def test_nothing_to_time_is_said():
    with pytest.raises(ValueError, match="at least one"):
        time_interleaved({})


def test_nobody_else_has_the_device_meanwhile():
    refused = []

    def run():
        try:
            filelock.FileLock(gpu.require_device_lock("cpu")).acquire(timeout=0)
        except filelock.Timeout:
            refused.append(True)
        return jnp.zeros(())

    time_interleaved({"one": run}, seconds=0.01)
    assert refused
    with interleaved.interleaves_on(jax.devices()):
        pass  # given back
