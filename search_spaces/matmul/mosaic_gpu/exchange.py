"""How two blocks that share a tile add up their parts of k: each sends the other the half that the other finishes.

A computing warpgroup writes its sums straight from registers into the on-chip memory of the other block, whose barrier
counts the bytes (PTX ISA, st.async): no pass through device memory, no launch, and the same bits each time, as there
are two addends. The room for what arrives is used once: blocks along k have one tile each. Clusters start together, and
who waits for sums has sent its own, so neither ends before the other is done with its memory.

The interpreter knows no other block's memory. There the sums go through an array in device memory.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces.jax_compat import interprets, plgpu
from search_spaces.matmul.mosaic_gpu.geometry import Geometry, swizzled_bytes
from search_spaces.matmul.mosaic_gpu.parts import Tiled
from search_spaces.matmul.mosaic_gpu.schedule import HopperSchedule, mirrored
from search_spaces.matmul.problem import MatmulProblem


@dataclasses.dataclass(frozen=True)
class Exchange:
    """What the warpgroups of a block get from those of the other.

    Attributes:
      part: the half of a warpgroup's sums that it finishes.
      warpgroups: those of a block that compute.
    """

    part: Tiled
    warpgroups: int

    def on_chip(self) -> dict[str, Any]:
        """The arrays and barriers of a block, by the names that `add` has for them."""
        arrived = {"num_arrivals": 1, "num_barriers": self.warpgroups}
        return {
            "got": plgpu.SMEM((self.warpgroups, *self.part.shape), self.part.dtype, transforms=self.part.transforms),
            "arrived": plgpu.ClusterBarrier(collective_axes=("pair",), **arrived)
            if interprets()
            else plgpu.Barrier(**arrived),
        }

    def in_device_memory(self, workers: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """What a launch of so many clusters returns beside its result: for the interpreter alone."""
        shape = (workers, 2, self.warpgroups, *self.part.shape)
        return (jax.ShapeDtypeStruct(shape, self.part.dtype),) if interprets() else ()

    def add(self, sums: jax.Array, warpgroup: Any, mail: tuple[Any, ...], *, got: Any, arrived: Any) -> jax.Array:
        """The half that this block finishes, of both blocks' sums.

        Args:
          sums: ``[rows, 2 * columns]`` of this block's part of k, in the layout of wgmma's accumulators.
          warpgroup: its number among those that compute.
          mail: see `in_device_memory`.
          got, arrived: see `on_chip`.
        """
        pair, columns = lax.axis_index("pair"), self.part.columns
        first, second = sums[:, :columns], sums[:, columns:]
        own, other = lax.cond(pair == 0, lambda: (first, second), lambda: (second, first))
        got, arrived = got.at[warpgroup], arrived.at[warpgroup]
        if mail:
            (mail_of_all,) = mail
            box = mail_of_all.at[lax.axis_index("worker")]
            box[1 - pair, warpgroup] = other
            plgpu.barrier_arrive(arrived)
            plgpu.barrier_wait(arrived)
            received = box[pair, warpgroup]
        else:
            plgpu.async_store_smem(other, got, arrived, cluster_idx=1 - pair, cluster_dim="pair", optimized=False)
            plgpu.barrier_wait(arrived)
            received = self.part.load(got, transposed=False)
        # The same bits in whichever block: two addends.
        return own + received


def exchange(problem: MatmulProblem, schedule: HopperSchedule) -> Exchange | None:
    """What the blocks of a cluster send each other; None where they share no tile."""
    if schedule.cluster != "k":
        return None
    p, s = mirrored(problem, schedule) if schedule.swap else (problem, schedule)
    g, dtype = Geometry(p, s), jnp.dtype(p.sums_dtype)
    columns = g.wg_n // g.pair_k
    return Exchange(Tiled(g.wg_m, columns, dtype, int(swizzled_bytes(columns, dtype.itemsize))), g.warpgroups)
