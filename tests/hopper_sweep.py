"""JAX's own Hopper matmul as a footprint, and recorded times of it on an H200 (see data/README.md)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from search_spaces import Columns, Footprint, Operand

_RECORDED = json.loads((Path(__file__).parent / "data" / "jax_hopper_matmul_h200.json").read_text())


def sweeps():
    """For each recorded problem: (m, n, k), the sampled schedules, their seconds, and XLA's seconds."""
    for sweep in _RECORDED["sweeps"]:
        *fields, microseconds = zip(*sweep["rows"], strict=True)
        schedules = Columns(
            {
                name: np.array([-1 if value is None else value for value in values])
                for name, values in zip(_RECORDED["columns"], fields, strict=False)
            }
        )
        problem = tuple(sweep["problem"][name] for name in "mnk")
        yield problem, schedules, np.array(microseconds) * 1e-6, sweep["xla_us"] * 1e-6


def footprint(m: int, n: int, k: int, s: Columns) -> Footprint:
    """What that kernel demands for a bfloat16 product whose extents its tiles divide.

    Two warpgroups compute, side by side along `wg_dimension`; two blocks of a cluster lie along `cluster_dimension` and
    share what they load of the other operand; the grid is persistent.
    """
    itemsize = 2
    block_m, block_n = s.tile_m * np.where(s.wg_dimension == 0, 2, 1), s.tile_n * np.where(s.wg_dimension == 1, 2, 1)
    registers = s.tile_m * s.tile_n // 128 + 40
    return Footprint(
        arithmetic="bfloat16",
        grid=(m // block_m, n // block_n),
        operands=(
            Operand(block_m * s.tile_k * itemsize, axes=(0,), multicast=np.where(s.cluster_dimension == 1, 2, 1)),
            Operand(s.tile_k * block_n * itemsize, axes=(1,), multicast=np.where(s.cluster_dimension == 0, 2, 1)),
        ),
        flops=2.0 * block_m * block_n * s.tile_k,
        bytes_written=block_m * block_n * itemsize,
        onchip_bytes=s.max_concurrent_steps * (block_m + block_n) * s.tile_k * itemsize + 2 * 2 * 64 * 64 * itemsize,
        steps=k // s.tile_k,
        minor=s.grid_minor_dim,
        group=s.grid_tile_width,
        stages=s.max_concurrent_steps,
        threads=256,
        registers=registers,
        registers_per_block=256 * registers + 128 * 40,
        # Each 64-row instruction of each warpgroup reads its rows of A and all the columns it multiplies of B.
        onchip_bytes_read=2 * (s.tile_m // 64) * (64 + s.tile_n) * s.tile_k * itemsize,
        cluster=np.where(s.cluster_dimension >= 0, 2, 1),
        persistent=True,
    )
