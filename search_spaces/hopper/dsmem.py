"""PTX for access to the shared memory of other CTAs in a cluster (DSMEM), and for cluster barriers.

PTX ISA: mapa, st.shared::cluster, barrier.cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

# All threads of all CTAs of a cluster arrive and wait. Data written before the arrival is visible to all of them after
# the wait.
ARRIVE = "barrier.cluster.arrive.release.aligned;"
WAIT = "barrier.cluster.wait.acquire.aligned;"


def ptx(text: str, operands: Sequence[Any] = (), constraints: str = "") -> None:
    """Emits PTX without a result, ordered with respect to the memory accesses around it."""
    clobbers = ",".join(filter(None, [constraints, "~{memory}"]))
    llvm.inline_asm(ir.Type.parse("!llvm.void"), list(operands), text, clobbers, has_side_effects=True)
