"""What ptxas makes of the norm of a sum for sm_90, without a GPU.

This file as a program writes the PTX of one schedule.
"""

import json
import re
import sys

import hopper
import machine_code
import pytest

from scheduler.model.cost import CostModel
from scheduler.model.pruning import prune
from search_spaces import Columns, load

pytestmark = [machine_code.needed(), pytest.mark.slow]
KERNEL = "mosaic_gpu"
# The top predictions, of a decoding batch, of prefill, and of rows in SMEM and in a pipeline.
PROBLEMS = [(16, 4096), (4096, 4096), (8192, 8192), (512, 100000)]


def top_prediction(problem):
    return prune(load("add_rms_norm").kernel(KERNEL), problem, hopper.H200, CostModel(hopper.H200)).candidates()[0]


@pytest.mark.parametrize(("rows", "columns"), PROBLEMS)
def test_the_top_prediction_spills_nothing_and_needs_about_the_registers_that_it_declares(rows, columns, tmp_path):
    operation = load("add_rms_norm")
    problem = operation.problem(rows, columns)
    fields = dict(top_prediction(problem).schedule)
    said, file, _ = machine_code.compiled(__file__, tmp_path, problem.canonical(), json.dumps(fields))
    ptx = file.read_text()
    assert "0 bytes spill stores" in said
    schedule = operation.kernel(KERNEL).space(problem, hopper.H200.target).decode(fields)
    declared = operation.kernel(KERNEL).footprint(problem, Columns.of([schedule]), hopper.H200.target)
    assert int(re.search(r"Used (\d+) registers", said)[1]) <= declared.registers[0] + 16
    assert "add.bf16x2" in ptx, "two sums an instruction"
    if fields["residency"] == "registers":
        each = columns // 128 // fields["vector"]
        first_store = ptx.index("st.global")
        assert ptx[:first_store].count("ld.global") == 3 * each, "all loads are under way before anything is stored"
        assert ptx[:first_store].count("bar.sync") <= ptx.count("bar.sync") - 2, "the sum, before the reduction"


def main(canonical: str, schedule: str) -> None:
    operation = load("add_rms_norm")
    problem, kernel = operation.problem.from_canonical(canonical), operation.kernel(KERNEL)
    one = kernel.space(problem, hopper.H200.target).decode(json.loads(schedule))
    machine_code.compile_for_h200(lambda *args: kernel.run(problem, one, hopper.H200.target, *args), problem.operands())


if __name__ == "__main__":
    main(*sys.argv[1:])
