"""The gated product on TPUs: the matrix product's kernel with two factors, and its schedules."""

from search_spaces.gated_matmul.tpu.launch import MosaicTpuGatedMatmul

__all__ = ["MosaicTpuGatedMatmul"]
