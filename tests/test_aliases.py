"""Old spellings are read, everywhere, and are not written."""

import contextlib
import dataclasses
import gzip
import json
import sqlite3
from pathlib import Path

import pytest
import values

from scheduler.core import codec, identity
from scheduler.core.hardware import find, swept
from scheduler.core.records import Calibration, Entry, Failure
from scheduler.dispatch import dispatch
from scheduler.measure import replay
from scheduler.prediction.validation import recheck
from scheduler.search.jobs import parse_backends
from scheduler.store import text_files
from scheduler.store.store import Store
from search_spaces import Kernel, aliases, load
from search_spaces.hopper import smem_layout
from search_spaces.matmul import MATMUL, MatmulProblem
from search_spaces.softmax import SOFTMAX, SoftmaxProblem

ROOT = Path(__file__).parent.parent
SWEEPS = sorted(ROOT.glob("sweeps/*/*.jsonl.gz"))
OF_OPERATIONS = {"matmul": 55, "rms_norm": 26, "silu_and_mul": 13, "softmax": 28}

OLD = {"tile_m": 128, "tile_n": 256, "tile_k": 64, "stages": 4, "cluster": "none"}
OLD |= {"split": "m", "raster": "n", "raster_width": 8, "epilogue_n": 64}
NEW = {"tile_m": 128, "tile_n": 256, "tile_k": 64, "stages": 4, "cluster": "none"}
NEW |= {"consumers": "cooperative_m", "grid_minor_dim": "n", "grid_tile_width": 8, "epi_tile_n": 64}


@pytest.fixture(scope="session")
def old_cache(tmp_path_factory):
    """The shipped cache.db as it was before any name changed."""
    path = tmp_path_factory.mktemp("cache") / "cache.db"
    path.write_bytes(gzip.decompress((ROOT / "tests" / "data" / "cache_of_first_spellings.db.gz").read_bytes()))
    return path


@pytest.fixture(scope="session")
def old_lines(old_cache):
    with contextlib.closing(sqlite3.connect(old_cache)) as connection:
        return [line for (line,) in connection.execute("SELECT record FROM schedules")]


def of_old(**changed):
    return aliases.schedule(OLD | changed)


def test_fields_and_values_of_a_hopper_schedule_have_todays_names():
    assert of_old() == NEW
    assert of_old(swap=True, in_flight=1, split_k=2) == NEW | {"swap_ab": True, "delay_release": 1, "split_k": 2}
    assert [of_old(split=split)["consumers"] for split in ("none", "m", "n", "tiles")] == [
        "one",
        "cooperative_m",
        "cooperative_n",
        "ping_pong",
    ]
    assert [of_old(cluster=c)["cluster"] for c in ("none", "m", "n", "k")] == ["none", "m", "n", "split_k"]


ROWS = {"hold": "flow", "warps": 8, "vector": 8, "rows": 1, "pieces": 4, "slots": 13, "ahead": 0, "held": 0}


@pytest.mark.parametrize(
    ("old", "today"),
    [
        (ROWS, {"residency": "pipeline", "warps": 8, "vector": 8, "accesses": 4, "stages": 13}),
        (
            ROWS | {"ahead": 1, "cluster": 2},
            {
                "residency": "pipeline",
                "warps": 8,
                "vector": 8,
                "accesses": 4,
                "stages": 13,
                "prefetch": 1,
                "cluster": 2,
            },
        ),
        (
            ROWS | {"hold": "onchip", "slots": 0, "held": 2, "cluster": 1},
            {"residency": "smem", "warps": 8, "vector": 8, "accesses": 4, "register_chunks": 2},
        ),
        (
            ROWS | {"hold": "registers", "warps": 4, "rows": 2, "pieces": 0, "slots": 0},
            {"residency": "registers", "warps": 4, "vector": 8, "rows": 2},
        ),
    ],
    ids=["pipeline", "all of its fields", "smem", "registers"],
)
def test_a_row_schedule_keeps_its_residency_and_the_fields_of_that(old, today):
    assert aliases.schedule(old) == today
    assert aliases.schedule(today) == today
    space = SOFTMAX.kernel("mosaic_gpu").space(SoftmaxProblem(4096, 65536), find("NVIDIA H200").target)
    assert space.decode(old) == space.decode(today)
    assert space.encode(dataclasses.asdict(space.decode(old))) == today


def test_pieces_of_halves_are_accesses():
    assert aliases.schedule({"warps": 4, "vector": 8, "pieces": 2, "rows": 1}) == {
        "warps": 4,
        "vector": 8,
        "accesses": 2,
        "rows": 1,
    }


def test_todays_spelling_and_other_schedules_stay_as_they_are():
    for schedule in (NEW, {}, {"program": "plain"}, {"split": "m", "stages": 4}, values.SCHEDULE):
        assert aliases.schedule(schedule) == schedule


def test_a_space_decodes_both_spellings_to_one_schedule():
    space = MATMUL.kernel("mosaic_gpu").space(MatmulProblem(4096, 4096, 4096), find("NVIDIA H200").target)
    assert space.decode(OLD) == space.decode(NEW)
    assert space.encode(dataclasses.asdict(space.decode(OLD))) == NEW
    with pytest.raises(ValueError, match="no field 'raster'; did you mean"):
        space.decode({"raster": "n"})


def test_a_caller_may_give_an_old_schedule_and_an_old_backend():
    assert dispatch.options(MATMUL, schedule=OLD).schedule == dispatch.options(MATMUL, schedule=NEW).schedule
    assert MATMUL.kernel("portable") is MATMUL.kernel("interpret")
    assert parse_backends(MATMUL, "xla,portable") == {"xla", "interpret"}
    with pytest.raises(ValueError, match="no backend 'portables'"):
        MATMUL.kernel("portables")


def test_a_kernel_declared_under_an_old_name_of_a_backend_has_todays():
    """Its records are read under that name, too."""

    class Declared(Kernel):
        backend = "portable"

    assert Declared.backend == "interpret"


def test_a_store_of_before_is_gone_on_with(tmp_path):
    """The trial that is replaced, and the constants that newer ones replace, lie under the old name."""
    path, key, environment = tmp_path / "cache.db", values.KEY, values.ENVIRONMENT
    trial = dataclasses.replace(values.trial(), backend="interpret", schedule=NEW)
    constants = Calibration(key.hardware, key.operation, "interpret", 1, {"launch_s": 1e-6}, 1, 9, 0.1, environment)
    store = Store(path)
    store.add_trial(key, trial, environment)
    store.put_calibration(constants)
    old_trial = (
        codec.trial_to_text(trial)
        .replace('"interpret"', '"portable"')
        .replace(identity.schedule_to_text(NEW), identity.schedule_to_text(OLD))
    )
    old_constants = codec.calibration_to_text(constants).replace('"interpret"', '"portable"')
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(
            "UPDATE trial_user_attributes SET value_json = ? WHERE key = 'trial'", (json.dumps(old_trial),)
        )
        connection.execute("UPDATE constants SET backend = 'portable', calibration = ?", (old_constants,))
    assert store.trials(key) == [trial]
    assert store.calibrations() == [constants]
    wrong = dataclasses.replace(trial, outcome=Failure("verify", "max error 3"))
    newer = dataclasses.replace(constants, trials=10)
    store.replace_trial(key, wrong)
    store.put_calibration(newer)
    assert store.trials(key) == [wrong]
    assert store.calibrations() == [newer]


def test_every_record_shipped_before_is_read_and_served(old_cache, old_lines, monkeypatch):
    # As where they were measured: before JAX 0.11 ragged rows have their copies padded, and one schedule is not legal.
    monkeypatch.setattr(smem_layout, "HAS_UNTILED_SWIZZLE", True)
    store, hardware = Store(old_cache), find("NVIDIA H200")
    count = dict.fromkeys(OF_OPERATIONS, 0)
    for line in old_lines:
        raw, record = json.loads(line), codec.record_from_text(line)
        assert store.get(record.key) == record
        operation = load(record.key.operation)
        problem = operation.problem.from_canonical(record.key.problem)
        served = recheck(operation, problem, hardware, record)
        assert isinstance(served, Entry), f"{record.key}: {served}"
        assert (served.backend, served.measurement.median_s) == (
            raw["entries"][0]["backend"],
            raw["entries"][0]["measurement"]["median_s"],
        )
        for entry in record.entries:
            space = operation.kernel(entry.backend).space(problem, hardware.target)
            assert space.encode(dataclasses.asdict(space.decode(entry.schedule))) == entry.schedule
        assert len(record.confidence.tied) == len(raw.get("confidence", {}).get("tied", ()))
        if record.confidence.tied:
            winner = record.winner
            assert identity.label_of(winner.backend, winner.schedule) == record.confidence.tied[0]
        assert codec.record_from_text(codec.record_to_text(record)) == record
        count[operation.name] += 1
    assert count == OF_OPERATIONS
    assert {c.backend for c in store.calibrations()} == {"mosaic_gpu", "xla"}


def test_what_is_shipped_now_is_what_was_shipped_in_todays_spelling(old_lines):
    today = {record.key: record for record in text_files.read_records(ROOT / "records")}
    old = [codec.record_from_text(line) for line in old_lines]
    same = [record for record in old if today[record.key].environment == record.environment]
    assert same, "measured since: the records of before are no longer among those that are shipped"
    assert all(today[record.key] == record for record in same)
    for path in (ROOT / "records").glob("*/*.jsonl"):
        assert not any(
            f'"{name}":' in path.read_text()
            for name in (
                "split",
                "raster",
                "epilogue_n",
                "swap",
                "in_flight",
                "hold",
                "pieces",
                "slots",
                "ahead",
                "held",
            )
        )


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.name.split(".")[0])
def test_every_recorded_sweep_is_read_in_todays_spelling(path):
    sweep, trials = replay.read(path)
    operation = load(sweep.operation)
    problem = operation.problem.from_canonical(sweep.problem)
    hardware = swept(sweep)
    assert {trial.backend for trial in trials} <= set(operation.backends)
    assert sweep.refused.keys() <= set(operation.backends)
    runner = replay.Replay(path)
    for trial in (*trials, *replay.read_again(path)):
        space = operation.kernel(trial.backend).space(problem, hardware.target)
        assert space.encode(dataclasses.asdict(space.decode(trial.schedule))) == trial.schedule
        assert runner.version(trial.backend, trial.schedule) == trial.version
    assert len(trials) > 2
