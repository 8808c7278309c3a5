"""What no data sheet tells, and the cost model takes as given: shares of peaks, and overheads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from scheduler.core.tpus import TPUS


@dataclasses.dataclass(frozen=True)
class Constants:
    """What no data sheet tells: shares of the peaks that kernels reach, and overheads.

    The defaults are round numbers from 19 matmuls swept on one H200 and from XLA's times of 21. Refitted to other
    shapes they rank no better, so a calibration sets the two scales and `library_s` alone (`calibration.py`).

    Attributes:
      scale: measured over predicted time of this kernel on this chip.
      e_power: share of the chip's peak rate that all cores sustain together, at the clock that its power allows.
      e_hbm: share of the device memory's bandwidth that a kernel reaches.
      tma_row_s: seconds in which the TMA of a core delivers one row of a swizzled tile, however narrow.
      fill_row_s: seconds for which a core gets nothing else while one row beyond an array's edge is filled with zeros.
      sector_misalignment: time that a row takes longer where it starts within a sector of the last-level cache, over
        what the cache takes to deliver its bytes.
      l2_share: share of the last-level cache that holds operands until they are used again.
      p: order of the norm that joins what overlaps in a step: 1 is no overlap at all, infinity the roofline.
      step_s: one step's barriers and loop.
      iteration_s: one iteration of a loop over what a step has, beyond its operations (`Phase.iterations`).
      wgmma_bubble_s: seconds from the end of a step's wgmma until the next one runs, where it is issued only then.
      accumulator_s: seconds for each accumulator of a tile between its last wgmma and the first one of the next tile,
        where no other consumer multiplies meanwhile: it is rounded, stored and zeroed.
      stage_s: seconds to set up the buffers and barriers of one stage of the pipeline.
      cluster_sync_s: seconds for which CTAs of a cluster wait for each other at their start and at their end.
      dsmem_s, dsmem_bytes_per_s: an exchange between CTAs of a cluster through DSMEM: what it takes beyond its bytes,
        and the rate at which one core writes into the on-chip memory of another.
      tail_reduction_s: a last wave that is split: seconds for which its CTAs wait for each other, beyond the bytes that
        they leave (14 products on an H200 took 2 us longer than their bytes, against whole tiles).
      launch_share: an empty launch, over that in `Hardware`.
      library_scale, library_e_mma, library_e_hbm, library_p: the same for the library's kernels.
      library_grain: results that each core must have for the library to reach half of its rate of arithmetic.
      library_s: seconds of a library kernel beyond its work, its launch included.
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

# In the interpreter on a CPU, nothing overlaps and a grid step costs about a millisecond whatever it computes.
_CPU = Constants(p=1, step_s=1e-3, stage_s=0, launch_share=1, library_grain=0, library_s=1e-3)
# Those of steps, of their loops and of XLA's arithmetic are what libtpu's static schedules come to, as no TPU has been
# measured (docs/search-and-model.md).
_TPU = Constants(
    e_power=1.0, step_s=2.5e-7, iteration_s=2e-8, wgmma_bubble_s=0, stage_s=0, library_e_mma=0.95, library_grain=0
)

# By architecture; others take the defaults.
BY_ARCHITECTURE: Mapping[str, Constants] = MappingProxyType({"cpu": _CPU} | {row.architecture: _TPU for row in TPUS})
