"""The matrix product on Hopper: a persistent, warp-specialized Mosaic GPU kernel and its schedules."""

from search_spaces.matmul.hopper.launch import MosaicGpuMatmul
from search_spaces.matmul.hopper.schedule import HopperSchedule

__all__ = ["HopperSchedule", "MosaicGpuMatmul"]
