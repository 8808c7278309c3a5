"""The shipped cache.db holds what records/ says, and a built wheel brings it along."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from scheduler.store import text_files
from scheduler.store.store import shipped

ROOT = Path(__file__).parents[2]

FIND = """
import scheduler.store.store
store = scheduler.store.store.shipped()
print(store.location)
print(len(list(store.records())))
"""


def test_cache_db_and_records_agree():
    store = shipped()
    assert store is not None
    assert Path(store.location) == ROOT / "cache.db"
    assert list(store.records()) == text_files.read_records(ROOT / "records"), "run: python -m scheduler build-cache"


def test_cache_db_and_the_constants_in_records_agree():
    store = shipped()
    assert store is not None
    kept = text_files.read_calibrations(ROOT / "records")
    assert store.calibrations() == kept, "run: python -m scheduler build-cache"
    assert {c.backend for c in kept if c.operation == "matmul"} == {"mosaic_gpu", "mosaic_gpu_bf16_3x", "xla"}


def test_every_file_of_records_is_sorted_and_in_its_place(tmp_path):
    written = text_files.add_records(tmp_path, text_files.read_records(ROOT / "records"))
    written = sorted([*written, *text_files.add_calibrations(tmp_path, text_files.read_calibrations(ROOT / "records"))])
    assert [file.relative_to(tmp_path) for file in written] == [
        file.relative_to(ROOT / "records") for file in sorted((ROOT / "records").glob("*/*"))
    ]
    for file in written:
        assert file.read_bytes() == (ROOT / "records" / file.relative_to(tmp_path)).read_bytes()


def test_a_wheel_finds_its_cache_db_when_installed(tmp_path):
    pytest.importorskip("hatchling", reason="building a wheel needs hatchling")
    run = {"check": True, "capture_output": True, "text": True}
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path], cwd=ROOT, **run)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("scheduler/cache.db") == (ROOT / "cache.db").read_bytes()
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--no-compile", "--target", site, wheel]
    subprocess.run(pip, **run)
    environment = os.environ | {"PYTHONPATH": str(site)}
    found = subprocess.run([sys.executable, "-c", FIND], cwd=tmp_path, env=environment, **run).stdout.splitlines()
    assert found == [str(site / "scheduler" / "cache.db"), str(len(text_files.read_records(ROOT / "records")))]
