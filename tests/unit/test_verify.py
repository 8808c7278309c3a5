"""What counts as a wrong answer, and how it is told."""

import jax.numpy as jnp
import numpy as np
import pytest

from scheduler.measure.verification import mismatch
from search_spaces.problem import Tolerance

TOLERANCE = Tolerance(absolute=0.01, relative=0.01)


def test_an_answer_within_tolerance_has_no_mismatch():
    expected = jnp.array([[1.0, 100.0], [0.0, -5.0]])
    assert mismatch(expected + jnp.array([[0.015, 0.9], [0.005, -0.05]]), expected, TOLERANCE) is None


def test_the_worst_element_is_named_with_its_place_and_what_was_allowed():
    expected = jnp.zeros((3, 4)).at[1, 2].set(10.0)
    said = mismatch(expected.at[1, 2].set(12.0).at[0, 0].set(0.02), expected, TOLERANCE)
    assert said == "2 of 12 elements are off; the worst, at (1, 2), is 12 instead of 10 (allowed: 0.11)"


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_an_element_that_is_not_finite_is_wrong(poison):
    expected = jnp.ones((5,))
    assert "at (3,)" in mismatch(expected.at[3].set(poison), expected, TOLERANCE)


def test_another_shape_is_wrong():
    assert mismatch(jnp.zeros((2, 3)), jnp.zeros((3, 2)), TOLERANCE) == "the shape is (2, 3) instead of (3, 2)"


def test_a_narrow_answer_is_compared_in_float32():
    expected = jnp.array([1.0 + 2**-9])
    assert mismatch(expected.astype(jnp.bfloat16), expected, Tolerance(0.0, 2**-8)) is None
    assert mismatch(expected.astype(jnp.bfloat16), expected, Tolerance(0.0, 2**-10)) is not None


@pytest.mark.parametrize("infinite", [np.inf, -np.inf])
def test_where_infinity_is_right_only_that_infinity_is(infinite):
    expected = jnp.ones((5,)).at[3].set(infinite)
    assert mismatch(expected, expected, TOLERANCE) is None
    for wrong in (-infinite, np.nan, 1e30):
        assert "at (3,)" in mismatch(expected.at[3].set(wrong), expected, TOLERANCE)
