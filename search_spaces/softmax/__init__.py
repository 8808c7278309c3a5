"""Softmax over the last axis: ``SOFTMAX``, its problem and its kernels."""

import jax

from search_spaces.operation import Operation
from search_spaces.rowwise import rules
from search_spaces.rowwise.interpret import InterpretedRows
from search_spaces.rowwise.xla import XlaRows
from search_spaces.softmax import front_end, recognise
from search_spaces.softmax.hopper import HopperSoftmax
from search_spaces.softmax.problem import SoftmaxProblem
from search_spaces.softmax.tpu import TpuSoftmax

# Derivatives are the library kernel's: XLA's, of the formula.
SOFTMAX = Operation[SoftmaxProblem](
    name="softmax",
    problem=SoftmaxProblem,
    kernels=(HopperSoftmax(), TpuSoftmax(), InterpretedRows(), XlaRows(jax.nn.softmax)),
    batch=rules.batch,
    front_end=front_end.bind,
    recognise=recognise.recognise,
    shard=rules.shard,
)

