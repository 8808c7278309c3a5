"""Every Pallas schedule that is shipped for a TPU compiles for it, and takes no more VMEM than it may."""

import functools
import json
import sys

import pytest

from scheduler.core.hardware import find
from scheduler.measure import static_profile
from scheduler.store.store import shipped
from search_spaces import load
from tests.static_profiles import compiled, needs_libtpu

BACKEND = "mosaic_tpu"
CHIPS = ("v5e", "v5p", "v6e", "tpu7x")


def schedules(hardware):
    """Those of all shipped records of the chip, with their problems."""
    store = shipped()
    assert store is not None
    for record in store.records():
        if record.key.hardware == hardware.id:
            operation = load(record.key.operation)
            problem = operation.problem.from_canonical(record.key.problem)
            for entry in record.entries:
                if entry.backend == BACKEND:
                    yield operation, problem, entry.schedule


@pytest.mark.parametrize("chip", CHIPS)
def test_every_chip_that_is_estimated_ships_schedules_of_each_operation(chip):
    found = {operation.name for operation, _, _ in schedules(find(chip))}
    assert found >= {"matmul", "softmax", "rms_norm", "flash_attention"}


@needs_libtpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("chip", CHIPS)
def test_every_shipped_schedule_compiles(chip, tmp_path):
    said = json.loads(compiled(__file__, chip, tmp_path).splitlines()[-1])
    hardware = find(chip)
    assert len(said) == len(list(schedules(hardware)))
    assert [one for one in said if "failed" in one] == []
    assert all(0 < one["onchip_bytes"] <= hardware.onchip_bytes for one in said)


def _compile(chip):
    """What the compiler says of each: its on-chip bytes, or why it refuses."""
    hardware, said = find(chip), []
    for operation, problem, schedule in schedules(hardware):
        kernel = operation.kernel(BACKEND)
        of = kernel.space(problem, hardware.target).decode(schedule)
        run = functools.partial(kernel.run, problem, of, hardware.target)
        one = {"problem": f"{operation.name} {problem}", "schedule": dict(schedule)}
        try:
            one["onchip_bytes"] = static_profile.profile(run, problem.operands(), hardware).onchip_bytes
        except static_profile.OutOfOnchipMemory as refusal:
            one["failed"] = f"asks for {refusal.asked} bytes"
        said.append(one)
    return said


if __name__ == "__main__":
    print(json.dumps(_compile(sys.argv[1])))
