"""Hardware barriers of a CTA by which its warpgroups take turns, and that of one warpgroup.

PTX ISA: barrier (bar.sync, bar.arrive). There are 16; Mosaic GPU uses those with low numbers, one for each warpgroup.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from search_spaces.hopper.limits import WARPGROUP
from search_spaces.jax_compat import mosaic_gpu_code

FIRST = 8


@dataclasses.dataclass(frozen=True)
class Turns:
    """The order in which `warpgroups`, the first of a CTA, issue their products: 0, 1, ..., 0, 1, ...

    Each has a barrier, at which it waits and its predecessor arrives. Values do not depend on it, so that there is
    nothing to interpret.
    """

    warpgroups: int

    def start(self, warpgroup: Any) -> None:
        """Gives warpgroup 0 the first turn."""

        @pl.when(warpgroup == self.warpgroups - 1)
        def give() -> None:
            self.give()

    def take(self) -> None:
        """Waits for its turn."""
        self._barrier(0, "sync")

    def give(self) -> None:
        """Gives the next one its turn."""
        self._barrier(1, "arrive")

    def end(self, warpgroup: Any, taken: Any = 0) -> None:
        """Takes the last turn that was given, after so many in all; 0 stands for as many of each."""

        @pl.when(warpgroup == lax.rem(taken, self.warpgroups))
        def take() -> None:
            self.take()

    def _barrier(self, offset: int, operation: str) -> None:
        @mosaic_gpu_code(lambda: None)
        def barrier(_: Any) -> None:
            i32 = ir.IntegerType.get_signless(32)

            def number(value: int) -> Any:
                return mgpu.utils.c(value, i32)

            index = mgpu.utils.warpgroup_idx(sync=True)
            if offset:
                index = arith.remui(arith.addi(index, number(offset)), number(self.warpgroups))
            threads = 2 * WARPGROUP
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"),
                [arith.addi(index, number(FIRST))],
                f"bar.{operation} $0, {threads};",
                "r",
                has_side_effects=True,
            )

        barrier()


def synchronize_warpgroup() -> None:
    """All threads of this warpgroup wait for each other."""

    @mosaic_gpu_code(lambda: None)
    def synchronize(_: Any) -> None:
        mgpu.warpgroup_barrier()

    synchronize()
