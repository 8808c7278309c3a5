"""Turns on a device: nobody else can take them away, hold them for ever, or have a search wait for what is no lock."""

import contextlib
import os
import shutil
import stat
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from scheduler.cli.app import app
from scheduler.core.errors import WorkerError
from scheduler.measure import turns
from scheduler.measure.gpu import Gpu

pytestmark = pytest.mark.one_jax

ROOT = Path(__file__).parents[1]
NOBODY = 65534
BUS = "00000000:C1:00.0"


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    """The directory of a user that sessions have, and where locks then lie."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    return tmp_path / "runtime" / "tile-scheduler"


@pytest.fixture
def devices(tmp_path, monkeypatch):
    """Where the kernel shows PCI devices, this one among them: what everybody may read and nobody replace."""
    place = tmp_path / "devices" / "0000:c1:00.0"
    place.mkdir(parents=True)
    (place / "vendor").write_text("0x10de\n")
    (place / "vendor").chmod(0o444)
    monkeypatch.setattr(turns, "PCI_DEVICES", place.parent)
    return place.parent


def most_within(enter):
    """How many of 24 calls, by 12 threads, were within at the same time, at most."""
    inside, counted = [], []

    def call(_):
        with enter():
            inside.append(1)
            counted.append(len(inside))
            time.sleep(0.02)
            inside.pop()

    with ThreadPoolExecutor(12) as threads:
        list(threads.map(call, range(24)))
    assert len(counted) == 24
    return max(counted)


def test_turns_exclude_each_other(runtime):
    assert most_within(Gpu("", "turns", "", 0).exclusive) == 1


def test_who_is_soon_comes_before_most_and_who_is_last_after_most(runtime):
    order = []

    def turn(when):
        with turns.turn("row", when=when):
            order.append(when)
            time.sleep(0.05)

    with ThreadPoolExecutor(16) as threads:
        with turns.turn("row"):
            waiting = []
            for when in ("usual", "last", "soon"):
                waiting += [threads.submit(turn, when) for _ in range(1 if when == "soon" else 6)]
                time.sleep(0.3)
        for each in waiting:
            each.result()
    assert sorted(order) == sorted(["soon", *["usual"] * 6, *["last"] * 6])
    assert order.index("soon") <= 2
    places = {when: [place for place, each in enumerate(order) if each == when] for when in ("usual", "last")}
    assert statistics.mean(places["usual"]) < statistics.mean(places["last"])


def test_few_are_within_at_a_time_and_who_has_waited_long_enough_goes_on(runtime, monkeypatch):
    assert most_within(lambda: turns.few_at_once("start")) == turns.AT_ONCE
    monkeypatch.setattr(turns, "AT_ONCE_LIMIT_S", 0.2)
    with contextlib.ExitStack() as hanging:
        for _ in range(turns.AT_ONCE):
            hanging.enter_context(turns.few_at_once("start"))
        began = time.monotonic()
        with turns.few_at_once("start"):
            assert 0.2 <= time.monotonic() - began < 5


HARM = {
    "a FIFO": os.mkfifo,
    "a dangling link": lambda path: path.symlink_to(path.with_name("nothing")),
    "a link to a file": lambda path: path.symlink_to(path.with_name("other")),
    "a directory": Path.mkdir,
}


@pytest.mark.parametrize("what", HARM)
def test_what_is_no_lock_is_said_at_once_and_followed_nowhere(what, runtime):
    runtime.mkdir(parents=True)
    (runtime / "other").write_text("kept")
    HARM[what](runtime / "cpu.lock")
    with pytest.raises(WorkerError, match=r"tile-scheduler/cpu.lock is no lock .*: remove it"), turns.turn("cpu"):
        pass
    ended = CliRunner().invoke(app, ["tune", "matmul", "m=8", "n=8", "k=8", "dtype=float32", "--workers", "1"])
    assert (ended.exit_code, ended.stderr.count("\n")) == (1, 1)
    assert "remove it" in ended.stderr
    assert (runtime / "other").read_text() == "kept"
    assert not (runtime / "nothing").exists()


@pytest.mark.parametrize("what", HARM)
def test_what_lies_in_the_directory_of_everybody_harms_nobody(what, runtime, tmp_path, monkeypatch):
    shared = tmp_path / "tmp"
    shared.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    for name in ("tile-scheduler-cpu.lock", f"tile-scheduler-{os.geteuid()}"):
        HARM[what](shared / name)
    with turns.turn("cpu"):
        pass


def test_the_directory_of_locks_is_its_users_alone_whatever_the_umask(runtime):
    before = os.umask(0)
    try:
        for loose in (False, True):
            if loose:
                runtime.chmod(0o777)
            with turns.turn("cpu"):
                assert stat.S_IMODE(runtime.stat().st_mode) == 0o700
                assert stat.S_IMODE((runtime / "cpu.lock").stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_without_a_runtime_directory_locks_lie_in_the_cache_and_without_a_home_where_only_this_user_may_enter(
    tmp_path, monkeypatch
):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with turns.turn("cpu"):
        assert (tmp_path / "cache" / "tile-scheduler" / "locks" / "cpu.lock").exists()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with turns.turn("cpu"):
        assert stat.S_IMODE((tmp_path / f"tile-scheduler-{os.geteuid()}").stat().st_mode) == 0o700
    shutil.rmtree(tmp_path / f"tile-scheduler-{os.geteuid()}")
    (tmp_path / f"tile-scheduler-{os.geteuid()}").symlink_to(tmp_path)
    with pytest.raises(WorkerError, match="set XDG_RUNTIME_DIR to one"):
        turns.require("cpu")


TURN = """
import os, sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from scheduler.measure import turns
turns.PCI_DEVICES = Path({devices!r})
if os.geteuid() == 0 and {user}:
    os.setgid({user}); os.setuid({user})
os.environ["XDG_RUNTIME_DIR"] = {runtime!r}
log = os.open({log!r}, os.O_WRONLY | os.O_APPEND)
for _ in range(20):
    with turns.turn("gpu", {bus!r}):
        os.write(log, b"+")
        time.sleep(0.005)
        os.write(log, b"-")
"""


def test_processes_of_two_users_take_turns_on_one_gpu(devices, open_path):
    log = open_path.with_name("log")
    log.touch()
    log.chmod(0o666)
    for path in (devices, *devices.parents[:2]):  # which nobody may reach below a test's own directory
        path.chmod(0o755)
    place = open_path.with_name("devices")
    place.mkdir()
    (place / "0000:c1:00.0").mkdir()
    (place / "0000:c1:00.0" / "vendor").touch(0o444)
    users = []
    for user in (0, NOBODY):
        runtime = open_path.with_name(f"runtime-{user}")
        runtime.mkdir()
        if os.geteuid() == 0:
            os.chown(runtime, user, user)
        code = TURN.format(root=str(ROOT), devices=str(place), user=user, runtime=str(runtime), log=str(log), bus=BUS)
        users.append(subprocess.Popen([sys.executable, "-c", code]))
    assert [process.wait() for process in users] == [0, 0]
    assert log.read_text() == "+-" * 40


def test_who_holds_a_gpu_for_ever_is_waited_for_once_and_not_for_ever(runtime, devices, monkeypatch):
    monkeypatch.setattr(turns, "OTHERS_LIMIT_S", 0.2)
    monkeypatch.setattr(turns, "_not_waited_for", set())
    held, done = threading.Event(), threading.Event()

    def hold():
        with turns._among_users(devices / "0000:c1:00.0" / "vendor"):
            held.set()
            done.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    started = time.monotonic()
    for _ in range(50):
        with turns.turn("gpu", BUS):
            pass
    done.set()
    holder.join()
    assert 0.2 < time.monotonic() - started < 50 * 0.2


def test_a_process_that_a_candidate_forks_does_not_keep_the_turn(runtime):
    with turns.turn("cpu"):
        if not (pid := os.fork()):
            time.sleep(60)
            os._exit(0)
    with turns.turn("cpu"):
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
