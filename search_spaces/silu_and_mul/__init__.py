"""SiLU of one half of each row times the other: ``SILU_AND_MUL``, its problem and its kernels."""

from search_spaces.operation import Operation
from search_spaces.rowwise import rules as of_rows
from search_spaces.rowwise.interpret import InterpretedRows
from search_spaces.rowwise.xla import XlaRows
from search_spaces.silu_and_mul import front_end, recognise, rules
from search_spaces.silu_and_mul.hopper import HopperSiluAndMul
from search_spaces.silu_and_mul.problem import SiluAndMulProblem
from search_spaces.silu_and_mul.tpu import TpuSiluAndMul

SILU_AND_MUL = Operation[SiluAndMulProblem](
    name="silu_and_mul",
    problem=SiluAndMulProblem,
    kernels=(HopperSiluAndMul(), TpuSiluAndMul(), InterpretedRows(), XlaRows(SiluAndMulProblem.compute)),
    jvp=rules.jvp,
    batch=of_rows.batch,
    front_end=front_end.bind,
    recognise=recognise.recognise,
    shard=of_rows.shard,
)

