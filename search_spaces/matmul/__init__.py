"""The matrix product: ``MATMUL``, its problem and its kernels."""

from search_spaces.kernel import Operation
from search_spaces.matmul import calculus, front_end
from search_spaces.matmul.mosaic_gpu import MosaicGpuMatmul
from search_spaces.matmul.portable import PortableMatmul
from search_spaces.matmul.problem import MatmulProblem
from search_spaces.matmul.xla import XlaMatmul

MATMUL = Operation(
    name="matmul",
    problem=MatmulProblem,
    kernels=(MosaicGpuMatmul(), PortableMatmul(), XlaMatmul()),
    jvp=calculus.jvp,
    transpose=calculus.transpose,
    batch=calculus.batch,
    front_end=front_end.bind,
)

__all__ = ["MATMUL", "MatmulProblem"]
