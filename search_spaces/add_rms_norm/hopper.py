"""The root-mean-square norm of a sum on Hopper."""

from __future__ import annotations

from typing import Any

from search_spaces.add_rms_norm.formula import AddRmsNorm
from search_spaces.add_rms_norm.problem import AddRmsNormProblem
from search_spaces.rms_norm.problem import EPS
from search_spaces.rowwise.hopper.footprint import ElementCosts
from search_spaces.rowwise.hopper.kernel import HopperRows


class HopperAddRmsNorm(HopperRows[AddRmsNormProblem]):
    version = 1
    costs = ElementCosts(mufu_ops=(0.0, 0.0), fp32_ops=(7.0, 9.0), widens=False)

    def reduction(self, problem: AddRmsNormProblem, *, eps: float = EPS, **params: Any) -> AddRmsNorm:
        return AddRmsNorm(problem.columns, eps)
