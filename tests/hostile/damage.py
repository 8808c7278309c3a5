"""A cache that is cut short or has bits flipped, and how a damaged cache is judged.

A call never fails and is right, no schedule runs that is none of its kernel's, no command ends with a traceback, and
what is wrong is told once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import random
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
from attack import Tried, seeded
from typer.testing import CliRunner

import scheduler
from scheduler.cli.app import app
from scheduler.core import codec
from scheduler.core.errors import StoreError
from scheduler.core.hardware import CPU
from scheduler.core.records import Calibration, Entry, Environment, Failure, Measurement, Record, Trial, key_of
from scheduler.dispatch import dispatch
from scheduler.model.pruning import illegal
from scheduler.search import tuner
from scheduler.store import cache, store
from search_spaces.matmul import MATMUL, MatmulProblem
from search_spaces.problem import Problem

PROBLEMS = [MatmulProblem(m, 16, 24, "float32") for m in (8, 16, 24, 32)]
NOW = Environment("0.0.0", "0.0.0", "", "2026-01-01T00:00:00Z")
COMMANDS = (
    "list",
    "list --json",
    "export",
    "show matmul m=16 n=16 k=24 dtype=float32",
    "list --operation matmul",
    "doctor",
)


def filled(path: Path) -> None:
    """A cache with a record of each problem, some trials and constants."""
    with contextlib.closing(store.Store(path)) as kept:
        for problem in PROBLEMS:
            kept.put(record(problem))
            for number in range(4):
                outcome = Failure("verify", "off") if number == 2 else Measurement(1e-3, (1e-3,), "wall", "warm")
                trial = Trial(number, "interpret", 1, {"tile_m": 8}, outcome, 1e-3)
                kept.save_trials(key_of(MATMUL, problem, CPU), [trial], NOW)
        kept.put_calibration(Calibration(CPU.id, "matmul", "xla", 1, {"p": 5.0}, 4, 100, 0.1, NOW))


def record(problem: MatmulProblem) -> Record:
    entries = [
        Entry("interpret", 1, {"tile_m": 8, "tile_n": 16, "tile_k": 16, "minor": "m"}, _time(1e-4), 1e-4),
        Entry("xla", 1, {}, _time(2e-4), 1e-4),
    ]
    return Record(key_of(MATMUL, problem, CPU), tuple(entries), {"interpret": 1, "xla": 1}, NOW, 4, 4, 8)


def _time(seconds: float) -> Measurement:
    return Measurement(seconds, (seconds,) * 3, "wall", "warm")


def broken_files(seed: int, tries: int) -> Tried:
    """Truncations and bit flips."""
    tried = Tried()
    with tempfile.TemporaryDirectory() as place:
        whole = Path(place) / "whole.db"
        filled(whole)
        content = whole.read_bytes()
        for number, draw in seeded(seed, tries):
            damaged, words = _damaged(content, draw)
            path = Path(place) / f"{number}.db"
            path.write_bytes(damaged)
            with cache_at(path):
                tried.run(f"{number}, {words}", functools.partial(wrong, path, draw))
            for file in Path(place).glob(f"{number}.db*"):
                file.unlink()
    return tried


def _damaged(content: bytes, draw: random.Random) -> tuple[bytes, str]:
    if draw.random() < 0.3:
        length = draw.randrange(len(content))
        return content[:length], f"cut after {length} bytes"
    flipped = bytearray(content)
    places = [draw.choice((draw.randrange(100), draw.randrange(len(content)))) for _ in range(draw.choice((1, 4, 64)))]
    for place in places:
        flipped[place] ^= 1 << draw.randrange(8)
    return bytes(flipped), f"bits flipped at {sorted(places)[:5]}"


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextlib.contextmanager
def cache_at(path: Path) -> Iterator[None]:
    before = os.environ.get("TILE_SCHEDULER_CACHE")
    os.environ["TILE_SCHEDULER_CACHE"] = str(path)
    scheduler.reload()
    try:
        yield
    finally:
        scheduler.reload()
        cache.reset_timeouts()
        if before is None:
            del os.environ["TILE_SCHEDULER_CACHE"]
        else:
            os.environ["TILE_SCHEDULER_CACHE"] = before


def wrong(path: Path, draw: random.Random) -> str | None:
    """What is wrong with calls, commands and a search on this cache; None where nothing is."""
    log = _Log()
    logging.getLogger("scheduler").addHandler(log)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for problem in (*PROBLEMS[:2], MatmulProblem(9, 16, 24, "float32")):
                if wrong := _wrong_call(problem):
                    return wrong
            scheduler.reload()
            if wrong := _wrong_call(PROBLEMS[0]):
                return wrong
            if wrong := _wrong_command(draw.choice(COMMANDS)):
                return wrong
        told = [*(str(each.message) for each in warned), *log.messages]
        repeated = {message for message in told if told.count(message) > 1}
        if repeated:
            return f"told {told.count(next(iter(repeated)))} times: {next(iter(repeated))}"
        return _wrong_search(path) if draw.random() < 0.1 else None
    finally:
        logging.getLogger("scheduler").removeHandler(log)


def _wrong_call(problem: Problem) -> str | None:
    assert isinstance(problem, MatmulProblem)
    a, b = jnp.ones((problem.m, problem.k)), jnp.ones((problem.k, problem.n))
    if not bool((scheduler.tuned_matmul(a, b) == problem.k).all()):
        return f"the answer to {problem} is wrong"
    decision = dispatch.decide(MATMUL, problem, "cpu", dispatch.options(MATMUL))
    return illegal(decision.kernel, problem, CPU, dataclasses.asdict(decision.schedule))


def _wrong_command(command: str) -> str | None:
    ended = CliRunner().invoke(app, command.split(), prog_name="tile-scheduler")
    if ended.exception is not None and not isinstance(ended.exception, SystemExit):
        raise ended.exception
    expected = (0, 1, 3) if command == "doctor" else (0, 1)  # 3: something is out of date
    return None if ended.exit_code in expected else f"{command} ended with {ended.exit_code}"


def _wrong_search(path: Path) -> str | None:
    """A search there stores its record, or says why it cannot."""
    from operations import DOUBLE, DoubleProblem
    from rehearsal import Rehearsal

    with contextlib.closing(store.Store(path)) as kept, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            made = tuner.tune(DOUBLE, DoubleProblem(8), budget=3, store=kept, runner=Rehearsal())
        except StoreError:  # asked before anything was measured
            return None
        with contextlib.suppress(StoreError):
            if not warned and kept.get(made.key) != made:
                return "a search was told that its record is stored, and it is not"
    return None


assert codec.record_from_text(codec.record_to_text(record(PROBLEMS[0])))  # or nothing here tells anything
