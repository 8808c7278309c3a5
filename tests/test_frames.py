"""Whose code an exception is told to come from."""

import json
import sysconfig
from pathlib import Path

import jax
import numpy as np
import pytest

import search_spaces.jax_compat
import search_spaces.matmul.xla
from scheduler.core import codec
from scheduler.core.frames import calls, owner_of


@pytest.mark.parametrize(
    ("file", "owner"),
    [
        (codec.__file__, "scheduler"),
        (search_spaces.matmul.xla.__file__, "search_spaces"),
        (search_spaces.jax_compat.__file__, "library"),
        (jax.__file__, "library"),
        (np.__file__, "library"),
        (json.__file__, "library"),
        ("<string>", "library"),
        (str(Path(sysconfig.get_path("purelib")) / "somebodys_kernels" / "attention.py"), "user"),
        (__file__, "user"),
    ],
)
def test_a_file_is_of_a_library_of_this_program_or_of_a_user(file, owner):
    assert owner_of(file) == owner


def test_the_innermost_call_that_no_library_made_comes_first():
    def wrong():
        np.zeros((2, 3)) @ np.zeros((2, 3))

    with pytest.raises(ValueError) as caught:  # noqa: PT011 - only its traceback is of interest
        jax.tree.map(lambda _: wrong(), [0])
    assert [call.function for call in calls(caught.value)][:2] == ["wrong", "<lambda>"]
