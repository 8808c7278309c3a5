"""The scaled matmul on Hopper."""

from search_spaces.scaled_matmul.hopper.launch import MosaicGpuScaledMatmul

__all__ = ["MosaicGpuScaledMatmul"]
