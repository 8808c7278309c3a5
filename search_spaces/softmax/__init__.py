"""Softmax over the last axis: ``SOFTMAX``, its problem and its kernels."""

import jax

from search_spaces.kernel import Operation
from search_spaces.rowwise import calculus
from search_spaces.rowwise.portable import PortableRows
from search_spaces.rowwise.xla import XlaRows
from search_spaces.softmax import front_end
from search_spaces.softmax.mosaic_gpu import MosaicGpuSoftmax
from search_spaces.softmax.problem import SoftmaxProblem

# Derivatives are those of the library kernel: XLA's, of the formula.
SOFTMAX = Operation[SoftmaxProblem](
    name="softmax",
    problem=SoftmaxProblem,
    kernels=(MosaicGpuSoftmax(), PortableRows(), XlaRows(jax.nn.softmax)),
    batch=calculus.batch,
    front_end=front_end.bind,
)

__all__ = ["SOFTMAX", "SoftmaxProblem"]
