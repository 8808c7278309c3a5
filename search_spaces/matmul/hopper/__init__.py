"""The matmul on Hopper: a persistent, warp-specialized Mosaic GPU kernel, its schedules, and its float32 variant."""

from search_spaces.matmul.hopper.launch import MosaicGpuBf16x3Matmul, MosaicGpuMatmul
from search_spaces.matmul.hopper.schedule import HopperSchedule

__all__ = ["HopperSchedule", "MosaicGpuBf16x3Matmul", "MosaicGpuMatmul"]
