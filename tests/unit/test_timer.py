"""How often a call is timed, and what becomes of its times."""

import itertools
import math
import time

import jax.numpy as jnp
import pytest

from scheduler.core.records import Measurement
from scheduler.measure import timer
from search_spaces import jax_compat


@pytest.fixture
def taking(monkeypatch):
    """Makes a call that takes these seconds in turn, by a clock that nothing else moves."""
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)

    def taking(seconds):
        turns = iter(seconds)

        def call():
            nonlocal now
            now += next(turns)
            return ZERO

        return call

    return taking


ZERO = jnp.zeros(())


def timed(*calls, repetitions=10, **how):
    return timer.measure(*calls, repetitions=repetitions, clock="wall", l2="warm", **how)


def test_every_repetition_is_a_sample_and_the_median_is_theirs(taking):
    measured = timed(taking(itertools.cycle([0.5, 2.0, 1.0])), repetitions=6)
    assert sorted(measured.samples_s) == [0.5, 0.5, 1, 1, 2, 2]
    assert measured.median_s == 1
    assert (measured.clock, measured.l2) == ("wall", "warm")


@pytest.mark.parametrize(("slow_s", "samples"), [(0.125, 3), (0.25, 10), (0.5, 10), (None, 10)])
def test_a_slow_call_gets_three_repetitions_and_any_other_all(taking, slow_s, samples):
    assert timed(taking(itertools.repeat(0.25)), repetitions=10, slow_s=slow_s).samples_s == (0.25,) * samples


def test_few_repetitions_are_not_made_more_by_a_limit(taking):
    assert len(timed(taking(itertools.repeat(0.25)), repetitions=2, slow_s=1.0).samples_s) == 2


def test_a_call_is_warmed_up_before_it_is_timed(taking):
    slow_first = itertools.chain([8.0, 4.0], itertools.repeat(0.25))
    assert timed(taking(slow_first), repetitions=5).samples_s == (0.25,) * 5


def test_a_quick_call_is_warmed_up_for_as_long_as_a_slow_one(taking):
    call = taking(itertools.chain([timer.WARM_UP_S / 4] * 4, itertools.repeat(0.25)))
    assert timed(call, repetitions=5).samples_s == pytest.approx([0.25] * 5)


def test_a_clock_that_stands_still_measures_zero(taking):
    seconds = itertools.chain([timer.WARM_UP_S / 2] * 2, itertools.repeat(0.0))
    assert timed(taking(seconds), repetitions=3).samples_s == (0.0,) * 3
    assert timed(taking(itertools.chain([0.0, timer.WARM_UP_S], itertools.repeat(0.0)))).samples_s == (0.0,) * 10


def test_a_sample_of_several_variants_is_their_mean_and_the_worst_is_the_slowest_median(taking):
    measured = timed(*[taking(itertools.repeat(seconds)) for seconds in (0.25, 0.5, 1.5)], repetitions=4)
    assert measured == Measurement(0.75, (0.75,) * 4, "wall", "warm", 1.5)
    assert timed(taking(itertools.repeat(0.25))).worst_s is None


@pytest.mark.parametrize(("slow_s", "samples"), [(0.5, 3), (0.75, 10)])
def test_the_mean_of_the_variants_decides_whether_a_call_is_slow(taking, slow_s, samples):
    calls = [taking(itertools.repeat(seconds)) for seconds in (1.0, 0.5)]
    assert len(timed(*calls, slow_s=slow_s).samples_s) == samples


def test_rounds_join_into_one_measurement():
    parts = [Measurement(2.0, (1.0, 2.0, 3.0), "cupti", "cold"), Measurement(5.0, (5.0,), "cupti", "cold")]
    assert timer.join(parts) == Measurement(2.5, (1.0, 2.0, 3.0, 5.0), "cupti", "cold")


def test_the_worst_time_of_joined_rounds_is_their_median():
    parts = [Measurement(1.0, (1.0,), "cupti", "cold", worst_s) for worst_s in (3.0, 2.0, 7.0)]
    assert timer.join(parts).worst_s == 3.0


class Cupti:
    """Stands in for the extension that records kernels: a call is of one kernel, as long as `taking` says."""

    def __init__(self):
        self.kernels = []

    def _cupti_init(self):
        self.kernels = []

    def _cupti_get_timings(self, _):
        return self.kernels

    def launching(self, *milliseconds):
        """Returns a call of kernels that take so long, each time the next one if there are several times."""
        turns = itertools.chain(milliseconds, itertools.repeat(milliseconds[-1]))

        def call():
            self.kernels.append(("kernel", next(turns)))
            return ZERO

        return call


@pytest.fixture
def cupti(monkeypatch):
    recorder = Cupti()
    monkeypatch.setattr(jax_compat, "kernel_recorder", lambda: recorder)
    both = [recorder.launching(7.0), recorder.launching(9.0)]
    monkeypatch.setattr(timer, "_occupy", lambda: lambda: [call() for call in both])
    timer._ahead.cache_clear()
    yield recorder
    timer._ahead.cache_clear()


def test_kernels_that_occupy_the_device_are_no_samples(cupti):
    for repetitions in (1, 10):
        measured = timer.measure(cupti.launching(2.0), repetitions=repetitions, clock="cupti", l2="cold")
        assert measured.samples_s == (0.002,) * repetitions


def test_the_first_calls_without_gaps_are_no_samples(cupti, taking):
    call_s = timer.SETTLE_S / 2
    warm_up = max(timer.WARM_UP_CALLS, math.ceil(timer.WARM_UP_S / call_s))
    # One call more precedes the recording.
    kernel = cupti.launching(*[9.0] * (warm_up + 1), 5.0, 4.0, 2.0)
    wait = taking(itertools.repeat(call_s))
    measured = timer.measure(lambda: (wait(), kernel())[1], repetitions=3, clock="cupti", l2="cold")
    assert measured.samples_s == (0.002,) * 3, "two calls take the time in which kernels settle"
