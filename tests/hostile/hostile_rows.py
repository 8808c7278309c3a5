"""Rows of a cache that nobody of good will wrote: numbers that are none, other schedules, schemas, and nested JSON."""

from __future__ import annotations

import contextlib
import functools
import json
import random
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import damage
from attack import Tried, seeded

from scheduler.core.hardware import CPU
from scheduler.core.records import key_of
from scheduler.store.schema import MIGRATIONS
from search_spaces.matmul import MATMUL


def tries(seed: int, tries: int) -> Tried:
    """Rows of the tables that say anything at all."""
    tried = Tried()
    with tempfile.TemporaryDirectory() as place:
        whole = Path(place) / "whole.db"
        damage.filled(whole)
        content = whole.read_bytes()
        for number, draw in seeded(seed, tries):
            path = Path(place) / f"{number}.db"
            path.write_bytes(content)
            words = _poisoned(path, draw)
            with damage.cache_at(path):
                tried.run(f"{number}, {words}", functools.partial(damage.wrong, path, draw))
            for file in Path(place).glob(f"{number}.db*"):
                file.unlink()
    return tried


TRIALS = "trial_user_attributes"  # of Optuna: the attribute "trial" is the whole trial as text
NUMBERS = (
    "NaN",
    "-1",
    "0",
    "1e308",
    "-1e308",
    "Infinity",
    "1e999",
    "9" * 400,
    "-0.0",
    "true",
    "null",
    '"x"',
    "[]",
    "{}",
)
TEXTS = ('""', '"\\u0000"', '"\\ud800"', '"x; DROP TABLE schedules"', '"' + "a" * 100_000 + '"', "7", "null", '["a"]')


def _poisoned(path: Path, draw: random.Random) -> str:
    """Overwrites one thing of the cache: a value within a record, a record, a column, the schema's version."""
    kind = draw.choice(("value", "value", "value", "schedule", "schedule", "record", "column", "schema", "lease"))
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        match kind:
            case "value" | "schedule":
                table, column = draw.choice((("schedules", "record"), ("schedules", "record"), (TRIALS, "value_json"),
                                             ("constants", "calibration")))  # fmt: skip
                if kind == "schedule":
                    table, column = "schedules", "record"
                only = "WHERE key = 'trial'" if table == TRIALS else ""
                rows = connection.execute(f"SELECT rowid, {column} FROM {table} {only}").fetchall()
                rowid, text = draw.choice(rows)
                text = json.loads(text) if table == TRIALS else text
                changed, words = (_other_schedule if kind == "schedule" else _other_value)(text, draw)
                changed = json.dumps(changed) if table == TRIALS else changed
                connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (changed, rowid))
                return f"{table}: {words}"
            case "record":
                text = draw.choice(
                    ("", "{}", "[" * 10_000 + "]" * 10_000, '{"a":' * 10_000 + "1" + "}" * 10_000, "nonsense", "null",
                     "\udcff".encode(errors="surrogateescape").decode("latin-1"), '{"format": 1e400}', "7")
                )  # fmt: skip
                connection.execute("UPDATE schedules SET record = ?", (draw.choice((text, text.encode(), 3)),))
                return f"records are {text[:20]!r}"
            case "column":
                table, column = draw.choice(
                    (("schedules", "problem"), ("schedules", "median_s"), ("schedules", "operation"),
                     ("searches", "problem"), ("searches", "finished"), ("searches", "hardware"), ("searches", "study"),
                     ("trials", "number"), ("trials", "state"), (TRIALS, "value_json"), ("constants", "backend"))
                )  # fmt: skip
                value = draw.choice((-1, 2**63 - 1, "x", b"\xff\xfe", "", "[" * 10_000, "{}", 1e308))
                key = column if table != "schedules" or column not in ("problem", "operation") else f"{column}"
                sql = f"UPDATE {table} SET {key} = ? WHERE rowid = (SELECT min(rowid) FROM {table})"
                connection.execute(sql, (value,))
                return f"{table}.{column} is {str(value)[:20]!r}"
            case "schema":
                version = draw.choice((-1, 0, 1, len(MIGRATIONS) + 1, 2**40, "x", None, 1.5))
                with contextlib.suppress(sqlite3.IntegrityError):
                    connection.execute("UPDATE schema_version SET version = ?", (version,))
                return f"the schema's version is {version}"
            case _:
                row = key_of(MATMUL, damage.PROBLEMS[0], CPU)
                owner = draw.choice(("", "a/b/c", "h/-1/x", "\x00", b"\xff", 7))
                connection.execute("INSERT INTO leases VALUES (?, ?, ?, ?, ?)", (*vars(row).values(), owner, 1e300))
                return f"a lease of {owner!r}"


def _other_value(text: str, draw: random.Random) -> tuple[str, str]:
    """One value anywhere in JSON text is another, or there is a field that nobody knows."""
    parsed = json.loads(text)
    places = list(_places(parsed))
    holder, name = draw.choice(places)
    number = isinstance(holder[name], int | float)
    raw = draw.choice(NUMBERS if number else TEXTS) if draw.random() < 0.8 else draw.choice((*NUMBERS, *TEXTS))
    words = f"{name} is {raw[:20]}"
    if draw.random() < 0.1 and isinstance(holder, dict):
        name, words = "unknown", f"an unknown field is {raw[:20]}"
    holder[name] = "@here@"
    return json.dumps(parsed).replace('"@here@"', raw), words


def _places(parsed: Any) -> Iterator[tuple[Any, Any]]:
    items = parsed.items() if isinstance(parsed, dict) else enumerate(parsed) if isinstance(parsed, list) else ()
    for name, value in list(items):
        yield parsed, name
        yield from _places(value)


def _other_schedule(text: str, draw: random.Random) -> tuple[str, str]:
    """A schedule that breaks a rule, is of another kernel, has values of other types, or no end of them."""
    parsed = json.loads(text)
    schedule: dict[str, Any] = parsed["entries"][0]["schedule"]
    name = draw.choice(list(schedule))
    change: Callable[[], Any] = draw.choice(
        (
            lambda: schedule.update({name: draw.choice((0, -8, 7, 2**62, 10**300, True, "m", "x", ""))}),
            lambda: schedule.pop(name),
            lambda: schedule.update(unknown=1),
            lambda: schedule.clear(),
            lambda: parsed["entries"][0].update(backend=draw.choice(("mosaic_gpu", "xla", "", "interpret", "nobody"))),
            lambda: parsed["entries"][0].update(version=draw.choice((0, 2, 2**62))),
            lambda: parsed.update(versions=draw.choice(({}, {"interpret": 2}, {"nobody": 1}))),
            lambda: schedule.update({f"field{i}": i for i in range(5000)}),
        )
    )
    change()
    return json.dumps(parsed), f"the schedule is {str(schedule)[:60]} of {parsed['entries'][0]['backend']}"
