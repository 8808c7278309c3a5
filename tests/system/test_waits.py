"""A call waits five seconds in all for a store that does not answer, once a process; what else asks has limits, too."""

import contextlib
import os
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import sqlalchemy as sa
import values

from scheduler.core.errors import StoreError
from scheduler.store import cache
from scheduler.store import database as driver
from scheduler.store.store import Store

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CALLS = """
import warnings
import jax.numpy as jnp
import scheduler
from scheduler.store import cache
asked, ask = [], cache._StoreRequest._run
cache._StoreRequest._run = lambda request: asked.append(request) or ask(request)
a = jnp.ones((64, 64))
scheduler.tuned_softmax(a, backends="xla")
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    for rows in (1, 2, 3):
        assert (scheduler.tuned_matmul(a[:rows], a) == 64).all()
        print(len(asked))
        scheduler.reload()
assert len(told) == 1, [str(each.message) for each in told]
assert "did not respond within" in str(told[0].message) or "cannot be read" in str(told[0].message)
"""


def requests_of_calls(url):
    """How often the store had been asked after each of three calls, before each of which answers were forgotten."""
    env = os.environ | {"TILE_SCHEDULER_CACHE": str(url), "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run([sys.executable, "-c", CALLS], env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return [int(line) for line in ended.stdout.split()]


@contextlib.contextmanager
def silent_server():
    """Accepts connections, and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept = []
        threading.Thread(target=lambda: kept.extend(iter(lambda: server.accept()[0], None)), daemon=True).start()
        yield f"postgresql://someone@127.0.0.1:{server.getsockname()[1]}/base"


@contextlib.contextmanager
def locked_file(path):
    Store(path).put(values.record())
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA locking_mode=EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        other.execute("UPDATE schema_version SET version = version")
        yield path


@pytest.mark.parametrize("what", ["a server that never answers", "a file that another process has locked"])
def test_calls_wait_five_seconds_in_all_once_a_process(what, tmp_path):
    if what == "a server that never answers":
        pytest.importorskip("psycopg", reason="PostgreSQL's driver is missing: pip install 'psycopg[binary]'")
    with silent_server() if "server" in what else locked_file(tmp_path / "cache.db") as url:
        first, *later = requests_of_calls(url)
    assert cache.TIMEOUT_S <= 5
    assert first > 0
    assert later == [first, first], "a store that made a call wait is asked again"


def test_what_answers_promptly_costs_no_patience_and_what_does_not_adds_up(monkeypatch):
    monkeypatch.setattr(cache, "TIMEOUT_S", 0.5)
    monkeypatch.setattr(cache, "PROMPT_S", 0.1)
    now, ended = [0.0], threading.Event()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def after(seconds):
        now[0] += seconds
        return 1

    def too_late():
        after(0.2)
        ended.wait()

    for _ in range(20):
        assert cache.call_with_timeout("prompt", lambda: after(0.03)) == 1
    assert not cache.has_given_up("prompt")
    for _ in range(2):
        assert cache.call_with_timeout("slow", lambda: after(0.2)) == 1
    with pytest.raises(cache.StoreTimeout, match=r"slow did not respond within 0\.5 s"):
        cache.call_with_timeout("slow", too_late)
    ended.set()
    asked = []
    with pytest.raises(cache.StoreTimeout):
        cache.call_with_timeout("slow", lambda: asked.append("again"))
    assert asked == []
    with pytest.raises(StoreError, match="no such file"):
        cache.call_with_timeout("prompt", lambda: (_ for _ in ()).throw(StoreError("no such file")))


def test_a_search_may_still_use_a_store_that_calls_gave_up(tmp_path, monkeypatch):
    from scheduler.store.cache import Cache

    monkeypatch.setattr(cache, "has_given_up", lambda location: True)
    layers = Cache()
    layers.put(values.record())
    assert layers.get(values.KEY) == values.record()
    assert Store(tmp_path / "cache.db").get(values.KEY) == values.record()


def of(url):
    return sa.make_url(url).set(drivername="postgresql+psycopg")


def test_no_statement_of_a_server_is_waited_for_without_end(postgres, monkeypatch):
    engine = driver.postgres_engine(of(postgres))
    with engine.connect() as connection:
        limits = connection.exec_driver_sql(
            "SELECT current_setting('statement_timeout'), current_setting('lock_timeout')"
        ).one()
    assert tuple(limits) == ("15s", "10s")
    engine = driver.postgres_engine(of(f"{postgres}&options=-c%20statement_timeout%3D1234"))
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT current_setting('statement_timeout')").scalar_one() == "1234ms"
        connection.rollback()
        monkeypatch.setattr(driver, "LONGEST_S", 0.5)
    engine = driver.postgres_engine(of(f"{postgres}&options=-c%20geqo%3Doff"))
    with engine.connect() as connection, pytest.raises(sa.exc.OperationalError):  # it would end well after 60 s
        connection.exec_driver_sql("SELECT pg_sleep(60)")
