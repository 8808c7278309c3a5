"""The lock of a device: it excludes other processes and users, and what is no lock stops no search."""

import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import filelock
import pytest

from scheduler.measure import gpu
from scheduler.measure.gpu import Gpu

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
NOBODY = 65534
NAME = "tile-scheduler-gpu.lock"


@pytest.fixture(autouse=True)
def shared(tmp_path, monkeypatch):
    """The directory of all users."""
    monkeypatch.setattr(gpu, "SHARED", tmp_path / "shared")
    monkeypatch.setattr(gpu, "_skipped_locks", set())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    gpu.require_device_lock.cache_clear()
    yield tmp_path / "shared"
    gpu.require_device_lock.cache_clear()


def test_one_of_many_is_within_at_a_time():
    inside, counted = [], []

    def call(_):
        with Gpu("", "gpu", "", 0).exclusive():
            inside.append(1)
            counted.append(len(inside))
            time.sleep(0.01)
            inside.pop()

    with ThreadPoolExecutor(12) as threads:
        list(threads.map(call, range(24)))
    assert counted == [1] * 24


HARM = {
    "a dangling link": lambda path: path.symlink_to(path.with_name("nothing")),
    "a link to a file": lambda path: path.symlink_to(path.with_name("other")),
    "a directory": Path.mkdir,
}


@pytest.mark.parametrize("what", HARM)
def test_what_is_no_lock_is_followed_nowhere_and_the_users_own_lock_takes_its_place(what, shared, tmp_path):
    shared.mkdir()
    (shared / "other").write_text("kept")
    HARM[what](shared / NAME)
    with pytest.warns(RuntimeWarning, match=f"does not wait for measurements of other users .*{NAME}"):
        path = gpu.require_device_lock("gpu")
    assert path == tmp_path / "cache" / "tile-scheduler" / "locks" / NAME
    with gpu.device_lock("gpu"), pytest.raises(filelock.Timeout):
        filelock.FileLock(path).acquire(timeout=0)
    assert (shared / "other").read_text() == "kept"
    assert not (shared / "nothing").exists()


def test_a_fifo_in_the_place_of_the_lock_is_locked_as_a_file_is(shared):
    shared.mkdir()
    os.mkfifo(shared / NAME)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with gpu.device_lock("gpu"), pytest.raises(filelock.Timeout):
            filelock.FileLock(shared / NAME).acquire(timeout=0)


def test_where_no_lock_can_be_made_a_warning_says_so_once_and_the_search_goes_on(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(gpu, "SHARED", tmp_path / "file")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    with (
        pytest.warns(RuntimeWarning, match="wait for measurements of other processes"),
        gpu.device_lock("gpu"),
    ):
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with gpu.device_lock("gpu"):
            pass


USER = """
import os, sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from scheduler.measure import gpu
gpu.SHARED = Path({shared!r})
if os.geteuid() == 0 and {user}:
    os.setgid({user}); os.setuid({user})
log = os.open({log!r}, os.O_WRONLY | os.O_APPEND)
for _ in range(20):
    with gpu.device_lock("gpu"):
        os.write(log, b"+")
        time.sleep(0.005)
        os.write(log, b"-")
"""


def test_processes_of_two_users_exclude_each_other(open_path):
    log, shared = open_path.with_name("log"), open_path.with_name("shared")
    log.touch()
    log.chmod(0o666)
    shared.mkdir()
    shared.chmod(0o1777)  # as /tmp
    codes = [USER.format(root=str(ROOT), shared=str(shared), user=user, log=str(log)) for user in (0, NOBODY)]
    users = [subprocess.Popen([sys.executable, "-c", code]) for code in codes]
    assert [process.wait() for process in users] == [0, 0]
    assert log.read_text() == "+-" * 40


def test_a_process_that_holds_the_lock_for_ever_is_waited_for_once(monkeypatch):
    monkeypatch.setattr(gpu, "LIMIT_S", 0.2)
    held, done = threading.Event(), threading.Event()

    def hold():
        with gpu.device_lock("gpu"):
            held.set()
            done.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    entered = gpu.device_lock("gpu")
    with pytest.warns(RuntimeWarning, match="was locked for"):
        entered.__enter__()
    entered.__exit__(None, None, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(50):
            with gpu.device_lock("gpu"):
                pass
    done.set()
    holder.join()


def test_a_process_that_a_candidate_forks_does_not_keep_the_lock():
    with gpu.device_lock("gpu"):
        if not (pid := os.fork()):
            time.sleep(60)
            os._exit(0)
    with gpu.device_lock("gpu"):
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
