"""Calls from many threads, after a fork, without a home or a place to stand, and so many that leaks would tell."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from attack import Tried

ROOT = Path(__file__).parents[2]

START = """
import os, sys, threading, warnings
import numpy as np
import jax, jax.numpy as jnp
import scheduler
warnings.simplefilter("error")

def right(m, k=16):
    a, b = np.arange(m * k, dtype=np.float32).reshape(m, k) / k, np.eye(k, dtype=np.float32)
    return np.allclose(scheduler.tuned_matmul(jnp.asarray(a), jnp.asarray(b)), a, atol=1e-5)
"""

THREADS = """
wrong, start = [], threading.Barrier(16)
def work(i):
    start.wait()
    for m in range(1, {count} + 1):
        if not right(1 + (m * (i + 1)) % 40):
            wrong.append((i, m))
threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not wrong, wrong
"""

FORK = """
children = []
for i in range({count}):
    if not (pid := os.fork()):
        os._exit(0 if right(i + 1) else 1)
    children.append(pid)
assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * {count}
assert right(3)
"""

MANY = """
import resource
def used():
    fds, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    pages = int(open("/proc/self/statm").read().split()[1])
    return fds, threads, pages * os.sysconf("SC_PAGE_SIZE") / 2**20
shapes = {shapes}
for m in range(1, shapes + 1):
    assert right(m)
for _ in range(shapes):  # what is made once is made
    assert right(1 + _ % shapes)
before = used()
for call in range({count}):
    assert right(1 + call % shapes), call
after = used()
assert after[0] <= before[0], (before, after)
assert after[1] <= before[1], (before, after)
assert after[2] <= before[2] + 20, (before, after)
print("%.1f MiB, %d threads and %d files more" % (after[2] - before[2], after[1] - before[1], after[0] - before[0]))
"""

COMMAND = """
from scheduler.cli.app import main
def run(*words):
    try:
        main(list(words))
    except SystemExit as end:
        return end.code or 0
    return 0
warnings.simplefilter("default")  # that there is no place for a cache is said
assert right(4)
for words in ("list", "tune softmax rows=4 columns=8 dtype=float32 --budget 2", "doctor", "export",
              "tune softmax rows=4 columns=16 dtype=float32 --budget 2 --workers 1"):
    assert run(*words.split()) in (0, 1), words
assert right(5)
"""
NOWHERE = "import os; os.rmdir(os.getcwd())\n"
# Root may enter what nobody may, so it does without that.
UNREADABLE = "import os, modes; plain = modes._as_an_owner(); plain.__enter__(); os.chmod(os.getcwd(), 0)\n"
UNWRITABLE = "import os, modes; plain = modes._as_an_owner(); plain.__enter__(); os.chmod(os.getcwd(), 0o555)\n"
# As for a number of a user in a container, of whom no file knows a name or a home.
UNKNOWN = "import pwd\ndef getpwuid(uid): raise KeyError(uid)\npwd.getpwuid = getpwuid\n"


def threads(seed: int, count: int) -> Tried:
    """Sixteen threads that call the same and other shapes at once, so many calls each."""
    return _ran("16 threads", START + THREADS.format(count=count), 16 * count)


def forks(seed: int, count: int) -> Tried:
    """So many children, forked after the import and before any call."""
    return _ran("forked", START + FORK.format(count=count), count)


def many(seed: int, count: int) -> Tried:
    """So many calls of one shape for each hundred of them."""
    return _ran("calls", START + MANY.format(count=count, shapes=max(10, count // 100)), count)


def places(seed: int, count: int) -> Tried:
    """Without a home, with one that is no directory, where the working directory is gone or may not be read."""
    bare: dict[str, str | None] = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "TILE_SCHEDULER_CACHE"))
    file, missing = bare | {"HOME": "/dev/null"}, bare | {"HOME": "/no/home"}
    cases: tuple[tuple[str, str, dict[str, str | None]], ...] = (
        ("no HOME, a user whom nothing knows, a directory that is gone", NOWHERE + UNKNOWN, bare),
        ("HOME is a file, a directory that may not be read", UNREADABLE, file),
        ("no HOME", "", bare),
        ("no HOME, a user whom nothing knows", UNKNOWN, bare),
        ("HOME is a file", "", file),
        ("HOME is a file, a user whom nothing knows", UNKNOWN, file),
        ("no such HOME", "", missing),
        ("no such HOME, a user whom nothing knows", UNKNOWN, missing),
        ("a directory that is gone", NOWHERE, {}),
        ("a directory that may not be read", UNREADABLE, {}),
        ("no HOME, a user whom nothing knows, a directory that may not be read", UNREADABLE + UNKNOWN, bare),
        ("a directory that may not be written", UNWRITABLE, {}),
        ("no HOME, a user whom nothing knows, a directory that may not be written", UNWRITABLE + UNKNOWN, bare),
    )
    tried = Tried()
    for words, first, more in cases[:count]:
        tried.add(_ran(words, first + START + COMMAND, 1, more))
    return tried


def _ran(what: str, code: str, count: int, more: dict[str, str | None] | None = None) -> Tried:
    tried = Tried(tries=count - 1)
    with tempfile.TemporaryDirectory() as place:
        there = Path(place) / "there"
        there.mkdir()
        path = os.pathsep.join(
            [str(ROOT), str(ROOT / "tests"), *(entry for entry in sys.path if entry.endswith("site-packages"))]
        )
        env = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "TILE_SCHEDULER_CACHE": f"{place}/cache.db"}
        env = {name: value for name, value in (env | (more or {})).items() if value is not None}
        ended = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], cwd=there, env=env, capture_output=True, text=True
        )
        said = (ended.stderr or "").strip().splitlines()[-3:]
        tried.expect(ended.returncode == 0, f"{what}: {ended.returncode}: {' | '.join(said)}"[:900])
        tried.notes += [line for line in ended.stdout.splitlines() if line.endswith("more")]
        if there.exists():
            there.chmod(0o700)
    return tried
