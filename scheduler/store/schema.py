"""The tables of a store, and the SQL that creates the current schema."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from scheduler.core.neighbours import SUMS, place_of

# Coordinates of a record's problem among similar ones (`neighbours.Coordinates`), and whether its times are estimates.
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
DECISIONS = sa.table("decisions", *map(sa.column, ("key", "decision")))
KEY = ("operation", "hardware", "problem")
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


# The steps from schema version i to i + 1, for each i. A released step never changes, so that a file of any age ends up
# the same. {serial} is a number that the database increments.
MIGRATIONS: tuple[Sequence[str], ...] = (
    (
        "CREATE TABLE schema_version (version BIGINT NOT NULL)",
        "INSERT INTO schema_version VALUES (0)",
        f"""CREATE TABLE schedules (
             operation TEXT NOT NULL, hardware TEXT NOT NULL, problem TEXT NOT NULL,
             backend TEXT NOT NULL, kernel_version BIGINT NOT NULL, schedule TEXT NOT NULL,
             median_s DOUBLE PRECISION NOT NULL, xla_s DOUBLE PRECISION,
             jax TEXT NOT NULL, jaxlib TEXT NOT NULL, driver TEXT NOT NULL, date TEXT NOT NULL,
             record TEXT NOT NULL,
             pattern TEXT, estimated BIGINT, size DOUBLE PRECISION,
             {", ".join(f"{name} DOUBLE PRECISION" for name in SUM_COLUMNS)},
             PRIMARY KEY (operation, hardware, problem))""",
        "CREATE INDEX schedules_by_place ON schedules "
        f"(operation, hardware, pattern, estimated, size, {', '.join(SUM_COLUMNS)})",
        # The searches of a problem, each with the name of its Optuna study. Optuna creates the tables of studies.
        """CREATE TABLE searches (
             id {serial} PRIMARY KEY,
             operation TEXT NOT NULL, hardware TEXT NOT NULL, problem TEXT NOT NULL, study TEXT NOT NULL,
             jax TEXT NOT NULL, jaxlib TEXT NOT NULL, driver TEXT NOT NULL, date TEXT NOT NULL,
             finished BIGINT NOT NULL DEFAULT 0)""",
        "CREATE INDEX searches_by_key ON searches (operation, hardware, problem)",
        "CREATE INDEX searches_unfinished ON searches (operation, hardware, problem) WHERE finished = 0",
        # The process that tunes a problem now, and the Unix time in seconds at which its lease expires unless renewed.
        """CREATE TABLE leases (
             operation TEXT NOT NULL, hardware TEXT NOT NULL, problem TEXT NOT NULL,
             owner TEXT NOT NULL, expires_s DOUBLE PRECISION NOT NULL,
             PRIMARY KEY (operation, hardware, problem))""",
        # The fitted constants of the cost model, of one kernel on one chip.
        """CREATE TABLE constants (
             hardware TEXT NOT NULL, operation TEXT NOT NULL, backend TEXT NOT NULL,
             kernel_version BIGINT NOT NULL, date TEXT NOT NULL, calibration TEXT NOT NULL,
             PRIMARY KEY (hardware, operation, backend))""",
        # Cache misses of calls: how often the problem was lowered, when, from which line, and the file that defines
        # its operation.
        """CREATE TABLE misses (
             operation TEXT NOT NULL, hardware TEXT NOT NULL, problem TEXT NOT NULL,
             lowered BIGINT NOT NULL, first TEXT NOT NULL, last TEXT NOT NULL, line TEXT NOT NULL, place TEXT NOT NULL,
             PRIMARY KEY (operation, hardware, problem))""",
    ),
    # The decisions of `optimize`, each for one function and its arguments.
    ("CREATE TABLE decisions (key TEXT PRIMARY KEY, decision TEXT NOT NULL)",),
)
VERSION = sa.table("schema_version", sa.column("version"))
# Tables of every schema since the first one, which identify a database of this program.
OLDEST = frozenset({"schema_version", "schedules"})
# {serial} in a migration, by database.
SERIAL = {"sqlite": "INTEGER", "postgresql": "BIGSERIAL"}
