"""The gated matmul on Hopper: the matmul kernel with two factors, and its schedules."""

from search_spaces.gated_matmul.hopper.launch import MosaicGpuGatedMatmul

__all__ = ["MosaicGpuGatedMatmul"]
