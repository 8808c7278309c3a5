"""The matmul on TPUs: a Mosaic kernel whose grid is a loop over blocks, and its schedules."""

from search_spaces.matmul.tpu.launch import MosaicTpuMatmul
from search_spaces.matmul.tpu.schedule import TpuSchedule

__all__ = ["MosaicTpuMatmul", "TpuSchedule"]
