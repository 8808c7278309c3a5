"""The matmul on Hopper: a persistent, warp-specialized Mosaic GPU kernel, its schedules, and its float32 variant."""

from search_spaces.matmul.hopper.bf16_3x import MosaicGpuBf16x3Matmul
from search_spaces.matmul.hopper.launch import MosaicGpuMatmul
from search_spaces.matmul.hopper.schedule import HopperSchedule

__all__ = ["HopperSchedule", "MosaicGpuBf16x3Matmul", "MosaicGpuMatmul"]
