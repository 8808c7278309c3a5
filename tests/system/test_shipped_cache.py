"""The shipped cache.db holds what records/ says; `make package` reads it from an installed wheel."""

from pathlib import Path

from scheduler.store import text_files
from scheduler.store.store import shipped

ROOT = Path(__file__).parents[2]


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
