"""The gated matmul on TPUs: the matmul kernel with two factors, and its schedules."""

from search_spaces.gated_matmul.tpu.launch import MosaicTpuGatedMatmul

__all__ = ["MosaicTpuGatedMatmul"]
