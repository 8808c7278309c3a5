"""What the documents show runs as it is written."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from scheduler.cli.app import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
GUIDE = (ROOT / "docs" / "add-a-kernel.md").read_text()
IMPORTS = """
import dataclasses
import jax
import jax.numpy as jnp
import scheduler
from jax.experimental import pallas as pl
from search_spaces import Footprint, Kernel, LibraryKernel, Operand, Operation, Phase, Problem, Space
"""


def python(text):
    return "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))


def run(*arguments):
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, cwd=ROOT, env=env)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_ten_lines_of_the_readme_run_and_are_ten():
    code = python(README)
    assert len([line for line in code.splitlines() if line and not line.startswith(("import", "from"))]) <= 10
    out = run("-c", code)
    error, shape = re.search(r"^(\S+) \((\d+, \d+)\)$", out, re.MULTILINE).groups()
    assert float(error) <= 0.5  # one rounding to bfloat16 of sums below 128
    assert shape == "256, 512"


def test_the_kernel_of_the_guide_is_searched_and_called(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(IMPORTS + python(GUIDE))
    out = run("-m", "scheduler", "tune", f"{file}:ROW_SUM", "rows=64", "columns=128", "--budget", "8", "--json")
    assert '"trials"' not in out
    assert '"tried": 5' in out  # four tiles and the library: none was dropped or failed to be proposed
    use = f"{file.read_text()}\nx = jnp.ones((64, 128))\nprint(row_sum(x, backends='pallas', on_miss='error')[3])"
    assert run("-c", use) == "128.0\n"


@pytest.mark.parametrize(
    "path", ["README.md", "CONTRIBUTING.md", *sorted(p.name for p in (ROOT / "docs").glob("*.md"))]
)
def test_commands_and_files_that_a_document_names_exist(path):
    file = next(place / path for place in (ROOT, ROOT / "docs") if (place / path).exists())
    text = file.read_text()
    commands = set(typer.main.get_command(app).commands)
    # A command's name follows at the start of a line or of a code span; elsewhere it is prose.
    assert set(re.findall(r"(?:^|`)tile-scheduler ([a-z-]+)", text, re.MULTILINE)) <= commands
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert (file.parent / link).exists(), link


def test_the_demo_finds_what_was_tuned():
    fields = ("m=32", "n=32", "k=32", "dtype=float32")
    assert "tuning it now" in run("examples/demo.py", *fields)
    out = run("examples/demo.py", *fields)
    assert "tuning" not in out
    assert "2nd call: found in the cache" in out
    assert "numbers:  right" in out
