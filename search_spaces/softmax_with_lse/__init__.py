"""Softmax and log-sum-exp over the last axis: ``SOFTMAX_WITH_LSE``, its problem and its kernels."""

from search_spaces.operation import Operation
from search_spaces.rowwise import rules
from search_spaces.rowwise.interpret import InterpretedRows
from search_spaces.rowwise.xla import XlaRows
from search_spaces.softmax_with_lse import front_end
from search_spaces.softmax_with_lse.problem import SoftmaxWithLseProblem

# Derivatives are the library kernel's: XLA's, of the formula. There is no second program: users of the log-sum-exp of
# narrow rows need it in float32.
SOFTMAX_WITH_LSE = Operation[SoftmaxWithLseProblem](
    name="softmax_with_lse",
    problem=SoftmaxWithLseProblem,
    kernels=(InterpretedRows(), XlaRows()),
    batch=rules.batch,
    shard=rules.shard,
    front_end=front_end.bind,
)

