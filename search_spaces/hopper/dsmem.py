"""PTX by which CTAs of a cluster reach each other's shared memory (DSMEM), and synchronize.

PTX ISA: mapa, st.shared::cluster, barrier.cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

# All threads of all CTAs of a cluster arrive, and wait for each other: what they have written before the one, all of
# them see after the other.
ARRIVE = "barrier.cluster.arrive.release.aligned;"
WAIT = "barrier.cluster.wait.acquire.aligned;"


def ptx(text: str, operands: Sequence[Any] = (), constraints: str = "") -> None:
    """Runs PTX that returns nothing, in the order in which memory is used around it."""
    clobbers = ",".join(filter(None, [constraints, "~{memory}"]))
    llvm.inline_asm(ir.Type.parse("!llvm.void"), list(operands), text, clobbers, has_side_effects=True)
