"""The scaled product on Hopper."""

from search_spaces.scaled_matmul.hopper.launch import MosaicGpuScaledMatmul

__all__ = ["MosaicGpuScaledMatmul"]
