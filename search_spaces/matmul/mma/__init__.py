"""The matmul on GPUs with warp-level MMA and cp.async: a Mosaic GPU kernel and its schedules."""

from search_spaces.matmul.mma.kernel import MosaicGpuMmaMatmul
from search_spaces.matmul.mma.space import MmaSchedule

__all__ = ["MmaSchedule", "MosaicGpuMmaMatmul"]
