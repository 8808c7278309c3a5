"""The matrix product on Hopper: a persistent, warp-specialised Mosaic GPU kernel and its schedules."""

from search_spaces.matmul.mosaic_gpu.kernel import MosaicGpuMatmul
from search_spaces.matmul.mosaic_gpu.schedule import HopperSchedule

__all__ = ["HopperSchedule", "MosaicGpuMatmul"]
