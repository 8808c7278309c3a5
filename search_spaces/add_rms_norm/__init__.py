"""The root-mean-square norm of a sum, together with the sum: ``ADD_RMS_NORM``, its problem and its kernels."""

from search_spaces.add_rms_norm import front_end, recognise, rules
from search_spaces.add_rms_norm.hopper import HopperAddRmsNorm
from search_spaces.add_rms_norm.problem import AddRmsNormProblem
from search_spaces.add_rms_norm.tpu import TpuAddRmsNorm
from search_spaces.operation import Operation
from search_spaces.rowwise import rules as of_rows
from search_spaces.rowwise.interpret import InterpretedRows
from search_spaces.rowwise.xla import XlaRows

# As for an RMS norm alone, users write the formula itself: there is only one program.
ADD_RMS_NORM = Operation[AddRmsNormProblem](
    name="add_rms_norm",
    problem=AddRmsNormProblem,
    kernels=(HopperAddRmsNorm(), TpuAddRmsNorm(), InterpretedRows(), XlaRows()),
    params=("eps",),
    jvp=rules.jvp,
    batch=of_rows.batch,
    front_end=front_end.bind,
    recognise=recognise.recognise,
    shard=of_rows.shard,
)

__all__ = ["ADD_RMS_NORM", "AddRmsNormProblem"]
