"""How often a call is timed, and what becomes of its times."""

import itertools
import time

import jax.numpy as jnp
import pytest

from scheduler.core.records import Measurement
from scheduler.measure import timer

pytestmark = pytest.mark.one_jax


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
