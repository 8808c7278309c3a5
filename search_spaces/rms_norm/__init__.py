"""The root-mean-square norm: ``RMS_NORM``, its problem and its kernels."""

from search_spaces.operation import Operation
from search_spaces.rms_norm import front_end, recognise
from search_spaces.rms_norm.hopper import HopperRmsNorm
from search_spaces.rms_norm.problem import RmsNormProblem
from search_spaces.rms_norm.tpu import TpuRmsNorm
from search_spaces.rowwise import rules
from search_spaces.rowwise.interpret import InterpretedRows
from search_spaces.rowwise.xla import XlaRows

# Derivatives are the library kernel's: XLA's, of the formula. Users also write it in float32 and round once, as Flax
# does (flax.linen.normalization), so there is only one program.
RMS_NORM = Operation[RmsNormProblem](
    name="rms_norm",
    problem=RmsNormProblem,
    kernels=(HopperRmsNorm(), TpuRmsNorm(), InterpretedRows(), XlaRows()),
    params=("eps",),
    batch=rules.batch,
    front_end=front_end.bind,
    recognise=recognise.recognise,
    shard=rules.shard,
)

__all__ = ["RMS_NORM", "RmsNormProblem"]
