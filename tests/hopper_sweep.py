"""JAX's own Hopper matmul as a footprint, and recorded times of it on an H200 (see data/README.md)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from scheduler.core import hardware
from search_spaces import Columns, Footprint
from search_spaces.matmul import MatmulProblem

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from jax_hopper import JAX_HOPPER

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
    """What that kernel demands for a bfloat16 product whose extents its tiles divide."""
    axes = np.array(["M", "N", "none"])
    lettered = {name: axes[getattr(s, name)] for name in ("grid_minor_dim", "wg_dimension", "cluster_dimension")}
    others = ("tile_m", "tile_n", "tile_k", "max_concurrent_steps", "grid_tile_width")
    columns = Columns({name: getattr(s, name) for name in others} | lettered)
    return JAX_HOPPER.footprint(MatmulProblem(m, n, k), columns, hardware.find("NVIDIA H200").target)
