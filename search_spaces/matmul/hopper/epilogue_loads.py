"""The operands of the epilogue, a bias and a residual: prefetched by each consumer, and applied subtile by subtile.

Each consumer warpgroup loads its own operands, so that no other warpgroup has to track its empty stages. At the start
of a tile it requests the bias of its columns and the first subtiles of the residual, which arrive during the main loop.
It requests a later subtile as soon as it has used the subtile that occupied the same stage. The latency is hidden
behind the subtiles in between. It is partly exposed if a consumer's result has more subtiles than stages.

In shared memory each consumer needs its columns of the bias, and as many subtiles of the residual as of the result, in
the residual's dtype. These do not share the stages of the result: those become empty only after TMA has read them, and
the residual would have to wait for that. Holding all subtiles would hide all latency, but would take the space of one
or two stages of operands.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from search_spaces.hopper.smem_layout import SmemTile, Tiled, Untiled
from search_spaces.jax_compat import plgpu
from search_spaces.matmul import epilogue
from search_spaces.matmul.hopper.schedule import Source, Tiling
from search_spaces.matmul.problem import MatmulProblem


def bias_scratch(p: MatmulProblem, t: Tiling) -> dict[str, Any]:
    """Returns the barriers and the array of a CTA's bias by `EpilogueLoads`'s names; empty without a bias."""
    if not p.bias:
        return {}
    return {
        "bias_full": plgpu.Barrier(num_barriers=t.consumers),
        "bias_smem": plgpu.SMEM((t.consumers, t.bias_width), jnp.dtype(p.bias)),
    }


def residual_scratch(p: MatmulProblem, t: Tiling) -> dict[str, Any]:
    """Returns the same for a residual."""
    if not p.residual:
        return {}
    stages, tile = int(t.epi_stages), residual_tile(p, t)
    return {
        "residual_full": plgpu.Barrier(num_arrivals=tile.copies, num_barriers=t.consumers * stages),
        "residual_smem": plgpu.SMEM((t.consumers, stages, *tile.shape), tile.dtype, transforms=tile.transforms),
    }


def residual_tile(p: MatmulProblem, t: Tiling) -> SmemTile:
    layout = Untiled if t.untiled else Tiled
    return layout(int(t.epi_m), int(t.epi_n), jnp.dtype(p.residual), int(t.residual_swizzle))


@dataclasses.dataclass(frozen=True)
class EpilogueLoads:
    """The epilogue loads of one consumer warpgroup.

    Attributes:
      tiling: of the launch.
      problem: its `bias`, `activation` and `residual` are applied.
      swap_ab: whether the accumulators are those of the transposed result.
      consumer: index of the warpgroup among the consumers.
      bias, residual: in device memory; None if there is none.
      bias_full, bias_smem, residual_full, residual_smem: see `bias_scratch` and `residual_scratch`.
    """

    tiling: Tiling
    problem: MatmulProblem
    swap_ab: bool
    consumer: Any
    bias: Source | None = None
    residual: Any = None
    bias_full: Any = None
    bias_smem: Any = None
    residual_full: Any = None
    residual_smem: Any = None

    def fetch_bias(self, batch: Any, first_column: Any) -> None:
        """Starts the load of the bias for the columns that the consumer computes."""
        if self.bias is not None:
            (first_column,) = self.bias.at(first_column)
            columns = pl.ds(first_column, self.bias_smem.shape[-1])
            plgpu.copy_gmem_to_smem(
                self._of_batch(self.bias.array, batch, columns),
                self.bias_smem.at[self.consumer],
                self.bias_full.at[self.consumer],
            )

    def fetch_residual(self, stage: int, batch: Any, row: Any, column: Any) -> None:
        """Starts the load of the subtile at `row` and `column` of the result, into a stage that is no longer read."""
        if self.residual is not None:
            for index, box in residual_tile(self.problem, self.tiling).boxes(row, column):
                plgpu.copy_gmem_to_smem(
                    self._of_batch(self.residual, batch, *box),
                    self.residual_smem.at[self.consumer, stage, *index],
                    self.residual_full.at[self._barrier(stage)],
                )

    def wait_for_bias(self) -> None:
        if self.bias is not None:
            plgpu.barrier_wait(self.bias_full.at[self.consumer])

    def apply(self, acc: jax.Array, stage: int, columns: Any) -> jax.Array:
        """Returns the result of a subtile, before rounding.

        Args:
          acc: float32, in the layout of wgmma's accumulators, or, with `swap_ab`, in the transposed layout.
          stage: of the subtile of the residual.
          columns: of the subtile, relative to the consumer's columns.
        """
        layout = plgpu.Layout.WGMMA_TRANSPOSED if self.swap_ab else plgpu.Layout.WGMMA
        bias = residual = None
        if self.bias is not None:
            along = 0 if self.swap_ab else 1
            row = plgpu.layout_cast(self.bias_smem[self.consumer, columns], layout.reduce(1 - along))
            bias = plgpu.layout_cast(lax.broadcast_in_dim(row.astype(acc.dtype), acc.shape, (along,)), layout)
        if self.residual is not None:
            plgpu.barrier_wait(self.residual_full.at[self._barrier(stage)])
            smem = self.residual_smem.at[self.consumer, stage]
            residual = residual_tile(self.problem, self.tiling).load(smem, transposed=self.swap_ab)
        return epilogue.apply(acc, bias=bias, activation=self.problem.activation, residual=residual)

    def _of_batch(self, array: Any, batch: Any, *slices: Any) -> Any:
        return array.at[(batch, *slices) if self.problem.batch > 1 else slices]

    def _barrier(self, stage: int) -> Any:
        return self.consumer * self.residual_smem.shape[1] + stage
