"""Files that a released version wrote are read by every later one; this version's are kept (tests/released.py)."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import re
import sqlite3

import pytest
import released
import values

import tile_scheduler
from scheduler.core.errors import StoreError
from scheduler.core.plan import Plan
from scheduler.measure import replay
from scheduler.store import sources, text_files
from scheduler.store.schema import MIGRATIONS
from scheduler.store.store import Store

VERSIONS = sorted(path.name for path in released.RELEASED.iterdir())


def tables(dump):
    """The SQL of the tables and indexes of the schema in a dump, which also has Optuna's."""
    names = re.findall(r"CREATE (?:TABLE|INDEX) (\w+)", " ".join(itertools.chain(*MIGRATIONS)))
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(dump.read_text())
        found = dict(connection.execute("SELECT name, sql FROM sqlite_master"))
    return {name: found.get(name) for name in names}


def test_what_this_version_writes_is_kept(tmp_path):
    released.write(tmp_path)
    kept = released.RELEASED / tile_scheduler.__version__
    message = "run python tests/released.py; after a release of this version, raise the version first"
    assert tables(tmp_path / "cache.sql") == tables(kept / "cache.sql"), message
    files = [path.relative_to(tmp_path) for path in tmp_path.rglob("*.json*")]
    assert len(files) == 5
    for file in files:
        assert (tmp_path / file).read_bytes() == (kept / file).read_bytes(), f"{file}: {message}"


@pytest.mark.parametrize("version", VERSIONS)
def test_the_database_of_a_released_version_is_read(tmp_path, version):
    file = tmp_path / "cache.db"
    with contextlib.closing(sqlite3.connect(file)) as connection:
        connection.executescript((released.RELEASED / version / "cache.sql").read_text())
    with contextlib.closing(Store(file)) as store:
        assert store.get(values.KEY) == values.record()
        assert store.trials(values.KEY) == released.TRIALS
        assert store.calibrations() == [released.CALIBRATION]
        assert store.misses.all() == [released.MISS]
        key, decision = released.DECISION
        assert store.decision(key) == decision
        assert store.lease(values.KEY, "here", 60).owner == "elsewhere/1/0"
        store.put(values.record(measurement=values.SLOW))
        assert store.forget(values.KEY) == 3


def test_trials_in_tables_of_another_optuna_are_read_and_none_are_added(tmp_path):
    file = tmp_path / "cache.db"
    with contextlib.closing(sqlite3.connect(file)) as connection:
        connection.executescript((released.RELEASED / tile_scheduler.__version__ / "cache.sql").read_text())
        connection.execute("UPDATE alembic_version SET version_num = 'v9.0.0.a'")
        connection.commit()
    with contextlib.closing(Store(file)) as store:
        assert store.trials(values.KEY) == released.TRIALS
        with pytest.raises(StoreError, match=r"optuna.*no longer compatible.*pip install -U optuna"):
            store.save_trials(values.KEY, [values.trial(7)], values.ENVIRONMENT)
        assert store.get(values.KEY) == values.record()


@pytest.mark.parametrize("version", VERSIONS)
def test_the_files_of_a_released_version_are_read(tmp_path, version):
    kept = released.RELEASED / version
    assert text_files.read_records(kept) == [values.record()]
    assert text_files.read_calibrations(kept) == [released.CALIBRATION]
    place = str(kept / "index.json")
    index = sources.index_of(sources.read(place))
    (source,) = sources.read_indexed(place, index.files, lambda line: None)
    assert [record.key for record in source.records()] == [values.KEY]
    assert Plan.load(kept / "step.plan.json") == released.PLAN
    recording = tmp_path / "sweep.gz"
    recording.write_bytes(gzip.compress((kept / "sweep.jsonl").read_bytes()))
    assert replay.read(recording) == (released.SWEEP, released.TRIALS)
