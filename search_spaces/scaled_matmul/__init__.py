"""The matmul of narrow operands and their scales: ``SCALED_MATMUL``, its problem and its kernels."""

from search_spaces.operation import Operation
from search_spaces.scaled_matmul import front_end
from search_spaces.scaled_matmul.hopper import MosaicGpuScaledMatmul
from search_spaces.scaled_matmul.problem import ScaledMatmulProblem
from search_spaces.scaled_matmul.xla import XlaScaledMatmul

SCALED_MATMUL = Operation[ScaledMatmulProblem](
    name="scaled_matmul",
    problem=ScaledMatmulProblem,
    kernels=(MosaicGpuScaledMatmul(), XlaScaledMatmul()),
    batch=front_end.batch,
    front_end=front_end.bind,
    shard=front_end.shard,
)

__all__ = ["SCALED_MATMUL", "ScaledMatmulProblem"]
