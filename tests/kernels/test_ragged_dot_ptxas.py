"""Grouped products as machine code, without a GPU: what keeps wgmmas in flight.

This file as a program writes the PTX of one of them.
"""

import json
import sys

import machine_code
import pytest

pytestmark = [machine_code.needed(), pytest.mark.slow]

ORDERED = {"consumers": "ordered_ping_pong", "stages": 4, "tile_k": 64, "epi_tile_n": 64, "delay_release": 1}
PLAIN = {"swap_ab": False, "cluster": "none", "delay_release": 0, "tile_k": 64, "epi_tile_n": 64}
WIDE = PLAIN | {"tile_m": 128, "tile_n": 256, "consumers": "cooperative_m", "stages": 4}
SHAPE = {"rows": 8192, "groups": 8, "k": 4096, "n": 14336}
GATED = {"rows": 8192, "groups": 8, "k": 4096, "n": 2048}

CASES = {  # name: the operation, fields of the problem, and fields of the schedule that differ from the model's first
    "rows, 128 x 256": ("ragged_dot", SHAPE, WIDE),
    "rows, ordered ping-pong, 128 x 192": ("ragged_dot", SHAPE, PLAIN | ORDERED | {"tile_m": 128, "tile_n": 192}),
    "rows, 128 x 256 in a cluster": ("ragged_dot", SHAPE, WIDE | {"cluster": "m"}),
    "few rows, swap_ab": (
        "ragged_dot",
        SHAPE | {"rows": 64},
        PLAIN
        | {"tile_m": 32, "tile_n": 128, "tile_k": 128, "consumers": "cooperative_n", "stages": 3, "swap_ab": True},
    ),
    "gated, 128 x 128": (
        "gated_ragged_dot",
        GATED,
        PLAIN | {"tile_m": 128, "tile_n": 128, "consumers": "cooperative_m", "stages": 4},
    ),
    "matrices, 128 x 256": ("ragged_dot_weights", SHAPE, WIDE),
    "matrices, ordered ping-pong, 128 x 192": (
        "ragged_dot_weights",
        SHAPE,
        PLAIN | ORDERED | {"tile_m": 128, "tile_n": 192},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_spilled_and_no_product_waits_for_the_one_before(name, tmp_path):
    said, *_ = machine_code.compiled(__file__, tmp_path, json.dumps(CASES[name]))
    assert machine_code.sound(said), said


def main(case: str) -> None:
    import search_spaces

    name, fields, changed = json.loads(case)
    operation = search_spaces.load(name)
    machine_code.compile_changed(operation.kernel("mosaic_gpu"), operation.problem(**fields), changed)


if __name__ == "__main__":
    main(sys.argv[1])
