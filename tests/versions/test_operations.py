"""Every operation on this JAX: random problems beside float64; shipped kernels are lowered, others interpreted."""

import math
from pathlib import Path

import hopper
import pytest
from attacks import ATTACKS
from failures import failures

from scheduler.core.hardware import CPU
from scheduler.core.records import Failure
from scheduler.measure.runner import InProcess, Task
from scheduler.search.candidates import smaller
from scheduler.store import text_files
from search_spaces import load_known
from search_spaces.jax_compat import HAS_GPU_INTERPRETER

NUMBERS = {attack.name: attack for attack in ATTACKS if attack.numbers}
interpreted = pytest.mark.skipif(not HAS_GPU_INTERPRETER, reason="JAX interprets GPU kernels from 0.11 on")
RECORDS = text_files.read_records(Path(__file__).parents[2] / "records")


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", [pytest.param(n, marks=interpreted if n == "gpu-kernels" else ()) for n in NUMBERS])
def test_random_problems_agree_with_float64(name):
    tried = NUMBERS[name].run(0, NUMBERS[name].quick)
    assert tried.tries
    assert not tried.failures


@pytest.mark.slow
def test_a_schedule_of_each_other_operation_is_right_on_a_cpu_for_a_smaller_problem():
    drawn = {name.replace("-", "_") for name in NUMBERS}
    problems = {r.key.operation: r.key.problem for r in RECORDS if r.key.operation not in drawn}

    def check(name):
        operation = load_known(name)
        problem = smaller(operation.problem.from_canonical(problems[name]), _is_small)
        for kernel in operation.kernels:
            if kernel.supports(problem, CPU.target) is None:
                points, _ = kernel.space(problem, CPU.target).legal()
                outcome = InProcess().measure(Task(operation, problem, kernel.backend, points.row(0), 1))
                assert not isinstance(outcome, Failure), f"{kernel.backend}, {problem}: {outcome}"

    assert len(problems) >= 17
    assert failures(check, problems) == []


def _is_small(problem):
    return sum(math.prod(x.shape) for x in problem.operands()) <= 2**15


@pytest.mark.slow
@pytest.mark.skipif(not HAS_GPU_INTERPRETER, reason="some shipped kernels need JAX 0.11")
def test_a_shipped_kernel_of_each_operation_is_lowered_for_the_chip_that_measured_it():
    records = {}
    for record in RECORDS:
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
