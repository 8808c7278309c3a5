"""What all tests share: no test reads or writes the user's own cache, and Ctrl-C means what it means at a terminal."""

import ctypes
import gc
import importlib.util
import os
import signal
import sys
import tempfile
import zlib
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


def pytest_addoption(parser):
    parser.addoption("--share", default="1/1", help="parts of all tests, by their names: 1/3, or 2,3/3 for the others")


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their markers
def pytest_collection_modifyitems(config, items):
    seen = set()
    for item in items:
        function = item.nodeid.partition("[")[0]
        if function in seen and item.get_closest_marker("slow_but_first"):
            item.add_marker("slow")
        seen.add(function)
    parts, _, count = config.getoption("--share").partition("/")
    numbers = {int(part) - 1 for part in parts.split(",")}
    left_out = [item for item in items if zlib.crc32(item.nodeid.encode()) % int(count) not in numbers]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % int(count) in numbers]


def pytest_runtest_setup(item):
    if item.get_closest_marker("libtpu") and importlib.util.find_spec("libtpu") is None:
        pytest.skip("not installed: libtpu (the extra `tpu`)")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TILE_SCHEDULER_CACHE", str(tmp_path / "cache.db"))
    monkeypatch.delenv("TILE_SCHEDULER_ON_MISS", raising=False)
    monkeypatch.delenv("TILE_SCHEDULER_PLAN", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("scheduler.functions.comparison.SAMPLE_S", 0.02)  # nothing here tells a few percent apart


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
