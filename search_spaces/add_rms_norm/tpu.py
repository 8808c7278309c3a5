"""The root-mean-square norm of a sum on a TPU."""

from __future__ import annotations

from typing import Any

from search_spaces.add_rms_norm.formula import AddRmsNorm
from search_spaces.add_rms_norm.problem import AddRmsNormProblem
from search_spaces.rms_norm.problem import EPS
from search_spaces.rowwise.tpu.footprint import ElementCosts
from search_spaces.rowwise.tpu.kernel import TpuRows


class TpuAddRmsNorm(TpuRows[AddRmsNormProblem]):
    name = "add_rms_norm_tpu"
    costs = ElementCosts(fp32_ops=12.0, mufu_ops=0.0)

    def reduction(self, problem: AddRmsNormProblem, *, eps: float = EPS, **params: Any) -> AddRmsNorm:
        return AddRmsNorm(problem.columns, eps)
