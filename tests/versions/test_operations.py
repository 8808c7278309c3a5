"""Every operation on this JAX: random problems beside float64, and the kernels of shipped records lowered."""

from pathlib import Path

import hopper
import pytest
from attacks import ATTACKS
from failures import failures

from scheduler.store import text_files
from search_spaces import load_known
from search_spaces.jax_compat import HAS_GPU_INTERPRETER

NUMBERS = {attack.name: attack for attack in ATTACKS if attack.numbers}
ROOT = Path(__file__).parents[2]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", NUMBERS)
def test_random_problems_agree_with_float64(name):
    tried = NUMBERS[name].run(0, NUMBERS[name].quick)
    assert tried.tries
    assert not tried.failures


@pytest.mark.slow
@pytest.mark.skipif(not HAS_GPU_INTERPRETER, reason="some shipped kernels need JAX 0.11")
def test_a_shipped_kernel_of_each_operation_is_lowered_for_the_chip_that_measured_it():
    records = {}
    for record in text_files.read_records(ROOT / "records"):
        for entry in record.entries:
            if entry.backend.startswith("mosaic_gpu"):
                records.setdefault((record.key.operation, entry.backend), (record, entry))

    def lower(item):
        record, entry = item
        operation = load_known(record.key.operation)
        problem = operation.problem.from_canonical(record.key.problem)
        kernel = operation.kernel(entry.backend)
        hopper.lower(kernel, problem, kernel.space(problem, hopper.H200.target).decode(dict(entry.schedule)))

    assert len(records) > 20
    assert failures(lower, records.values(), name=lambda item: str(item[0].key)) == []
