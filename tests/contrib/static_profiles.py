"""Kernels compiled for TPUs that are not here: one process a program, as the compiler reads its settings once."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scheduler.contrib.tpu import estimate
from scheduler.core.hardware import find

# Skipped where it is not installed (conftest.py); `pytest -m libtpu` runs these alone.
needs_libtpu = pytest.mark.libtpu


def compiled(program: str, chip: str, folder: Path, *arguments: str, cycles: bool = False) -> str:
    """What `program`, a Python file, prints when it runs where it may compile for `chip`.

    The estimate of `cycles` goes through each step of a grid: most want to know of memory alone.
    """
    tests = Path(__file__).parents[1]
    path = os.pathsep.join([str(tests.parent), str(tests), os.environ.get("PYTHONPATH", "")])
    hardware = find(chip) if cycles else dataclasses.replace(find(chip), static_cycles=False)
    environment = os.environ | estimate.profile_environment(folder, hardware) | {"PYTHONPATH": path}
    ended = subprocess.run([sys.executable, program, chip, *arguments], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout
