"""The gated product as machine code, without a GPU, of schedules that the model prefers, and of the largest tiles.

This file as a program writes the PTX of one of them.
"""

import json
import sys

import machine_code
import pytest

pytestmark = [machine_code.needed(), pytest.mark.slow]

CASES = {  # name: the problem, and fields of the schedule that differ from the model's first choice
    "4096 rows": ({"m": 4096}, {}),
    "4096 rows, transposed pair, bias": (
        {"m": 4096, "transpose_w": True, "pair": True, "bias": "bfloat16"},
        {},
    ),
    "4096 rows, gelu": ({"m": 4096, "activation": "gelu"}, {}),
    "4096 rows, 192 accumulators of each thread": (
        {"m": 4096},
        {"tile_m": 128, "tile_n": 192, "consumers": "cooperative_m", "stages": 3, "tile_k": 64, "epi_tile_n": 64},
    ),
    "4096 rows, ping-pong": (
        {"m": 4096},
        {"tile_m": 64, "tile_n": 128, "consumers": "ordered_ping_pong", "stages": 4, "tile_k": 64, "delay_release": 1},
    ),
    "4096 rows, ordered ping-pong, swap_ab": (
        {"m": 4096},
        {"tile_m": 192, "tile_n": 64, "swap_ab": True, "consumers": "ordered_ping_pong", "stages": 4, "tile_k": 64}
        | {"epi_tile_n": 64, "delay_release": 1},
    ),
    "256 rows": ({"m": 256}, {}),
    "256 rows, transposed": ({"m": 256, "transpose_w": True}, {}),
    "16 rows": ({"m": 16}, {}),
    "16 rows, pair": ({"m": 16, "pair": True}, {}),
    "16 rows, one consumer": (
        {"m": 16},
        {
            "tile_m": 16,
            "tile_n": 64,
            "consumers": "one",
            "swap_ab": True,
            "tile_k": 128,
            "stages": 5,
            "delay_release": 1,
        },
    ),
    "1000 rows of 1000 columns, untiled": ({"m": 1000, "n": 1000, "k": 1000}, {}),
    "5000 rows of 3000 columns, untiled, ordered ping-pong": (
        {"m": 5000, "n": 3000, "k": 7000, "pair": True},
        {"tile_m": 64, "tile_n": 128, "consumers": "ordered_ping_pong", "stages": 4, "tile_k": 64, "delay_release": 1}
        | {"swap_ab": False, "cluster": "none", "split_k": 1, "epi_tile_n": 64},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_spilled_and_no_product_waits_for_the_one_before(name, tmp_path):
    said, *_ = machine_code.compiled(__file__, tmp_path, json.dumps(CASES[name]))
    assert machine_code.sound(said), said


def main(case: str) -> None:
    from search_spaces.gated_matmul import GATED_MATMUL, GatedMatmulProblem

    fields, changed = json.loads(case)
    problem = GatedMatmulProblem(**{"n": 14336, "k": 4096} | fields)
    machine_code.compile_changed(GATED_MATMUL.kernel("mosaic_gpu"), problem, changed)


if __name__ == "__main__":
    main(sys.argv[1])
