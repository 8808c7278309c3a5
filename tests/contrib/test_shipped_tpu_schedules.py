"""Every Pallas schedule that is shipped for a TPU compiles for it, and takes no more VMEM than it may."""

import contextlib
import dataclasses
import sys
from pathlib import Path

import pytest
from static_profiles import needs_libtpu

from scheduler.core.hardware import find
from scheduler.store.store import shipped

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from tpu_compiler import Asked

pytestmark = pytest.mark.slow

BACKEND = "mosaic_tpu"
CHIPS = ("v5e", "v5p", "v6e", "tpu7x")


def schedules(hardware):
    """Those of all shipped records of the chip, as `Asked` is asked about them."""
    return [
        {
            "operation": record.key.operation,
            "backend": BACKEND,
            "problem": record.key.problem,
            "schedule": dict(entry.schedule),
        }
        for record in shipped().records()
        for entry in record.entries
        if (record.key.hardware, entry.backend) == (hardware.id, BACKEND)
    ]


@pytest.mark.always
@pytest.mark.parametrize("chip", CHIPS)
def test_every_chip_that_is_estimated_ships_schedules_of_each_operation(chip):
    found = {one["operation"] for one in schedules(find(chip))}
    assert found == {"matmul", "softmax", "rms_norm", "add_rms_norm", "silu_and_mul", "flash_attention"}


@needs_libtpu
@pytest.mark.parametrize("chip", CHIPS)
def test_every_shipped_schedule_compiles(chip):
    hardware = find(chip)
    with contextlib.closing(Asked(dataclasses.replace(hardware, static_cycles=False))) as compiler:
        said = [one | compiler.ask(one) for one in schedules(hardware)]
    assert [one for one in said if "failed" in one or "refused_bytes" in one] == []
    assert all(0 < one["onchip_bytes"] <= hardware.onchip_bytes for one in said)
