"""How often a call is timed, and what becomes of its times."""

import itertools
import statistics
import time

import jax.numpy as jnp
import pytest

from scheduler.core.records import Measurement
from scheduler.measure import timer


def sleeping(*seconds):
    """A call that takes these seconds in turn."""
    turns = itertools.cycle(seconds)

    def call():
        time.sleep(next(turns))
        return jnp.zeros(())

    return call


def timed(call, repetitions, **how):
    return timer.measure(call, repetitions=repetitions, clock="wall", l2="warm", **how)


def test_every_repetition_is_a_sample_and_the_median_is_theirs():
    measured = timed(sleeping(0.001, 0.003), 6)
    assert len(measured.samples_s) == 6
    assert measured.median_s == statistics.median(measured.samples_s) >= 0.001
    assert (measured.clock, measured.l2) == ("wall", "warm")


@pytest.mark.parametrize(("slow_s", "samples"), [(0.001, 3), (1.0, 10), (None, 10)])
def test_a_slow_call_gets_three_repetitions_and_any_other_all(slow_s, samples):
    assert len(timed(sleeping(0.002), 10, slow_s=slow_s).samples_s) == samples


def test_few_repetitions_are_not_made_more_by_a_limit():
    assert len(timed(sleeping(0.0), 2, slow_s=1.0).samples_s) == 2


def test_a_call_is_warmed_up_before_it_is_timed():
    slow_first = itertools.chain([0.05], itertools.repeat(0.0))
    measured = timed(lambda: (time.sleep(next(slow_first)), jnp.zeros(()))[1], 5)
    assert max(measured.samples_s) < 0.05


def test_rounds_join_into_one_measurement():
    parts = [Measurement(2.0, (1.0, 2.0, 3.0), "cupti", "cold"), Measurement(5.0, (5.0,), "cupti", "cold")]
    assert timer.join(parts) == Measurement(2.5, (1.0, 2.0, 3.0, 5.0), "cupti", "cold")
