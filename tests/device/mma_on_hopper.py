"""The product as an operation whose kernel by warp-level MMA also runs on Hopper, beside the one by wgmma."""

from search_spaces.matmul import MATMUL, MatmulProblem
from search_spaces.matmul.mma import MosaicGpuMmaMatmul
from search_spaces.operation import Operation

MMA_TOO = Operation(
    name="matmul by mma, too",
    problem=MatmulProblem,
    kernels=(MATMUL.kernel("mosaic_gpu"), MosaicGpuMmaMatmul(also_on=("sm_90",)), MATMUL.library),
)
