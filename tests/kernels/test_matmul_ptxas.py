"""The product as machine code, without a GPU: what keeps wgmmas in flight, and the largest tiles of one consumer.

This file as a program writes the PTX of one of them.
"""

import json
import sys

import machine_code
import pytest

pytestmark = [machine_code.needed(), pytest.mark.slow]

ORDERED = {"consumers": "ordered_ping_pong", "stages": 4, "tile_k": 64, "epi_tile_n": 64, "delay_release": 1}
PLAIN = {"swap_ab": False, "cluster": "none", "split_k": 1, "tail_split_k": 1}
EPILOGUE = {"bias": "bfloat16", "residual": "bfloat16"}
RAGGED = {"m": 5000, "n": 3000, "k": 7000}

CASES = {  # name: fields of the problem beside 4096^3, and those of the schedule that differ from the model's first
    "ordered ping-pong, 128 x 192": ({}, PLAIN | ORDERED | {"tile_m": 128, "tile_n": 192}),
    "ordered ping-pong, 128 x 192, five stages": (
        {},
        PLAIN | ORDERED | {"tile_m": 128, "tile_n": 192, "stages": 5},
    ),
    "ordered ping-pong, 128 x 192, bias and residual": (
        EPILOGUE,
        PLAIN | ORDERED | {"tile_m": 128, "tile_n": 192, "stages": 3},
    ),
    "ordered ping-pong, 192 x 128, swap_ab": ({}, PLAIN | ORDERED | {"tile_m": 192, "tile_n": 128, "swap_ab": True}),
    "ragged, ping-pong, 128 x 128": (
        RAGGED,
        PLAIN | ORDERED | {"tile_m": 128, "tile_n": 128, "stages": 5, "consumers": "ping_pong"},
    ),
    "ragged, ordered ping-pong, 128 x 192": (RAGGED, PLAIN | ORDERED | {"tile_m": 128, "tile_n": 192}),
    "ragged, ordered ping-pong, 192 x 128, swap_ab": (
        RAGGED,
        PLAIN | ORDERED | {"tile_m": 192, "tile_n": 128, "swap_ab": True},
    ),
    "odd rows, ordered ping-pong, bias and residual": (
        {"m": 4095, "n": 4097, "k": 777} | EPILOGUE,
        PLAIN | ORDERED | {"tile_m": 128, "tile_n": 128},
    ),
    "odd vocabulary, ordered ping-pong": (
        {"m": 1024, "n": 50257, "k": 768, "transpose_b": True},
        PLAIN | ORDERED | {"tile_m": 128, "tile_n": 128, "stages": 5},
    ),
    "last wave in two parts, 256 x 192, cluster": (
        RAGGED,
        PLAIN
        | {"tile_m": 256, "tile_n": 192, "consumers": "cooperative_m", "stages": 3, "tile_k": 64, "epi_tile_n": 64}
        | {"cluster": "n", "tail_split_k": 2, "delay_release": 0},
    ),
    "last wave in three parts, 128 x 256, bias and residual": (
        {"m": 1736, "n": 5512, "k": 7464} | EPILOGUE,
        PLAIN
        | {"tile_m": 128, "tile_n": 256, "consumers": "cooperative_m", "stages": 3, "tile_k": 64, "epi_tile_n": 64}
        | {"cluster": "m", "tail_split_k": 3, "delay_release": 0},
    ),
    "rows of 32 bytes more than 128, ordered ping-pong, 192 x 128": (
        {"m": 5832, "n": 4304, "k": 1152},
        PLAIN | ORDERED | {"tile_m": 192, "tile_n": 128},
    ),
    "rows of 32 bytes more than 128, 144 x 192, swap_ab": (
        {"m": 5832, "n": 1152, "k": 4304},
        PLAIN
        | {"tile_m": 144, "tile_n": 192, "consumers": "cooperative_m", "stages": 4, "tile_k": 64, "epi_tile_n": 64}
        | {"swap_ab": True, "delay_release": 0},
    ),
    "ragged, one wave, delay_release": (
        {"m": 1000, "n": 1000, "k": 1000},
        PLAIN
        | {"tile_m": 128, "tile_n": 64, "consumers": "cooperative_m", "stages": 8, "tile_k": 64, "epi_tile_n": 64}
        | {"delay_release": 1},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_spilled_and_no_product_waits_for_the_one_before(name, tmp_path):
    said, *_ = machine_code.compiled(__file__, tmp_path, json.dumps(CASES[name]))
    assert machine_code.sound(said), said


def main(case: str) -> None:
    from search_spaces.matmul import MATMUL, MatmulProblem

    fields, changed = json.loads(case)
    problem = MatmulProblem(**{"m": 4096, "n": 4096, "k": 4096} | fields)
    machine_code.compile_changed(MATMUL.kernel("mosaic_gpu"), problem, changed)


if __name__ == "__main__":
    main(sys.argv[1])
