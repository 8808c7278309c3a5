"""The gradient of SiLU-and-mul: ``SILU_AND_MUL_BACKWARD``, its problem and its kernels."""

from search_spaces.operation import Operation
from search_spaces.rowwise import rules
from search_spaces.rowwise.interpret import InterpretedRows
from search_spaces.silu_and_mul_backward.hopper import HopperSiluAndMulBackward
from search_spaces.silu_and_mul_backward.problem import SiluAndMulBackwardProblem
from search_spaces.silu_and_mul_backward.tpu import TpuSiluAndMulBackward
from search_spaces.silu_and_mul_backward.xla import XlaSiluAndMulBackward

SILU_AND_MUL_BACKWARD = Operation[SiluAndMulBackwardProblem](
    name="silu_and_mul_backward",
    problem=SiluAndMulBackwardProblem,
    kernels=(HopperSiluAndMulBackward(), TpuSiluAndMulBackward(), InterpretedRows(), XlaSiluAndMulBackward()),
    batch=rules.batch,
    shard=rules.shard,
)

