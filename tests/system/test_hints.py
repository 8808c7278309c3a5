"""A command that a message tells to run, runs when it is pasted into a shell."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from values import ENVIRONMENT, trial

from scheduler.core.hardware import CPU
from scheduler.core.records import key_of
from scheduler.store.store import Store
from search_spaces.matmul import MATMUL, MatmulProblem

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
OWN = """
import jax
from search_spaces import LibraryKernel, Operation
from search_spaces.matmul import MatmulProblem

class Plain(LibraryKernel):
    def run(self, problem, schedule, target, /, a, b):
        return a @ b

OWN = Operation("own_product", MatmulProblem, (Plain(),))
"""
CALL = """
import jax.numpy as jnp, scheduler
x = jnp.ones((8, 8))
scheduler.tuned(OWN)(x, x, on_miss="error")
"""


def shell(line, cwd):
    """As a terminal in `cwd` does: nothing of the directory is on the path of a command that is installed."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    line = re.sub("^ *tile-scheduler", f"{sys.executable} -P -c 'from scheduler.cli.app import main; main()'", line)
    return subprocess.run(line, shell=True, cwd=cwd, env=env, capture_output=True, text=True)


def hinted(text):
    return re.search(r"tile-scheduler tune .*", text)[0]


def places(tmp_path):
    (tmp_path / "my ops" / "package").mkdir(parents=True)
    for file in ("own.py", "my ops/own.py", "my ops/package/own.py"):
        (tmp_path / file).write_text(OWN)
    (tmp_path / "my ops" / "package" / "__init__.py").touch()
    (tmp_path / "my ops" / "package" / "use.py").write_text("from .own import OWN")
    return {
        "module": (tmp_path, "from own import OWN", "own.py:OWN"),
        "script": (tmp_path, OWN, "use.py:OWN"),
        "package": (tmp_path / "my ops", "from package.use import OWN", "package."),
        "elsewhere": (
            tmp_path / "my ops" / "package",
            f"import sys; sys.path.insert(0, {str(tmp_path / 'my ops')!r})\nfrom own import OWN",
            f"'{tmp_path}/my ops/own.py:OWN'",
        ),
    }


@pytest.mark.parametrize("place", ["module", "script", "package"])
def test_what_a_cache_miss_tells_to_run_fills_the_cache(tmp_path, place):
    cwd, source, name = places(tmp_path)[place]
    (cwd / "use.py").write_text(source + CALL)
    missed = shell(f"{sys.executable} use.py", cwd)
    assert f"tile-scheduler tune {name}" in missed.stderr
    assert shell(f"{hinted(missed.stderr)} --budget 1", cwd).returncode == 0
    assert shell(f"{sys.executable} use.py", cwd).returncode == 0


def test_a_script_is_its_file_to_other_processes_though_multiprocessing_names_it_as_a_module(tmp_path):
    (tmp_path / "use.py").write_text(
        f"import multiprocessing\n{OWN}\nfrom search_spaces import locate\nprint(locate(OWN))"
    )
    assert shell(f"{sys.executable} use.py", tmp_path).stdout == f"{(tmp_path / 'use.py').resolve()}:OWN\n"


def test_a_path_with_blanks_is_quoted(tmp_path):
    cwd, source, name = places(tmp_path)["elsewhere"]
    (tmp_path / "use.py").write_text(source + CALL)
    missed = shell(f"{sys.executable} ../../use.py", cwd)
    assert f"tile-scheduler tune {name}" in missed.stderr or "'../" in missed.stderr
    assert shell(f"{hinted(missed.stderr)} --budget 1", cwd).returncode == 0


@pytest.mark.parametrize("name", ["'my ops/own.py:OWN'", "matmul"])
def test_what_show_and_explain_tell_to_run_fills_the_cache(tmp_path, name):
    places(tmp_path)
    told = shell(f"tile-scheduler show {name} m=8 n=8 k=8", tmp_path).stderr
    explained = shell(f"tile-scheduler explain {name} m=8 n=8 k=8", tmp_path).stdout
    assert hinted(told) == hinted(explained)
    assert shell(f"{hinted(explained)} --budget 1", tmp_path).returncode == 0
    assert shell(f"tile-scheduler show {name} m=8 n=8 k=8", tmp_path).returncode == 0


@pytest.mark.parametrize("operation", ["", "--operation softmax"])
def test_what_an_empty_list_tells_to_run_can_be_pasted(tmp_path, operation):
    told = shell(f"tile-scheduler list --hardware A100 {operation}", tmp_path).stdout
    assert shell(f"{hinted(told)} --budget 1", tmp_path).returncode == 0


def test_a_search_cut_short_on_a_cpu_goes_on_where_without_a_bound_it_would_be_refused(tmp_path, monkeypatch):
    cache = tmp_path / "cache.db"
    monkeypatch.setenv("TILE_SCHEDULER_CACHE", str(cache))
    problem, script = MatmulProblem(2048, 2048, 2048, "float32"), "tile-scheduler {} matmul m=2048 n=2048 k=2048"
    Store(cache).save_trials(key_of(MATMUL, problem, CPU), [trial()], ENVIRONMENT)
    refused = shell(f"{script.format('tune')} dtype=float32", tmp_path)
    assert "set a time limit" in refused.stderr
    told = [f"{script.format('show')} dtype=float32", "tile-scheduler list --hardware cpu"]
    goes_on, same = (hinted(shell(line, tmp_path).stdout) for line in told)
    assert goes_on == same == f"{script.format('tune')} dtype=float32 --seconds 600"
    assert shell(f"{goes_on} --budget 1", tmp_path).returncode == 0
