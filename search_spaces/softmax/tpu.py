"""Softmax on a TPU."""

from __future__ import annotations

from typing import Any

from search_spaces.rowwise.tpu.footprint import ElementCosts
from search_spaces.rowwise.tpu.kernel import TpuRows
from search_spaces.softmax.formula import Softmax
from search_spaces.softmax.problem import SoftmaxProblem


class TpuSoftmax(TpuRows[SoftmaxProblem]):
    name = "softmax_tpu"
    costs = ElementCosts(fp32_ops=11.0, mufu_ops=2.25)

    def reduction(self, problem: SoftmaxProblem, **params: Any) -> Softmax:
        return Softmax()
