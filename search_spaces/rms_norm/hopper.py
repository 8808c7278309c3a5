"""The root-mean-square norm on Hopper."""

from __future__ import annotations

from typing import Any

from search_spaces.rms_norm.formula import RmsNorm
from search_spaces.rms_norm.problem import EPS, RmsNormProblem
from search_spaces.rowwise.hopper.footprint import ElementCosts
from search_spaces.rowwise.hopper.kernel import HopperRows


class HopperRmsNorm(HopperRows[RmsNormProblem]):
    version = 1
    costs = ElementCosts(mufu_ops=(0.0, 0.0), fp32_ops=(6.0, 7.0), widens=False)

    def reduction(self, problem: RmsNormProblem, *, eps: float = EPS, **params: Any) -> RmsNorm:
        return RmsNorm(problem.columns, eps)
