"""The tables of a store, and the migrations from older schemas to the current one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import sqlalchemy as sa

from scheduler.core import codec
from scheduler.core.similar import SUMS, place_of

# Coordinates of a record's problem among similar ones (`similar.Place`), and whether its times are estimates.
SUM_COLUMNS = tuple(f"size_{index}" for index in range(SUMS))
PLACE = ("pattern", "estimated", "size", *SUM_COLUMNS)
# `record` and `trial` contain the complete text, which is read back. The other columns repeat values for SQL queries
# and for indexes.
SCHEDULES = sa.table(
    "schedules",
    *map(sa.column, ("operation", "hardware", "problem", "backend", "kernel_version", "schedule", "median_s", "xla_s")),
    *map(sa.column, ("jax", "jaxlib", "driver", "date", "record", "pattern", "estimated")),
    *(sa.column(name, sa.Double) for name in ("size", *SUM_COLUMNS)),
)
# A search and the name of its Optuna study, which has the trials. `studies.py` describes Optuna's own tables.
SEARCHES = sa.table(
    "searches",
    *map(sa.column, ("id", "operation", "hardware", "problem", "study", "jax", "jaxlib", "driver", "date", "finished")),
)
LEASES = sa.table("leases", *map(sa.column, ("operation", "hardware", "problem", "owner", "expires_s")))
CONSTANTS = sa.table(
    "constants", *map(sa.column, ("hardware", "operation", "backend", "kernel_version", "date", "calibration"))
)
MISSES = sa.table(
    "misses", *map(sa.column, ("operation", "hardware", "problem", "lowered", "first", "last", "line", "place"))
)
RANGES = sa.table(
    "ranges", *map(sa.column, ("operation", "hardware", "problem", "field", "low", "high", "date", "range"))
)
KEY = ("operation", "hardware", "problem")
RANGE_KEY = (*KEY, "field", "low", "high")
KERNEL_ON_CHIP = ("hardware", "operation", "backend")


def place_columns(problem: str, *, estimated: bool) -> dict[str, object]:
    """Returns the values of the columns `PLACE`."""
    place = place_of(problem)
    return {
        "pattern": place.pattern,
        "estimated": int(estimated),
        "size": place.size,
        **dict(zip(SUM_COLUMNS, place.sums, strict=True)),
    }


def _place_all(connection: sa.Connection) -> None:
    """Fills the columns `PLACE` of every readable record."""
    columns = SCHEDULES.c
    for *names, line in connection.execute(sa.select(*(columns[name] for name in KEY), columns.record)).all():
        try:
            record = codec.record_from_text(line)
        except ValueError:
            continue
        same = (columns[name] == value for name, value in zip(KEY, names, strict=True))
        values = place_columns(record.key.problem, estimated=record.estimated)
        connection.execute(sa.update(SCHEDULES).where(*same).values(values))


Step = str | Callable[[sa.Connection], None]
# Migrations from schema version i to i + 1. Released steps must not change, so that a file of any age gets the same
# schema. {serial} is an auto-increment column.
MIGRATIONS: tuple[Sequence[Step], ...] = (
    (
        "CREATE TABLE schema_version (version BIGINT NOT NULL)",
        "INSERT INTO schema_version VALUES (0)",
        """CREATE TABLE schedules (
             operation TEXT NOT NULL, hardware TEXT NOT NULL, problem TEXT NOT NULL,
             backend TEXT NOT NULL, kernel_version BIGINT NOT NULL, schedule TEXT NOT NULL,
             median_s DOUBLE PRECISION NOT NULL, xla_s DOUBLE PRECISION,
             jax TEXT NOT NULL, jaxlib TEXT NOT NULL, driver TEXT NOT NULL, date TEXT NOT NULL,
             record TEXT NOT NULL,
             PRIMARY KEY (operation, hardware, problem))""",
        """CREATE TABLE trials (
             id {serial} PRIMARY KEY,
             operation TEXT NOT NULL, hardware TEXT NOT NULL, problem TEXT NOT NULL,
             number BIGINT NOT NULL, backend TEXT NOT NULL, kernel_version BIGINT NOT NULL, schedule TEXT NOT NULL,
             predicted_s DOUBLE PRECISION NOT NULL, median_s DOUBLE PRECISION, failed_stage TEXT,
             jax TEXT NOT NULL, jaxlib TEXT NOT NULL, driver TEXT NOT NULL, date TEXT NOT NULL,
             trial TEXT NOT NULL)""",
        "CREATE INDEX trials_by_key ON trials (operation, hardware, problem)",
    ),
    (
        # 1 if the trial's search finished; only unfinished searches are resumed.
        "ALTER TABLE trials ADD COLUMN finished BIGINT NOT NULL DEFAULT 0",
        "UPDATE trials SET finished = 1",
    ),
    (
        # The owner of the right to tune a problem, and the Unix time of expiry in seconds unless it is renewed.
        """CREATE TABLE leases (
             operation TEXT NOT NULL, hardware TEXT NOT NULL, problem TEXT NOT NULL,
             owner TEXT NOT NULL, expires_s DOUBLE PRECISION NOT NULL,
             PRIMARY KEY (operation, hardware, problem))""",
    ),
    (
        # Fitted constants of the cost model, per kernel and chip.
        """CREATE TABLE constants (
             hardware TEXT NOT NULL, operation TEXT NOT NULL, backend TEXT NOT NULL,
             kernel_version BIGINT NOT NULL, date TEXT NOT NULL, calibration TEXT NOT NULL,
             PRIMARY KEY (hardware, operation, backend))""",
    ),
    (
        # Problems of calls without a record: how often each was lowered, when, from which line, and where its operation
        # is defined.
        """CREATE TABLE misses (
             operation TEXT NOT NULL, hardware TEXT NOT NULL, problem TEXT NOT NULL,
             lowered BIGINT NOT NULL, first TEXT NOT NULL, last TEXT NOT NULL, line TEXT NOT NULL, place TEXT NOT NULL,
             PRIMARY KEY (operation, hardware, problem))""",
    ),
    (
        # Problems that differ in one extent: the values with records, which are also used for values between them.
        """CREATE TABLE ranges (
             operation TEXT NOT NULL, hardware TEXT NOT NULL, problem TEXT NOT NULL,
             field TEXT NOT NULL, low BIGINT NOT NULL, high BIGINT NOT NULL,
             date TEXT NOT NULL, range TEXT NOT NULL,
             PRIMARY KEY (operation, hardware, problem, field, low, high))""",
    ),
    (
        # Indexes for records of similar problems and for interrupted searches.
        "ALTER TABLE schedules ADD COLUMN pattern TEXT",
        "ALTER TABLE schedules ADD COLUMN estimated BIGINT",
        "ALTER TABLE schedules ADD COLUMN size DOUBLE PRECISION",
        *(f"ALTER TABLE schedules ADD COLUMN {name} DOUBLE PRECISION" for name in SUM_COLUMNS),
        _place_all,
        "CREATE INDEX schedules_by_place ON schedules "
        f"(operation, hardware, pattern, estimated, size, {', '.join(SUM_COLUMNS)})",
        "CREATE INDEX trials_unfinished ON trials (operation, hardware, problem) WHERE finished = 0",
    ),
    (
        # Trials are in Optuna studies. Optuna creates its own tables, one of which is also named `trials`.
        "DROP TABLE trials",
        """CREATE TABLE searches (
             id {serial} PRIMARY KEY,
             operation TEXT NOT NULL, hardware TEXT NOT NULL, problem TEXT NOT NULL, study TEXT NOT NULL,
             jax TEXT NOT NULL, jaxlib TEXT NOT NULL, driver TEXT NOT NULL, date TEXT NOT NULL,
             finished BIGINT NOT NULL DEFAULT 0)""",
        "CREATE INDEX searches_by_key ON searches (operation, hardware, problem)",
        "CREATE INDEX searches_unfinished ON searches (operation, hardware, problem) WHERE finished = 0",
    ),
)
VERSION = sa.table("schema_version", sa.column("version"))
# Tables of every schema since the first one, which identify a database of this program.
OLDEST = frozenset({"schema_version", "schedules"})
# {serial} in a migration, by database.
SERIAL = {"sqlite": "INTEGER", "postgresql": "BIGSERIAL"}
