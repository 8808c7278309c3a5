"""Whose code an exception is told to come from."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import jax
import numpy as np
import pytest

import search_spaces.jax_compat
import search_spaces.matmul.xla
from scheduler.core import codec
from scheduler.core.frames import Call, asked_by, calls, owner_of


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
        (str(Path(sysconfig.get_path("stdlib")) / "site-packages" / "somebodys_kernels" / "attention.py"), "user"),
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


def test_jax_is_a_library_wherever_it_is_installed(tmp_path):
    elsewhere = tmp_path / "packages"  # as by `pip install --target`, or below this environment
    elsewhere.symlink_to(Path(jax.__file__).parents[1])
    code = "import jax; from scheduler.core.frames import owner_of; print(jax.__file__, owner_of(jax.__file__))"
    path = os.pathsep.join([str(elsewhere), str(Path(search_spaces.__file__).parents[1])])
    ran = subprocess.run(
        [sys.executable, "-S", "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True
    )
    assert ran.stdout.decode().split() == [str(elsewhere / "jax" / "__init__.py"), "library"], ran.stderr.decode()


def test_a_line_of_ones_own_comes_before_one_of_a_distributions_package():
    model, own = ("/usr/lib/python3/dist-packages/flax/linear.py", 7, "call"), ("/home/me/train.py", 3, "step")
    assert asked_by([model, own]) == Call(*own, "user")
    assert asked_by([model]) == Call(*model, "user")
