"""Hardware barriers of a CTA: for warpgroups that take turns, and for a single warpgroup.

PTX ISA: barrier (bar.sync, bar.arrive). There are 16; Mosaic GPU uses low numbers, one for each warpgroup.
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
    """The order in which `warpgroups`, the first of a CTA, issue their wgmmas: 0, 1, ..., 0, 1, ...

    Each warpgroup waits at its own barrier, where its predecessor arrives. Results do not depend on the order, so the
    interpreter ignores it.
    """

    warpgroups: int

    def start(self, warpgroup: Any) -> None:
        """Gives warpgroup 0 the first turn."""

        @pl.when(warpgroup == self.warpgroups - 1)
        def give() -> None:
            self.give()

    def take(self) -> None:
        """Waits for this warpgroup's turn."""
        self._barrier(0, "sync")

    def give(self) -> None:
        """Gives the next warpgroup its turn."""
        self._barrier(1, "arrive")

    def end(self, warpgroup: Any, taken: Any = 0) -> None:
        """Takes the last turn that was given, after `taken` turns in all.

        0 means that each warpgroup took the same number.
        """

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
    """Synchronizes all threads of this warpgroup."""

    @mosaic_gpu_code(lambda: None)
    def synchronize(_: Any) -> None:
        mgpu.warpgroup_barrier()

    synchronize()
