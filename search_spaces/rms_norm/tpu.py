"""The root-mean-square norm on a TPU."""

from __future__ import annotations

from typing import Any

from search_spaces.rms_norm.formula import RmsNorm
from search_spaces.rms_norm.problem import EPS, RmsNormProblem
from search_spaces.rowwise.tpu.footprint import ElementCosts
from search_spaces.rowwise.tpu.kernel import TpuRows


class TpuRmsNorm(TpuRows[RmsNormProblem]):
    name = "rms_norm_tpu"
    costs = ElementCosts(fp32_ops=7.0, mufu_ops=0.0)

    def reduction(self, problem: RmsNormProblem, *, eps: float = EPS, **params: Any) -> RmsNorm:
        return RmsNorm(problem.columns, eps)
