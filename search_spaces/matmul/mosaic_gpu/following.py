"""What follows the sums, inside the kernel: a bias and a residual, fetched ahead and applied piece by piece.

Each computing warpgroup fetches for itself, so that nobody else has to know when its slots are free. As it starts a
tile it asks for the bias of its columns and for the first pieces of the residual, which arrive while it multiplies. It
asks for a later piece as soon as it has used the one before it in its slot: the latency hides behind the pieces in
between, and shows in part where a warpgroup's result has more pieces than slots.

On chip that takes, for each computing warpgroup, its columns of the bias, and as many pieces of the residual as of the
result, in the residual's dtype. They are not the slots of the result: those are free only when copies have read them,
for which the residual would have to wait. To hold all pieces would hide all latency, and take the room of one or two
stages of operands.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from search_spaces.jax_compat import plgpu
from search_spaces.matmul import epilogue
from search_spaces.matmul.mosaic_gpu.geometry import Geometry
from search_spaces.matmul.mosaic_gpu.parts import Grouped, Part, Tiled
from search_spaces.matmul.problem import MatmulProblem


def following_on_chip(p: MatmulProblem, g: Geometry) -> dict[str, Any]:
    """The arrays and barriers of a block, by the names that `Following` has for them: none for a plain product."""
    slots: dict[str, Any] = {}
    if p.bias:
        slots["bias_slots"] = plgpu.SMEM((g.warpgroups, g.bias_width), jnp.dtype(p.bias))
        slots["bias_loaded"] = plgpu.Barrier(num_barriers=g.warpgroups)
    if p.residual:
        pieces, piece = int(g.slots), residual_piece(p, g)
        slots["residual_slots"] = plgpu.SMEM(
            (g.warpgroups, pieces, *piece.shape), piece.dtype, transforms=piece.transforms
        )
        slots["residual_loaded"] = plgpu.Barrier(num_arrivals=piece.copies, num_barriers=g.warpgroups * pieces)
    return slots


def residual_piece(p: MatmulProblem, g: Geometry) -> Part:
    on_chip = Grouped if g.exact else Tiled
    return on_chip(int(g.piece_m), int(g.piece_n), jnp.dtype(p.residual), int(g.residual_swizzle))


@dataclasses.dataclass(frozen=True)
class Following:
    """What follows the sums of one warpgroup.

    Attributes:
      geometry: of the launch.
      problem: whose `bias`, `activation` and `residual` say what follows.
      swap: sums are those of the transposed result.
      warpgroup: its number among those that compute.
      bias, residual: in device memory; None where there is none.
      bias_slots, bias_loaded, residual_slots, residual_loaded: see `following_on_chip`.
    """

    geometry: Geometry
    problem: MatmulProblem
    swap: bool
    warpgroup: Any
    bias: Any = None
    residual: Any = None
    bias_slots: Any = None
    bias_loaded: Any = None
    residual_slots: Any = None
    residual_loaded: Any = None

    def fetch_bias(self, batch: Any, first_column: Any) -> None:
        """Asks for the columns of the result that the warpgroup computes."""
        if self.bias is not None:
            columns = pl.ds(first_column, self.bias_slots.shape[-1])
            plgpu.copy_gmem_to_smem(
                self._of_batch(self.bias, batch, columns),
                self.bias_slots.at[self.warpgroup],
                self.bias_loaded.at[self.warpgroup],
            )

    def fetch_residual(self, slot: int, batch: Any, row: Any, column: Any) -> None:
        """Asks for a piece, by its first row and column of the result, whose slot nobody reads any more."""
        if self.residual is not None:
            for group, box in residual_piece(self.problem, self.geometry).boxes(row, column):
                plgpu.copy_gmem_to_smem(
                    self._of_batch(self.residual, batch, *box),
                    self.residual_slots.at[self.warpgroup, slot, *group],
                    self.residual_loaded.at[self._barrier(slot)],
                )

    def wait_for_bias(self) -> None:
        if self.bias is not None:
            plgpu.barrier_wait(self.bias_loaded.at[self.warpgroup])

    def finish(self, sums: jax.Array, slot: int, columns: Any) -> jax.Array:
        """The result of a piece, unrounded.

        Args:
          sums: float32, in the layout of wgmma's accumulators, or, where operands are swapped, in the transposed one.
          slot: of the piece of the residual.
          columns: of the piece, among those of the warpgroup.
        """
        layout = plgpu.Layout.WGMMA_TRANSPOSED if self.swap else plgpu.Layout.WGMMA
        bias = residual = None
        if self.bias is not None:
            along = 0 if self.swap else 1
            row = plgpu.layout_cast(self.bias_slots[self.warpgroup, columns], layout.reduce(1 - along))
            bias = plgpu.layout_cast(lax.broadcast_in_dim(row.astype(sums.dtype), sums.shape, (along,)), layout)
        if self.residual is not None:
            plgpu.barrier_wait(self.residual_loaded.at[self._barrier(slot)])
            piece = self.residual_slots.at[self.warpgroup, slot]
            residual = residual_piece(self.problem, self.geometry).load(piece, transposed=self.swap)
        return epilogue.finish(sums, bias=bias, activation=self.problem.activation, residual=residual)

    def _of_batch(self, array: Any, batch: Any, *slices: Any) -> Any:
        return array.at[(batch, *slices) if self.problem.batch > 1 else slices]

    def _barrier(self, slot: int) -> Any:
        return self.warpgroup * self.residual_slots.shape[1] + slot
