"""Of the shelf, all tests run if its sources changed since all of them passed; else those marked `always`."""

import hashlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The digest of `SOURCES` with which all tests passed. `make check-contrib` runs them and writes it.
CHECKED = Path(__file__).with_name("checked.sha256")
# The shelf, its tests, the classes that it implements or is called with, and the versions of JAX and of libtpu.
SOURCES = (
    "search_spaces/contrib/**/*.py", "scheduler/contrib/**/*.py", "tests/contrib/*.py",
    "search_spaces/kernel.py", "search_spaces/operation.py", "search_spaces/problem.py", "search_spaces/space.py",
    "search_spaces/footprint.py", "search_spaces/target.py", "scheduler/core/chip_table.py",
    "scheduler/measure/protocol.py", "scheduler/measure/runner.py", "scheduler/search/job_queue.py",
    "scheduler/search/task.py", "constraints/*.txt",
)  # fmt: skip


def digest() -> str:
    found = hashlib.sha256()
    for file in sorted(file for pattern in SOURCES for file in ROOT.glob(pattern)):
        found.update(f"{file.relative_to(ROOT)}\0{file.read_text()}\0".encode())
    return found.hexdigest()


UNCHANGED = CHECKED.exists() and CHECKED.read_text().strip() == digest()


def pytest_itemcollected(item):
    if UNCHANGED and not item.get_closest_marker("always"):
        reason = f"of the shelf, which has not changed since they passed ({CHECKED.relative_to(ROOT)})"
        item.add_marker(pytest.mark.skipif(True, reason=reason))


if __name__ == "__main__":
    print(digest())
