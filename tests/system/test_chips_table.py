"""The table of chips in the documents."""

import sys
from pathlib import Path

import pytest

from scheduler.store import text_files
from search_spaces.jax_compat import HAS_MMA

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import chips_table

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not HAS_MMA, reason="this JAX compiles no kernel for GPUs before Hopper")
def test_the_table_of_chips_is_that_of_the_kernels_and_the_shipped_records():
    page, records = chips_table.PAGE.read_text(), text_files.read_records(ROOT / "records")
    assert chips_table.with_chips(page, records) == page, "run, with JAX 0.11.2 or newer: benchmarks/chips_table.py"
    for row in chips_table.chips(records)[2:]:
        assert row in page
