"""Finds loops of a kernel that the compiler's static estimate does not count in full."""

from __future__ import annotations

from typing import Any

from search_spaces.jaxprs import equations, held, opened

# libtpu's estimate counts a nested loop in the first `COUNTED` iterations of the outer loop, and hardly in the later
# ones. A chain of 64 exponentials costs 715 cycles in each of the first two iterations, and 3.5 in each of the others
# (libtpu 0.0.48, v5e). The loop of the grid, and one loop within a step of it, are counted in full.
COUNTED = 2
_LOOPS = ("scan", "while")


def miscounted(jaxpr: Any) -> bool:
    """Returns whether a Pallas kernel has nested loops with more than `COUNTED` outer iterations."""
    kernels = (eqn for eqn in equations(jaxpr) if eqn.primitive.name == "pallas_call")
    return any(_nested(inner) for eqn in kernels for inner in held(eqn))


def _nested(jaxpr: Any, within: bool = False) -> bool:
    for eqn in opened(jaxpr).eqns:
        loops = eqn.primitive.name in _LOOPS and eqn.params.get("length", COUNTED + 1) > 1
        if loops and within:
            return True
        # An outer loop of few iterations is counted in full. A loop with dynamic bounds counts as a long one.
        outer = within or (loops and eqn.params.get("length", COUNTED + 1) > COUNTED)
        if any(_nested(inner, outer) for inner in held(eqn)):
            return True
    return False
