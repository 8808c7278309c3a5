"""Empirical constants of the cost model that no data sheet specifies: efficiencies and overheads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from scheduler.core.tpus import TPUS


@dataclasses.dataclass(frozen=True)
class Constants:
    """Empirical constants of the cost model: efficiencies and overheads.

    The defaults are round numbers from sweeps of 19 matmuls on one H200, and from XLA's times of 21 matmuls. Constants
    refitted to other shapes rank no better, so a calibration sets only the two scales and `library_s`
    (`calibration.py`).

    Attributes:
      scale: ratio of measured to predicted time of this kernel on this chip.
      e_power: fraction of the chip's peak rate that all cores sustain together, at the clock that the power limit
        allows.
      e_hbm: fraction of the device memory's bandwidth that a kernel reaches.
      tma_row_s: time of a core's TMA for one row of a swizzled tile, independent of the row's width, in seconds.
      fill_row_s: time to fill one row beyond an array's edge with zeros, in seconds. All other loads of the core stall.
      sector_misalignment: extra time of a row that starts within a sector of the last-level cache, relative to the
        cache's time for the row's bytes.
      l2_share: fraction of the last-level cache that keeps operands until their next use.
      p: order of the norm over the overlapping terms of a step: 1 means no overlap, infinity means the roofline.
      step_s: time of one step's barriers and loop, in seconds.
      iteration_s: overhead of one iteration of a loop within a step, without its operations, in seconds
        (`Phase.iterations`).
      wgmma_bubble_s: time from the end of a step's wgmma until the next one runs, if the next one is issued only then,
        in seconds.
      accumulator_s: time per accumulator of a tile between its last wgmma and the first of the next tile, in seconds,
        if no other consumer multiplies meanwhile. The accumulator is rounded, stored and zeroed.
      stage_s: time to set up the buffers and barriers of one pipeline stage, in seconds.
      cluster_sync_s: time that the CTAs of a cluster wait for each other, at their start and end, in seconds.
      dsmem_s: fixed time of an exchange between the CTAs of a cluster through DSMEM, in seconds.
      dsmem_bytes_per_s: rate at which one core writes into the on-chip memory of another.
      tail_reduction_s: time that the CTAs of a split last wave wait for each other, in addition to the transfer of
        their bytes, in seconds (H200: 14 matmuls took 2 us longer than their bytes, compared with whole tiles).
      launch_share: time of an empty launch, relative to `Hardware.launch_s`.
      library_scale, library_e_mma, library_e_hbm, library_p: scale, fraction of the peak arithmetic rate, fraction of
        the memory bandwidth, and order of the norm for the library's kernels.
      library_grain: result elements per core at which the library reaches half of its arithmetic rate.
      library_s: fixed time of a library kernel, including its launch, in seconds.
    """

    scale: float = 1.0
    e_power: float = 0.9
    e_hbm: float = 0.95
    tma_row_s: float = 1e-9
    fill_row_s: float = 9e-10
    sector_misalignment: float = 1.0
    l2_share: float = 0.56
    p: float = 4.0
    step_s: float = 1e-8
    iteration_s: float = 0.0
    wgmma_bubble_s: float = 1e-7
    accumulator_s: float = 3e-11
    stage_s: float = 4e-8
    cluster_sync_s: float = 2e-7
    dsmem_s: float = 5e-7
    dsmem_bytes_per_s: float = 2.5e10
    tail_reduction_s: float = 2e-6
    launch_share: float = 0.55
    library_scale: float = 1.0
    library_e_mma: float = 0.845
    library_e_hbm: float = 0.88
    library_p: float = 5.0
    library_grain: float = 500.0
    library_s: float = 4e-6

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if name in SHARES and not 0 < value <= 1:
                raise ValueError(f"{name}={value} is a share of a peak: it lies in (0, 1]")
            if name in ORDERS and not value >= 1:
                raise ValueError(f"{name}={value} is the order of a norm: at least 1")
            if name in FACTORS and not value > 0:
                raise ValueError(f"{name}={value} is a factor or a rate: above 0")
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name}={value} is no time or size: finite, and at least 0")


SHARES = ("e_power", "e_hbm", "l2_share", "library_e_mma", "library_e_hbm")
ORDERS = ("p", "library_p")
FACTORS = ("scale", "library_scale", "dsmem_bytes_per_s")

# In the interpreter on a CPU, nothing overlaps, and each grid step costs about a millisecond.
_CPU = Constants(p=1, step_s=1e-3, stage_s=0, launch_share=1, library_grain=0, library_s=1e-3)
# No TPU has been measured. The constants of steps, loops and XLA's arithmetic are from libtpu's static schedules
# (docs/search-and-model.md).
_TPU = Constants(
    e_power=1.0, step_s=2.5e-7, iteration_s=2e-8, wgmma_bubble_s=0, stage_s=0, library_e_mma=0.95, library_grain=0
)

# Architecture -> constants; other architectures have the defaults.
BY_ARCHITECTURE: Mapping[str, Constants] = MappingProxyType({"cpu": _CPU} | {row.architecture: _TPU for row in TPUS})
