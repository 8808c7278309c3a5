"""Static parameters as text: one spelling for each value, read as it was."""

import enum
import math

import jax.numpy as jnp
import numpy as np
import pytest

from search_spaces.autotuned.arguments import static_to_text, value_of


class Side(enum.Enum):
    LEFT = 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1, "1"),
        (True, "True"),
        (1.0, "1.0"),
        (1e-6, "1e-06"),
        (-math.inf, "-1e999"),
        (None, "None"),
        ("gelu", "gelu"),
        ("1", "'1'"),
        ("None", "'None'"),
        ("true", "'true'"),
        (" 1", "' 1'"),
        ("", ""),
        ("it's", "it's"),
        ((), "()"),
        ((1,), "(1,)"),
        ((1, "a", (None, True)), "(1, 'a', (None, True))"),
    ],
)
def test_a_static_parameter_has_one_spelling_which_is_read_as_it_was(value, text):
    assert static_to_text("p", value) == text
    read = value_of(text)
    assert (read, type(read)) == (value, type(value))


def test_other_spellings_and_values_are_read_as_the_same():
    assert value_of("true") is True
    assert value_of("FALSE") is False
    assert static_to_text("p", value_of("(1,'a')")) == "(1, 'a')"
    assert static_to_text("p", np.float32(0.5)) == "0.5"
    assert static_to_text("p", np.bool_(True)) == "True"
    for dtype in (jnp.bfloat16, np.dtype("bfloat16"), jnp.dtype("bfloat16")):
        assert static_to_text("p", dtype) == "bfloat16"
    assert static_to_text("p", (jnp.float32, np.int8)) == "('float32', 'int8')"
    assert value_of("[1, 2]") == "[1, 2]"


@pytest.mark.parametrize("value", [[1], {"a": 1}, {1}, Side.LEFT, abs, np.arange(3), 1j, b"x", (1, [2]), object()])
def test_what_no_key_can_spell_is_refused(value):
    with pytest.raises(TypeError, match=r"p=.* is a \w+.*; a static parameter is part of the key that sch"):
        static_to_text("p", value)
    if isinstance(value, list):
        with pytest.raises(TypeError, match="is a list: give a tuple"):
            static_to_text("p", value)
    with pytest.raises(TypeError, match="p=nan is never equal to itself"):
        static_to_text("p", math.nan)
