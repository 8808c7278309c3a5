"""Kernels by warp-level MMA as machine code for an A100, an A40 and an L40S, without a GPU; their PTX run by NumPy.

This file as a program compiles for one chip; a process knows one architecture.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import machine_code
import pytest
from mma_matmul import CASES

from search_spaces.jax_compat import HAS_MMA

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
pytestmark = [
    pytest.mark.slow,
    machine_code.needed(),
    pytest.mark.skipif(not HAS_MMA, reason="Mosaic GPU compiles for these chips from jax 0.11.2 on"),
]
FP8 = "fp8"
DRAWN = 4  # schedules of each chip; benchmarks/results has 200


def told(*arguments):
    """What the program prints of each thing that it compiles."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    ran = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, env=env)
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    assert lines, ran.stderr[-3000:]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("kind", ["A100", "NVIDIA A40", "NVIDIA L40S"])
def test_drawn_schedules_that_the_model_calls_legal_spill_nothing_and_ask_for_what_it_predicts(kind):
    rows = told("drawn", kind)
    assert len(rows) == DRAWN
    for row in rows:
        assert "error" not in row
        assert row["spilled_bytes"] == 0
        assert row["onchip_bytes"] == row["predicted"]["onchip_bytes"]


@pytest.mark.parametrize("name", CASES)
def test_the_ptx_computes_what_the_reference_does_without_a_race(name):
    (found,) = told("numbers", "A100", name)
    assert found == {"case": name, "spilled_bytes": 0}


def test_the_ptx_of_fp8_computes_what_the_reference_does():
    (found,) = told("numbers", "NVIDIA L40S", FP8)
    assert found == {"case": FP8, "spilled_bytes": 0}


def main(what: str, kind: str, name: str = "") -> None:
    folder = Path(tempfile.mkdtemp())
    import absent_gpu

    absent_gpu.prepare(folder)
    if what == "drawn":
        import mma_fit

        for row in mma_fit.measured("matmul", kind, DRAWN, seed=7, least=0, also=(), folder=folder):
            print(json.dumps(row), flush=True)
        return
    import dataclasses

    import mma_matmul

    from scheduler.core import hardware
    from search_spaces.matmul.problem import MatmulProblem

    if name == FP8:
        problem = MatmulProblem(70, 65, 200, dtype="float8_e4m3fn", out_dtype="float32", transpose_b=True)
        schedule = dataclasses.replace(mma_matmul.BASE, tile_k=64)
    else:
        problem, schedule = mma_matmul.case(name)
    answer, found = mma_matmul.emulated(problem, schedule, hardware.find(kind), folder)
    mma_matmul.check(problem, answer)
    print(json.dumps({"case": name, "spilled_bytes": found.spilled_bytes}))


if __name__ == "__main__":
    main(*sys.argv[1:])
