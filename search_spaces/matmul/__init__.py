"""The matrix product: ``MATMUL``, its problem and its kernels."""

from jax import lax

from search_spaces.matmul import front_end, rules
from search_spaces.matmul.hopper import MosaicGpuBf16x3Matmul, MosaicGpuMatmul
from search_spaces.matmul.interpret import InterpretMatmul
from search_spaces.matmul.mma import MosaicGpuMmaMatmul
from search_spaces.matmul.problem import MatmulProblem
from search_spaces.matmul.tpu import MosaicTpuMatmul
from search_spaces.matmul.xla import XlaMatmul
from search_spaces.operation import Operation

MATMUL = Operation(
    name="matmul",
    problem=MatmulProblem,
    kernels=(
        MosaicGpuMatmul(),
        MosaicGpuBf16x3Matmul(),
        MosaicGpuMmaMatmul(),
        MosaicTpuMatmul(),
        InterpretMatmul(),
        XlaMatmul(),
    ),
    jvp=rules.jvp,
    transpose=rules.transpose,
    batch=rules.batch,
    front_end=front_end.bind,
    equations={lax.dot_general_p: front_end.problem_of_dot_general},
    shard=rules.shard,
)

__all__ = ["MATMUL", "MatmulProblem"]
