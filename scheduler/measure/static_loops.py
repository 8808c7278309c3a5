"""Loops of a kernel that the compiler's static estimate does not count in full."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# libtpu's estimate counts a loop within a loop in so many iterations of the outer one, and hardly in the later ones: a
# chain of 64 exponentials costs 715 cycles in each of the first two and 3.5 in each of the others (libtpu 0.0.48, v5e).
# The grid's loop, and one loop in a step of it, are counted in full.
COUNTED = 2
_LOOPS = ("scan", "while")


def miscounted(jaxpr: Any) -> bool:
    """Whether a program has a Pallas kernel with a loop within a loop of more iterations than are counted."""
    return any(_nested(inner) for eqn in _equations(jaxpr) if eqn.primitive.name == "pallas_call" for inner in _of(eqn))


def _nested(jaxpr: Any, within: bool = False) -> bool:
    for eqn in jaxpr.eqns:
        loops = eqn.primitive.name in _LOOPS and eqn.params.get("length", COUNTED + 1) > 1
        if loops and within:
            return True
        # An outer loop of few iterations is counted in full; of one whose bounds are values, nobody knows.
        outer = within or (loops and eqn.params.get("length", COUNTED + 1) > COUNTED)
        if any(_nested(inner, outer) for inner in _of(eqn)):
            return True
    return False


def _equations(jaxpr: Any) -> Iterator[Any]:
    """Those of a jaxpr and of the calls in it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in _of(eqn):
            yield from _equations(inner)


def _of(eqn: Any) -> Iterator[Any]:
    """The jaxprs of an equation."""
    for value in eqn.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(each, "jaxpr", each)
            if hasattr(inner, "eqns"):
                yield inner
