"""What all tests share: no test reads or writes the user's own cache, and Ctrl-C means what it means at a terminal."""

import collections
import ctypes
import gc
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import hypothesis
import pytest
from postgres_server import server

# A busy host takes longer for an example, which is no failure.
hypothesis.settings.register_profile("any host", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("any host")

# Before JAX starts a device: on as many threads as CPU devices or cores, whichever are more, the interpreter of GPU
# kernels runs theirs, and it hangs where those that wait at barriers take all.
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {os.environ.get('XLA_FLAGS', '')}"

# What calls miss is noted in the background; only tests that look for it have that.
os.environ["TILE_SCHEDULER_MISSES"] = "off"

# A shell that starts a command in the background has it ignore SIGINT, and so all that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# A test process whose resident memory is above this drops what JAX compiled for earlier tests.
MOST_RESIDENT_BYTES = 2**30


# Tests that cannot run here are not collected; the summary counts them by reason.
NOT_COLLECTED = pytest.StashKey[dict[str, int]]()
GPU = shutil.which("nvidia-smi") is not None
collect_ignore = [] if GPU else ["device"]


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their markers
def pytest_collection_modifyitems(config, items):
    seen, possible, impossible = set(), [], collections.Counter()
    for item in items:
        if reason := _impossible(item):
            impossible[reason] += 1
            continue
        function = item.nodeid.partition("[")[0]
        if function in seen and item.get_closest_marker("slow_but_first"):
            item.add_marker("slow")
        seen.add(function)
        possible.append(item)
    items[:] = possible
    config.stash[NOT_COLLECTED] = dict(impossible)
    if hasattr(config, "workeroutput"):
        config.workeroutput["not_collected"] = dict(impossible)


def _impossible(item):
    """Why this test cannot run here: the reason of a `skipif` that holds, or a compiler that is not installed."""
    if item.get_closest_marker("libtpu") and importlib.util.find_spec("libtpu") is None:
        return "not installed: libtpu (the extra `tpu`)"
    return next((mark.kwargs["reason"] for mark in item.iter_markers("skipif") if mark.args[0]), None)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Takes the counts of a process of pytest-xdist, all of which collect the same tests."""
    node.config.stash[NOT_COLLECTED] = getattr(node, "workeroutput", {}).get("not_collected", {})


def pytest_terminal_summary(terminalreporter, config):
    if not GPU:
        terminalreporter.write_line("not collected: tests/device, because no NVIDIA GPU is here")
    for reason, count in config.stash.get(NOT_COLLECTED, {}).items():
        terminalreporter.write_line(f"not collected: {count} tests: {reason}")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TILE_SCHEDULER_CACHE", str(tmp_path / "cache.db"))
    monkeypatch.delenv("TILE_SCHEDULER_ON_MISS", raising=False)
    monkeypatch.delenv("TILE_SCHEDULER_PLAN", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("scheduler.rewriting.interleaved.SAMPLE_S", 0.02)  # nothing here tells a few percent apart
    # No test finds what another one decided: not of a call, of which a process keeps decisions, nor of a function.
    if "scheduler.dispatch.dispatch" in sys.modules:
        sys.modules["scheduler.dispatch.dispatch"].reload()
    monkeypatch.setattr("scheduler.rewriting.stored_decisions.find", lambda _: None)


@pytest.fixture(autouse=True)
def _bounded_memory():
    """Drops compiled programs where they fill memory: a process runs thousands of tests, and JAX keeps all programs."""
    yield
    if "jax" in sys.modules and _resident_bytes() > MOST_RESIDENT_BYTES:
        sys.modules["jax"].clear_caches()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # glibc keeps freed pages otherwise


def _resident_bytes() -> int:
    """The resident memory of this process; 0 where the system does not tell (not Linux)."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


@pytest.fixture(scope="module")
def postgres():
    """The URL of a PostgreSQL server of our own."""
    with server() as running:
        yield running.url


@pytest.fixture
def open_path():
    """A place for a cache that every user may reach, as they may not reach `tmp_path`."""
    with tempfile.TemporaryDirectory(prefix="tile scheduler#") as name:
        Path(name).chmod(0o755)
        yield Path(name) / "cache.db"


@pytest.fixture
def tiled_only(monkeypatch):
    """What is lowered for Hopper has the tiled layout, as all JAX does before 0.11."""
    monkeypatch.setattr("search_spaces.hopper.smem_layout.HAS_UNTILED_SWIZZLE", False)
