"""The scaled product as machine code, without a GPU: schedules that the model prefers, and those that hold the most.

This file as a program writes the PTX of one of them.
"""

import json
import sys

import machine_code
import pytest

pytestmark = [machine_code.needed(), pytest.mark.slow]

LARGE = {"tile_m": 128, "tile_n": 128, "stages": 5, "epi_tile_n": 64}
CASES = {  # name: the problem, and fields of the schedule that differ from the model's first choice
    "4096 rows": ({"m": 4096}, {}),
    "4096 rows, 64 x 128 of each consumer": ({"m": 4096}, LARGE | {"consumers": "cooperative_m"}),
    "4096 rows, 128 x 64 of each consumer": ({"m": 4096}, LARGE | {"consumers": "cooperative_n"}),
    "4096 rows, scales of a by rows": ({"m": 4096, "a_scales": "rows"}, LARGE | {"consumers": "cooperative_m"}),
    "4096 rows, scales by rows": ({"m": 4096, "a_scales": "rows", "b_scales": "rows"}, {}),
    "4096 rows, scales by rows, ordered ping-pong": (
        {"m": 4096, "a_scales": "rows", "b_scales": "rows"},
        {"tile_m": 128, "tile_n": 160, "stages": 4, "epi_tile_n": 32, "consumers": "ordered_ping_pong"}
        | {"delay_release": 1},
    ),
    "64 rows": ({"m": 64}, {}),
    "1001 rows of 1001 columns, untiled": ({"m": 1001, "n": 1001, "k": 1008}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_spilled_and_no_product_waits_for_the_one_before(name, tmp_path):
    said, *_ = machine_code.compiled(__file__, tmp_path, json.dumps(CASES[name]))
    assert machine_code.sound(said), said


def main(case: str) -> None:
    from search_spaces.scaled_matmul import SCALED_MATMUL, ScaledMatmulProblem

    fields, changed = json.loads(case)
    problem = ScaledMatmulProblem(**{"n": 7168, "k": 2048, "transpose_b": True} | fields)
    machine_code.compile_changed(SCALED_MATMUL.kernel("mosaic_gpu"), problem, changed)


if __name__ == "__main__":
    main(sys.argv[1])
