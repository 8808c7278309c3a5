"""Loops of a kernel that the compiler's static estimate does not count in full."""

from __future__ import annotations

from typing import Any

from search_spaces.jaxprs import equations, held, opened

# libtpu's estimate counts a loop within a loop in so many iterations of the outer one, and hardly in the later ones: a
# chain of 64 exponentials costs 715 cycles in each of the first two and 3.5 in each of the others (libtpu 0.0.48, v5e).
# The grid's loop, and one loop in a step of it, are counted in full.
COUNTED = 2
_LOOPS = ("scan", "while")


def miscounted(jaxpr: Any) -> bool:
    """Whether a program has a Pallas kernel with a loop within a loop of more iterations than are counted."""
    kernels = (eqn for eqn in equations(jaxpr) if eqn.primitive.name == "pallas_call")
    return any(_nested(inner) for eqn in kernels for inner in held(eqn))


def _nested(jaxpr: Any, within: bool = False) -> bool:
    for eqn in opened(jaxpr).eqns:
        loops = eqn.primitive.name in _LOOPS and eqn.params.get("length", COUNTED + 1) > 1
        if loops and within:
            return True
        # An outer loop of few iterations is counted in full; of one whose bounds are values, nobody knows.
        outer = within or (loops and eqn.params.get("length", COUNTED + 1) > COUNTED)
        if any(_nested(inner, outer) for inner in held(eqn)):
            return True
    return False
