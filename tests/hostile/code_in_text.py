"""Text that others wrote (a record, an export, a job, a recording) names code: none of it runs by any command."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import os
import random
import sys
import tempfile
from pathlib import Path

import damage
import invented
from attack import Tried, seeded
from typer.testing import CliRunner

from scheduler.cli.app import app
from scheduler.core import codec
from scheduler.core.hardware import CPU
from scheduler.core.records import Key, Record
from scheduler.store import store, text_files

COMMANDS = (
    "list",
    "list --json",
    "show matmul m=8 n=16 k=24 dtype=float32",
    "export",
    "verify",
    "verify m=8",
    "verify --operation matmul",
    "import {export}",
    "check-records {export}",
    "check-records {records}",
    "export {records} --index",
    "tune-job {job} --json",
    "sweep --job {job} --out {place}/sweeps",
    "replay {sweep}",
    "explain matmul m=8 n=16 k=24 dtype=float32",
    "forget matmul m=8 n=16 k=24 dtype=float32",
    "forget --all",
    "build-cache {records} {place}/built.db",
    "doctor",
)


def tries(seed: int, count: int) -> Tried:
    """Each command once for each spelling of code that runs when it is loaded."""
    tried = Tried()
    for number, draw in seeded(seed, count):
        command = COMMANDS[number % len(COMMANDS)]
        with tempfile.TemporaryDirectory() as place:
            tried.run(f"{number}, {command}", functools.partial(_ran, command, Path(place), draw))
    return tried


def _ran(command: str, place: Path, draw: random.Random) -> str | None:
    """What is wrong after a command that met names of code everywhere; None where none of it ran."""
    mark, code = place / "it-ran", place / f"evil_{os.getpid()}_{draw.randrange(2**40)}.py"
    code.write_text(f"open({str(mark)!r}, 'w')\nfrom search_spaces.matmul import MATMUL as NAME\n")
    name = draw.choice((f"{code}:NAME", f"{code.stem}:NAME", f"{code.name}:NAME", f"./{code.name}:NAME"))
    evil = _of(name, draw)
    export, job, sweep, records = (place / n for n in ("export.jsonl", "job.toml", "sweep.jsonl.gz", "records"))
    export.write_text(text_files.export_text([evil]))
    shared = draw.random() < 0.5
    at_top, each = (f'operation = "{name}"', "") if shared else ("", f'operation = "{name}"')
    job.write_text(f"budget = 1\n{at_top}\n[[problem]]\n{each}\nm = 8\nn = 16\nk = 24\n")
    _recording(sweep, name)
    records.mkdir()
    text_files.add_records(records, [evil])
    cache, before, there = place / "cache.db", sys.path[:], os.getcwd()
    with damage.cache_at(cache):
        kept = store.Store(cache)
        kept.put(evil)
        kept.put(damage.record(damage.PROBLEMS[0]))
        kept.close()
        words = command.format(export=export, job=job, sweep=sweep, place=place, records=records)
        os.chdir(place)
        sys.path.insert(0, str(place))  # as the command itself does with the directory that it is called in
        try:
            ended = CliRunner().invoke(app, words.split(), prog_name="tile-scheduler")
        finally:
            os.chdir(there)
            sys.path[:] = before
    if mark.exists():
        return "the code ran"
    if ended.exception is not None and not isinstance(ended.exception, SystemExit):
        raise ended.exception
    return None


def _of(name: str, draw: random.Random) -> Record:
    made = damage.record(damage.PROBLEMS[0])
    problem = draw.choice((made.key.problem, name, "{}", f'{{"operation":"{name}"}}'))
    entries = tuple(dataclasses.replace(entry, backend=draw.choice((entry.backend, name))) for entry in made.entries)
    return dataclasses.replace(made, key=Key(name, CPU.id, problem), entries=entries)


@functools.cache
def _lines() -> tuple[str, ...]:
    with tempfile.TemporaryDirectory() as place:
        path = invented.recording(Path(place) / "sweep.jsonl.gz", (512, 512, 512), sample=3)
        return tuple(gzip.decompress(path.read_bytes()).decode().splitlines())


def _recording(path: Path, name: str) -> None:
    """A recorded sweep whose operation is this name."""
    head, *trials = _lines()
    named = codec.sweep_to_text(dataclasses.replace(codec.sweep_from_text(head), operation=name))
    path.write_bytes(gzip.compress("\n".join([named, *trials, ""]).encode()))
