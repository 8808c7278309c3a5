"""The gated matmul, a product times the activation of another one: ``GATED_MATMUL``, its problem and its kernels."""

from search_spaces.gated_matmul import front_end, problem
from search_spaces.gated_matmul.hopper import MosaicGpuGatedMatmul
from search_spaces.gated_matmul.kernels import InterpretGatedMatmul, MosaicTpuGatedMatmul, XlaGatedMatmul
from search_spaces.gated_matmul.problem import GatedMatmulProblem
from search_spaces.operation import Operation

GATED_MATMUL = Operation[GatedMatmulProblem](
    name="gated_matmul",
    problem=GatedMatmulProblem,
    kernels=(MosaicGpuGatedMatmul(), MosaicTpuGatedMatmul(), InterpretGatedMatmul(), XlaGatedMatmul()),
    jvp=front_end.jvp,
    batch=front_end.batch,
    front_end=front_end.bind,
    recognise=problem.recognise,
    shard=front_end.shard,
)

__all__ = ["GATED_MATMUL", "GatedMatmulProblem"]
