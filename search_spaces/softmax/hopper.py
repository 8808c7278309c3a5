"""Softmax on Hopper."""

from __future__ import annotations

from typing import Any

from search_spaces.rowwise.hopper.footprint import ElementCosts
from search_spaces.rowwise.hopper.kernel import HopperRows
from search_spaces.softmax.formula import Softmax
from search_spaces.softmax.problem import SoftmaxProblem


class HopperSoftmax(HopperRows[SoftmaxProblem]):
    version = 1
    # Exponentials: one for rows in registers; for chunks one for the sum, one for the result, and one correction per
    # chunk.
    costs = ElementCosts(mufu_ops=(1.0, 2.25), fp32_ops=(8.0, 13.0), widens=True)

    def reduction(self, problem: SoftmaxProblem, **params: Any) -> Softmax:
        return Softmax()
