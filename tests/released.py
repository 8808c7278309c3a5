"""Writes the files that this version makes, with one row of each kind, to tests/released/VERSION.

python tests/released.py    before a release, and whenever a format changes until then
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile
from pathlib import Path

import values

import tile_scheduler
from scheduler.core import codec
from scheduler.core.plan import Figure, Plan, Planned
from scheduler.core.records import Calibration, Failure, Miss, Sweep
from scheduler.store import sources, text_files
from scheduler.store.store import Store

RELEASED = Path(__file__).parent / "released"

TRIALS = [values.trial(), values.trial(1, Failure("compile", "too much shared memory"))]
CALIBRATION = Calibration(
    values.KEY.hardware, "matmul", "mosaic_gpu", 3, {"e_hbm": 0.9, "p": 5.0}, 4, 900, 0.05, values.ENVIRONMENT
)
MISS = Miss(values.KEY, 3, "2026-02-01T12:00:00Z", "2026-02-02T12:00:00Z", "model.py:41")
DECISION = ("0" * 64, f"{'1' * 64} {{}}")
SWEEP = Sweep(
    "matmul", values.KEY.problem, "cuda", "NVIDIA H200", "sm_90", 132, values.ENVIRONMENT, {"mosaic_gpu": 3}, {},
    3000, {"a tile is at most the matrix": 2000}, 1000, 2, 0, 3,
)  # fmt: skip
PLAN = Plan(
    "step",
    values.KEY.hardware,
    values.ENVIRONMENT,
    "0.1.0",
    (Planned("matmul", values.KEY.problem, "mosaic_gpu", 3, values.SCHEDULE, "measured"),),
    (Figure("x: float32[64,32]", "uses 1 kernel", 2e-3, 3e-3),),
)


def write(directory: Path) -> None:
    """Writes a database as SQL, exported records with their index and constants, a recorded sweep and a plan."""
    text_files.add_records(directory, [values.record()])
    text_files.add_calibrations(directory, [CALIBRATION])
    sources.write_index(directory)
    PLAN.save(directory / "step.plan.json")
    lines = [codec.sweep_to_text(SWEEP), *map(codec.trial_to_text, TRIALS)]
    (directory / "sweep.jsonl").write_text("".join(f"{line}\n" for line in lines))
    with tempfile.TemporaryDirectory() as place:
        file = Path(place, "cache.db")
        with contextlib.closing(Store(file)) as store:
            store.put(values.record())
            store.save_trials(values.KEY, TRIALS, values.ENVIRONMENT)
            store.put_calibration(CALIBRATION)
            store.put_decision(*DECISION)
            store.misses.note([MISS])
            store.lease(values.KEY, "elsewhere/1/0", -1e9)
        with contextlib.closing(sqlite3.connect(file)) as connection:
            (directory / "cache.sql").write_text("".join(f"{line}\n" for line in connection.iterdump()))


if __name__ == "__main__":
    target = RELEASED / tile_scheduler.__version__
    shutil.rmtree(target, ignore_errors=True)
    write(target)
    print(f"wrote {target}")
