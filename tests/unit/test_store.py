"""The store: nothing is lost, nothing is executed, and whatever is wrong is one StoreError that says what to do."""

import contextlib
import dataclasses
import logging
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import strategies
import values
from hypothesis import HealthCheck, given, settings
from modes import frozen, with_modes

from scheduler.core import codec
from scheduler.core.errors import StoreError
from scheduler.core.records import Calibration, Failure, Key
from scheduler.store import database, text_files
from scheduler.store.database import file_system
from scheduler.store.schema import MIGRATIONS
from scheduler.store.store import Store, build_shipped, default_url


@pytest.fixture
def memory():
    with contextlib.closing(Store(":memory:")) as store:
        yield store


@pytest.fixture
def path(tmp_path):
    """A place that a URL would have to quote, in a directory that is not there yet."""
    return tmp_path / "a b#c?d%20 é" / "cache.db"


def other_key(**fields):
    return dataclasses.replace(values.KEY, **fields)


def execute(path, *statements):
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


# What a store does, on every kind of database.


@pytest.fixture(params=["memory", "file", "postgres"])
def any_store(request, path):
    url = {"memory": ":memory:", "file": path}.get(request.param) or request.getfixturevalue("postgres")
    with contextlib.closing(Store(url)) as store:
        yield store
        for record in list(store.records()):
            store.forget(record.key)


def test_the_last_record_of_a_key_is_the_one_that_is_found(any_store):
    assert any_store.get(values.KEY) is None
    any_store.put(values.record(measurement=values.SLOW))
    any_store.put(values.record())
    any_store.put(values.record(other_key(problem="{}")))
    assert any_store.get(values.KEY) == values.record()
    assert len(list(any_store.records())) == 2


def test_forget_deletes_the_record_and_its_trials_and_no_others(any_store):
    for key in (values.KEY, other_key(operation="softmax")):
        any_store.put(values.record(key))
        any_store.save_trials(key, [values.trial()], values.ENVIRONMENT)
    assert any_store.forget(values.KEY) == 2
    assert any_store.forget(values.KEY) == 0
    assert (any_store.get(values.KEY), any_store.trials(values.KEY)) == (None, [])
    assert any_store.get(other_key(operation="softmax")) is not None
    assert any_store.trials(other_key(operation="softmax")) == [values.trial()]
    any_store.forget(other_key(operation="softmax"))


def test_trials_come_back_in_the_order_they_ended(any_store):
    trials = [values.trial(number) for number in (3, 0, 11, 2)] + [values.trial(4, Failure("compile", "no \0 'smem'"))]
    for trial in trials:
        any_store.save_trials(values.KEY, [trial], values.ENVIRONMENT)
    assert any_store.trials(values.KEY) == trials
    any_store.forget(values.KEY)


def test_a_lease_is_its_owners_until_it_is_released_or_taken_over_as_it_was_seen(any_store):
    if not any_store._database.shared:
        assert [any_store.lease(values.KEY, owner, 60).owner for owner in "ab"] == ["a", "b"]
        return

    def take(owner, key=values.KEY, **how):
        return any_store.lease(key, owner, 60, **how).owner

    other = other_key(problem="{}")
    assert take("a") == "a"
    assert take("b") == "a"
    assert take("b", other) == "b"
    any_store.release(values.KEY, "b")
    assert take("b") == "a"
    any_store.release(values.KEY, "a")
    assert take("b") == "b"
    seen = any_store.lease(values.KEY, "b", -1e5)  # by a clock that is a day late
    assert take("a") == "b"
    assert take("a", expired=dataclasses.replace(seen, expires_s=seen.expires_s + 1)) == "b"
    assert take("a", expired=seen) == "a"
    assert take("c", expired=seen) == "a"
    for key in (values.KEY, other):
        for owner in "ab":
            any_store.release(key, owner)


def test_records_are_filtered_and_sorted_the_same_everywhere(any_store):
    keys = [Key(o, h, p) for o in ("Zeta", "alpha") for h in ("b", "A") for p in ('{"m":10}', '{"m":9}')]
    for key in reversed(keys):
        any_store.put(values.record(key))
    assert [r.key for r in any_store.records()] == sorted(keys, key=lambda k: (k.operation, k.hardware, k.problem))
    assert {r.key for r in any_store.records(operation="alpha")} == set(keys[4:])
    assert [r.key.problem for r in any_store.records(operation="alpha", hardware="b")] == ['{"m":10}', '{"m":9}']
    assert list(any_store.records(hardware="c")) == []


def test_the_columns_say_what_a_person_asks(path):
    Store(path).put(values.record())
    with contextlib.closing(sqlite3.connect(path)) as connection:
        row = connection.execute("SELECT backend, kernel_version, median_s, xla_s, jax, date FROM schedules").fetchone()
    assert row == ("mosaic_gpu", 3, 1e-4, 2e-4, "0.11.2", "2026-03-01T12:00:00Z")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(strategies.records)
def test_any_record_survives_the_store(memory, record):
    memory.put(record)
    assert memory.get(record.key) == record


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(strategies.trials)
def test_any_trial_survives_the_store(memory, trial):
    memory.finish(values.KEY)  # the search of the last example
    memory.save_trials(values.KEY, [trial], values.ENVIRONMENT)
    assert memory.trials(values.KEY)[-1] == trial


def test_a_search_resumes_only_on_trials_of_its_own_versions(memory):
    later = dataclasses.replace(values.ENVIRONMENT, date="2026-03-02T00:00:00Z")
    newer = dataclasses.replace(values.ENVIRONMENT, jax="0.12.0")
    for number, environment in enumerate((values.ENVIRONMENT, newer, later)):
        memory.save_trials(values.KEY, [values.trial(number)], environment)
    assert [trial.number for trial in memory.trials(values.KEY, values.ENVIRONMENT)] == [0, 2]


def test_what_is_unfinished_is_every_search_that_did_not_end(any_store):
    cut, ended, gone = (dataclasses.replace(values.KEY, operation=name) for name in ("cut", "ended", "gone"))
    for key in (gone, cut, ended):
        for number in range(2):
            any_store.save_trials(key, [values.trial(number)], values.ENVIRONMENT)
    any_store.put(values.record(key=ended))
    any_store.finish(gone)
    assert any_store.unfinished() == {cut: [values.trial(0), values.trial(1)]}
    assert any_store.unfinished("ended") == {}
    any_store.save_trials(ended, [values.trial(2)], values.ENVIRONMENT)  # of a search that was asked for again
    assert any_store.unfinished() == {cut: [values.trial(0), values.trial(1)], ended: [values.trial(2)]}


def test_what_could_not_be_read_again_is_not_stored(memory):
    with pytest.raises(StoreError, match=r"predicted_s|JSON compliant"):
        memory.save_trials(
            values.KEY, [dataclasses.replace(values.trial(), predicted_s=float("nan"))], values.ENVIRONMENT
        )
    assert memory.trials(values.KEY) == []


# Several processes.

WRITER = """
import sys, time
sys.path[:0] = [{tests!r}, {root!r}]
import values
from scheduler.core.records import Key
from scheduler.store.store import Store
store = Store({url!r})
print("ready", flush=True)
sys.stdin.readline()
for number in range({count}):
    key = Key("matmul", sys.argv[1], str(number))
    assert store.get(key) is None
    store.put(values.record(key))
    store.save_trials(values.KEY, [values.trial(number)], values.ENVIRONMENT)
print("done", flush=True)
"""


@contextlib.contextmanager
def writers(url, processes, count):
    """Processes that have opened `url` and wait for a line before they write `count` records each."""
    here = Path(__file__).parents[1]
    code = WRITER.format(tests=str(here), root=str(here.parent), url=str(url), count=count)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = [subprocess.Popen([sys.executable, "-c", code, f"chip {i}"], **pipes) for i in range(processes)]
    try:
        assert [process.stdout.readline() for process in started] == ["ready\n"] * processes
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "postgres"])
def test_four_processes_that_make_a_cache_together_lose_nothing(kind, path, request):
    url = path if kind == "file" else request.getfixturevalue("postgres")
    if kind == "postgres":
        import psycopg

        with psycopg.connect(url) as connection:
            connection.execute("DROP SCHEMA public CASCADE")
            connection.execute("CREATE SCHEMA public")
    with writers(url, 4, 30) as processes:
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        assert [process.stdout.read() for process in processes] == ["done\n"] * 4
    with contextlib.closing(Store(url)) as store:
        assert len(list(store.records())) == 120
        assert len(store.trials(values.KEY)) == 120
        for record in list(store.records()):
            store.forget(record.key)
        store.forget(values.KEY)


def test_a_killed_writer_leaves_a_file_that_reads(path):
    with writers(path, 1, 100_000) as [process]:
        process.stdin.write("go\n")
        process.stdin.flush()
        store = Store(path)
        while len(list(store.records())) < 20:
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
    numbers = sorted(int(record.key.problem) for record in store.records())
    assert numbers == list(range(len(numbers)))
    store.put(values.record())
    assert store.get(values.KEY) == values.record()


def test_a_reader_neither_waits_for_a_writer_nor_stops_one(path):
    store = Store(path)
    store.put(values.record())
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert store.get(values.KEY) == values.record()
        other.execute("ROLLBACK")
        other.execute("BEGIN")
        other.execute("SELECT * FROM schedules").fetchall()
        store.put(values.record(measurement=values.SLOW))


# Files: made when needed, migrated, left alone when newer.


def test_a_look_up_makes_no_file(path):
    store = Store(path)
    assert (store.get(values.KEY), store.trials(values.KEY), list(store.records())) == (None, [], [])
    assert store.forget(values.KEY) == 0
    assert not path.parent.exists()


def test_a_file_that_goes_away_is_made_again(path):
    store = Store(path)
    store.put(values.record())
    for file in path.parent.iterdir():
        file.unlink()
    assert store.get(values.KEY) is None
    store.put(values.record())
    assert store.get(values.KEY) == values.record()


def test_a_store_at_rest_is_one_file_named_as_it_was_asked(path):
    Store(path).put(values.record())
    assert [file.name for file in path.parent.iterdir()] == ["cache.db"]


@pytest.mark.parametrize("form", [str, lambda path: f"sqlite:///{path}"])
def test_a_path_and_an_sqlite_url_are_the_same_file(tmp_path, form):
    Store(tmp_path / "cache.db").put(values.record())
    assert Store(form(tmp_path / "cache.db")).get(values.KEY) == values.record()


def test_a_trial_found_wrong_later_is_replaced_where_it_stands():
    store, trials = Store(":memory:"), [values.trial(number) for number in range(3)]
    store.save_trials(values.KEY, trials, values.ENVIRONMENT)
    wrong = values.trial(0, Failure("verify", "with other inputs 3 of 4 elements are off"))
    store.save_trials(values.KEY, [wrong], values.ENVIRONMENT)
    assert store.trials(values.KEY) == [wrong, *trials[1:]]


def test_trials_that_are_saved_again_are_stored_once(any_store):
    key, trials = other_key(operation="saved_again"), [values.trial(number) for number in range(3)]
    for several in (trials[:2], trials, trials):
        any_store.save_trials(key, several, values.ENVIRONMENT)
    assert any_store.trials(key) == trials


def test_constants_are_kept_by_chip_and_kernel_and_refitting_replaces_them(any_store):
    def fitted(backend, value, hardware="one chip"):
        return Calibration(hardware, "matmul", backend, 1, {"p": value}, 7, 900, 0.04, values.ENVIRONMENT)

    for calibration in (fitted("xla", 5.0), fitted("mosaic_gpu", 6.0), fitted("xla", 7.0), fitted("xla", 8.0, "two")):
        any_store.put_calibration(calibration)
    assert any_store.calibrations(hardware="one chip") == [fitted("mosaic_gpu", 6.0), fitted("xla", 7.0)]
    assert any_store.calibrations(operation="softmax") == []
    assert len(any_store.calibrations()) == 3
    assert list(any_store.records()) == []


def test_a_migration_keeps_what_was_stored(path):
    Store(path).put(values.record())
    grown = (*MIGRATIONS, ("ALTER TABLE schedules ADD COLUMN note TEXT", "UPDATE schedules SET note = 'migrated'"))
    store = Store(path, migrations=grown)
    assert store.get(values.KEY) == values.record()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT note FROM schedules").fetchall() == [("migrated",)]
        assert connection.execute("SELECT version FROM schema_version").fetchall() == [(len(grown),)]


def test_a_migration_that_fails_leaves_the_file_as_it_was(path):
    Store(path).put(values.record())
    broken = (*MIGRATIONS, ("ALTER TABLE schedules ADD COLUMN note TEXT", "nonsense"))
    with pytest.raises(StoreError, match="nonsense"):
        Store(path, migrations=broken).get(values.KEY)
    assert Store(path).get(values.KEY) == values.record()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert "note" not in [row[1] for row in connection.execute("PRAGMA table_info(schedules)")]


def test_a_newer_schema_is_refused_and_never_touched(path):
    Store(path).put(values.record())
    execute(path, f"UPDATE schema_version SET version = {len(MIGRATIONS) + 1}")
    before = path.read_bytes()
    for use in (lambda s: s.get(values.KEY), lambda s: s.put(values.record()), lambda s: s.forget(values.KEY)):
        with pytest.raises(StoreError, match=r"newer tile-scheduler.*upgrade tile-scheduler"):
            use(Store(path))
    assert path.read_bytes() == before


# What goes wrong.


@pytest.mark.parametrize("content", [b"this is no database" * 100, b"SQLite format 3\0" + b"\x13" * 5000])
def test_a_corrupt_file_is_to_be_moved_away(path, content):
    path.parent.mkdir()
    path.write_bytes(content)
    for readonly in (False, True):
        with pytest.raises(StoreError, match="move it away"):
            Store(path, readonly=readonly).get(values.KEY)
    with pytest.raises(StoreError, match="move it away"):
        Store(path).put(values.record())


def test_pages_that_are_overwritten_are_an_error_not_an_answer(path):
    store = Store(path)
    for number in range(50):
        store.put(values.record(other_key(problem=str(number))))
    whole = path.read_bytes()
    path.write_bytes(whole[:4096] + b"\xa5" * (len(whole) - 4096))
    with pytest.raises(StoreError, match="move it away"):
        list(Store(path).records())


def test_a_lock_that_stays_is_an_error_that_says_so(path, monkeypatch):
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.05)
    store = Store(path)
    store.put(values.record())
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match=r"database is locked.*another process"):
            store.put(values.record())


def test_a_full_disk_is_an_error_that_says_so(memory):
    memory.put(values.record())
    with memory._database._engine.connect() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
    trial = values.trial(outcome=Failure("compile", "x" * 10**6))
    with pytest.raises(StoreError, match=r"full.*free some space"):
        memory.save_trials(values.KEY, [trial], values.ENVIRONMENT)
    assert memory.get(values.KEY) == values.record()


def test_a_directory_that_cannot_be_made_is_an_error_that_names_the_setting(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="TILE_SCHEDULER_CACHE"):
        Store(tmp_path / "file" / "cache.db").put(values.record())


def test_a_directory_is_no_cache(tmp_path):
    for use in (lambda s: s.get(values.KEY), lambda s: s.put(values.record())):
        with pytest.raises(StoreError, match=r"unable to open.*set TILE_SCHEDULER_CACHE to a file"):
            use(Store(tmp_path))


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("mysql://host/base", "SQLite or PostgreSQL, found mysql"),
        ("://", "expected the URL of a database"),
        ("nonsense://x", "SQLite or PostgreSQL, found nonsense"),
        ("postgresql://host:port/base", "expected the URL of a database"),
        ("postgresql:/host/base", "expected a path or a URL that begins with postgresql://"),
        ("postgres:base", "expected a path or a URL that begins with postgres://"),
        ("sqlite:/tmp/a.db", "expected a path or a URL that begins with sqlite://"),
        ("sqlite://tmp/a.db", "an SQLite URL must not have a host"),
        ("sqlite:////tmp/a.db?mode=ro", "an SQLite URL must not have options"),
    ],
)
def test_a_url_of_another_kind_is_refused(url, reason):
    with pytest.raises(StoreError, match=reason):
        Store(url)


def test_a_password_is_never_told(tmp_path):
    pytest.importorskip("psycopg", reason="PostgreSQL's driver is missing: pip install 'psycopg[binary]'")
    store = Store(f"postgresql://someone:secret@/base?host={tmp_path}")
    with pytest.raises(StoreError) as caught:
        store.get(values.KEY)
    assert "secret" not in str(caught.value) + store.location
    assert "someone" in store.location


@pytest.mark.parametrize("line", ["{}", "nonsense", codec.record_to_text(values.record(other_key(problem="{}")))])
def test_a_malformed_record_is_an_error_to_get_and_a_warning_to_list(path, line, caplog):
    store = Store(path)
    for operation in ("matmul", "softmax"):
        store.put(values.record(other_key(operation=operation)))
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE schedules SET record = ? WHERE operation = 'matmul'", (line,))
    with pytest.raises(StoreError, match=r"record of matmul .*malformed.*tune it again"):
        store.get(values.KEY)
    with caplog.at_level(logging.WARNING):
        assert [record.key.operation for record in store.records()] == ["softmax"]
    assert len(caplog.messages) == 1
    assert "record of matmul" in caplog.messages[0]
    assert store.forget(values.KEY) == 1


def test_a_malformed_trial_is_skipped_with_a_warning(path, caplog):
    store = Store(path)
    for number in range(2):
        store.save_trials(values.KEY, [values.trial(number)], values.ENVIRONMENT)
    execute(path, "UPDATE trial_user_attributes SET value_json = '{}' WHERE key = 'trial' AND trial_id = 1")
    with caplog.at_level(logging.WARNING):
        assert store.trials(values.KEY) == [values.trial(1)]
    assert "trial 1 of matmul" in caplog.text


def test_rows_that_are_known_by_no_text_are_skipped_and_told_once(path, caplog):
    store = Store(path)
    for operation in ("matmul", "softmax"):
        store.put(values.record(other_key(operation=operation)))
        store.save_trials(other_key(operation=operation), [values.trial()], values.ENVIRONMENT)
    for table in ("schedules", "searches"):
        execute(path, f"UPDATE {table} SET problem = x'ff00' WHERE operation = 'matmul'")
    execute(path, "UPDATE schedules SET record = 7 WHERE operation = 'softmax'")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert list(store.records()) == []
            assert {key.operation for key in list(store.keys())} == {"softmax"}
            assert [key.operation for key in store.unfinished()] == ["softmax"]
    assert len(caplog.messages) == len(set(caplog.messages)) == 2
    with pytest.raises(StoreError, match="malformed"):
        store.get(other_key(operation="softmax"))


# Read-only, and the shipped file.


def test_readonly_answers_and_refuses_writes(path):
    Store(path).put(values.record())
    store = Store(path, readonly=True)
    assert store.get(values.KEY) == values.record()
    writes = (
        lambda: store.put(values.record()),
        lambda: store.forget(values.KEY),
        lambda: store.save_trials(values.KEY, [values.trial()], values.ENVIRONMENT),
    )
    for write in writes:
        with pytest.raises(StoreError, match="read-only"):
            write()
    assert [file.name for file in path.parent.iterdir()] == ["cache.db"]


def test_readonly_holds_in_the_database_too(path):
    Store(path).put(values.record())
    with (
        Store(path, readonly=True)._database._engine.connect() as connection,
        pytest.raises(Exception, match="readonly"),
    ):
        connection.exec_driver_sql("DELETE FROM schedules")


def test_readonly_sees_what_only_the_log_of_a_writer_holds(path):
    Store(path).put(values.record())
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("PRAGMA journal_mode=WAL")
        other.execute("SELECT * FROM schedules").fetchall()  # Keeps the log from being folded into the file.
        Store(path).put(values.record(measurement=values.SLOW))
        assert (path.parent / "cache.db-wal").exists()
        assert Store(path, readonly=True).get(values.KEY) == values.record(measurement=values.SLOW)


def test_a_copy_that_lacks_its_log_says_how_to_copy(path, tmp_path):
    path.parent.mkdir()
    execute(path, "PRAGMA journal_mode=WAL")
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("SELECT * FROM sqlite_master").fetchall()
        Store(path).put(values.record())
        shutil.copy(path, tmp_path / "copy.db")
    with pytest.raises(StoreError, match="VACUUM INTO"):
        Store(tmp_path / "copy.db", readonly=True).get(values.KEY)


def test_readonly_of_nothing_is_an_error(path):
    with pytest.raises(StoreError, match="unable to open"):
        Store(path, readonly=True).get(values.KEY)
    assert not path.parent.exists()


def test_the_shipped_file_is_one_file_with_the_same_bytes_each_time(tmp_path):
    records = [values.record(other_key(problem=f'{{"m":{m}}}')) for m in range(30)]
    text_files.add_records(tmp_path / "records", records)
    first, second = tmp_path / "a" / "first.db", tmp_path / "a" / "second.db"
    first.parent.mkdir()
    assert build_shipped(tmp_path / "records", first) == 30
    second.write_text("whatever was there before")
    build_shipped(tmp_path / "records", second)
    assert first.read_bytes() == second.read_bytes()
    assert sorted(file.name for file in first.parent.iterdir()) == ["first.db", "second.db"]
    assert first.read_bytes()[18:20] == b"\x01\x01"  # No write-ahead log (SQLite, "Database File Format", 1.3.3).
    assert list(Store(first, readonly=True).records()) == text_files.read_records(tmp_path / "records")


def test_the_shipped_file_opens_in_a_directory_that_cannot_be_written(tmp_path):
    place = tmp_path / "frozen"
    place.mkdir()
    text_files.add_records(tmp_path / "records", [values.record()])
    build_shipped(tmp_path / "records", place / "cache.db")
    (place / "cache.db").chmod(0o444)
    place.chmod(0o555)
    try:
        assert Store(place / "cache.db", readonly=True).get(values.KEY) == values.record()
    finally:
        place.chmod(0o755)


# Files that may be read only.


def test_a_filled_cache_that_may_only_be_read_answers_as_before_and_leaves_nothing_behind(open_path):
    writer = Store(open_path)
    writer.put(values.record())
    writer.save_trials(values.KEY, [values.trial()], values.ENVIRONMENT)
    before = open_path.read_bytes()
    assert before[18:20] == b"\x02\x02"  # it is written ahead: read as usual, it would want two more files
    with frozen(open_path):
        for store in (Store(open_path), writer):
            assert store.get(values.KEY) == values.record()
            assert store.trials(values.KEY) == [values.trial()]
            assert list(store.records()) == [values.record()]
            assert store.keys() == [values.KEY]
            assert store.calibrations() == []
    assert open_path.read_bytes() == before
    assert [file.name for file in open_path.parent.iterdir()] == ["cache.db"]


@pytest.mark.parametrize("opened", ["before", "after"])
def test_every_write_to_a_cache_that_may_only_be_read_is_one_error_that_says_what_to_do(open_path, opened):
    Store(open_path).put(values.record())
    store = Store(open_path)
    if opened == "before":
        assert store.get(values.KEY)
    calibration = Calibration("one chip", "matmul", "xla", 1, {"p": 5.0}, 7, 900, 0.04, values.ENVIRONMENT)
    writes = (
        lambda: store.require_writable(),
        lambda: store.put(values.record()),
        lambda: store.forget(values.KEY),
        lambda: store.finish(values.KEY),
        lambda: store.lease(values.KEY, "me", 1),
        lambda: store.save_trials(values.KEY, [values.trial()], values.ENVIRONMENT),
        lambda: store.put_calibration(calibration),
    )
    with frozen(open_path):
        for write in writes:
            with pytest.raises(StoreError, match=r"may only be read.*set TILE_SCHEDULER_CACHE to a copy"):
                write()
    store.put(values.record(measurement=values.SLOW))
    assert store.get(values.KEY) == values.record(measurement=values.SLOW)


def written_ahead(path):
    """A connection to a cache at `path` that keeps its log from being folded into the file, and so from going away."""
    path.parent.mkdir(exist_ok=True)
    execute(path, "PRAGMA journal_mode=WAL")
    other = sqlite3.connect(path)
    other.execute("SELECT * FROM sqlite_master").fetchall()
    Store(path).put(values.record())
    return contextlib.closing(other)


def test_what_only_the_log_of_a_frozen_cache_holds_is_read_or_missed_with_words(path, open_path):
    with written_ahead(path):
        for ending in ("", "-wal", "-shm"):
            shutil.copy(f"{path}{ending}", f"{open_path}{ending}")
    log, index = (open_path.with_name(f"cache.db{ending}") for ending in ("-wal", "-shm"))
    with frozen(open_path, log, index):
        assert Store(open_path).get(values.KEY) == values.record()
    index.unlink()
    with frozen(open_path, log), pytest.raises(StoreError, match=r"the content of cache.db-wal .* to a copy of both"):
        Store(open_path).get(values.KEY)
    assert Store(open_path).get(values.KEY) == values.record()
    index.touch()  # left behind alone, it tells nothing
    with frozen(open_path, index):
        assert Store(open_path).get(values.KEY) == values.record()


def test_who_may_only_read_sees_what_a_writer_adds_meanwhile(open_path):
    Store(open_path).put(values.record())
    reader = Store(open_path)
    with contextlib.closing(sqlite3.connect(open_path, isolation_level=None)) as writer:
        writer.execute("SELECT * FROM schedules").fetchall()
        beside = [open_path.with_name(f"cache.db{ending}") for ending in ("-wal", "-shm")]
        with frozen(open_path, *beside):
            assert [r.key for r in reader.records()] == [values.KEY]
        writer.execute("DELETE FROM schedules")
        with frozen(open_path, *beside):
            assert list(reader.records()) == []


def test_a_frozen_cache_of_an_older_schema_says_who_can_bring_it_up_to_date(open_path):
    Store(open_path).put(values.record())
    grown = (*MIGRATIONS, ("ALTER TABLE schedules ADD COLUMN note TEXT",))
    with frozen(open_path), pytest.raises(StoreError, match=r"only a writer .* a copy that can be wr"):
        Store(open_path, migrations=grown).get(values.KEY)
    assert Store(open_path, migrations=grown).get(values.KEY) == values.record()


def test_a_directory_that_may_not_be_entered_is_an_error_that_names_the_setting(open_path):
    Store(open_path).put(values.record())
    with with_modes({open_path.parent: 0o600}):
        for use in (lambda s: s.get(values.KEY), lambda s: s.put(values.record()), lambda s: s.forget(values.KEY)):
            with pytest.raises(StoreError, match="TILE_SCHEDULER_CACHE"):
                use(Store(open_path))


# Databases of other programs.


def test_the_file_of_another_program_is_refused_and_never_touched(path):
    path.parent.mkdir()
    execute(path, *(f"CREATE TABLE {name} (id INTEGER)" for name in ("places", "bookmarks", "schema_version")))
    before = path.read_bytes()
    uses = (lambda s: s.get(values.KEY), lambda s: s.put(values.record()), lambda s: s.lease(values.KEY, "me", 1))
    for use in uses:
        with pytest.raises(StoreError, match=r"tables bookmarks, places, schema_version, .* set TILE_SCHEDULER_CACHE"):
            use(Store(path))
    assert path.read_bytes() == before
    execute(
        path, "DROP TABLE bookmarks", "DROP TABLE schema_version", *(f"CREATE VIEW v{i} AS SELECT 1" for i in range(9))
    )
    with pytest.raises(StoreError, match=r"places, v0, v1, v2, v3 and 5 more"):
        Store(path).get(values.KEY)


def test_an_empty_file_is_a_new_cache(path):
    path.parent.mkdir()
    path.touch()
    Store(path).put(values.record())
    assert Store(path).get(values.KEY) == values.record()


def test_a_database_that_is_shared_with_others_is_ours_by_our_tables_names(postgres):
    import psycopg

    def run(*statements):
        with psycopg.connect(postgres) as connection:
            for statement in (
                "DROP SCHEMA public CASCADE",
                "CREATE SCHEMA public",
                *statements,
            ):
                connection.execute(statement)

    run("CREATE TABLE orders (id BIGINT)")
    with contextlib.closing(Store(postgres)) as store:
        store.put(values.record())
        assert store.get(values.KEY) == values.record()
    run("CREATE TABLE schedules (id BIGINT)")
    with contextlib.closing(Store(postgres)) as store, pytest.raises(StoreError, match="with the table schedules,"):
        store.get(values.KEY)
    run()


# Where a cache is.


def test_the_cache_is_where_the_environment_says_or_in_the_users_directory(monkeypatch):
    monkeypatch.setenv("TILE_SCHEDULER_CACHE", "postgresql://host/base")
    assert default_url() == "postgresql://host/base"
    monkeypatch.delenv("TILE_SCHEDULER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    if sys.platform == "linux":
        assert default_url() == "/somewhere/tile-scheduler/cache.db"


def test_the_file_system_of_a_path_is_that_of_the_innermost_mount(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/sda / ext4 rw 0 0\nserver:/home /home nfs4 rw 0 0\ntmpfs /home/a\\040b tmpfs rw 0 0\n"
        "/dev/sdb /data ext4 rw 0 0\n//server/data /data cifs rw 0 0\n"
    )
    places = {"/etc/x": "ext4", "/home/x/y": "nfs4", "/home/a b/c": "tmpfs", "/homes": "ext4", "/data/x": "cifs"}
    assert {place: file_system(Path(place), mounts) for place in places} == places
    assert file_system(Path("/etc"), tmp_path / "missing") == ""


@pytest.mark.parametrize(("kind", "mode"), [("ext4", "wal"), ("nfs4", "delete"), ("", "delete")])
def test_the_log_is_written_ahead_only_where_that_is_safe(path, kind, mode, monkeypatch):
    monkeypatch.setattr(database, "file_system", lambda _: kind)
    Store(path).put(values.record())
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == (mode,)


def test_import_scheduler_loads_no_sqlalchemy():
    code = "import sys, scheduler; sys.exit('sqlalchemy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
