"""The state of a CTA: arrays in device memory and shared memory, barriers, and its tiles."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces.flash_attention.hopper.softmax import OnlineSoftmax
from search_spaces.flash_attention.hopper.tile_order import TileOrder
from search_spaces.flash_attention.hopper.tiling import Tiling
from search_spaces.hopper.limits import WGMMA_ROWS
from search_spaces.hopper.smem_layout import SmemTile
from search_spaces.jax_compat import plgpu


def scratch(t: Tiling) -> dict[str, Any]:
    """Returns the shared memory and barriers of a CTA, by the names of the fields of `Cta`."""
    p, s = t.p, t.s

    def tiles(count: int, tile: SmemTile) -> Any:
        return plgpu.SMEM((count, *tile.shape), tile.dtype, transforms=tile.transforms)

    types = {
        "q_smem": tiles(s.consumers, t.q_tile),
        "k_smem": tiles(s.stages, t.k_tile),
        "v_smem": tiles(s.stages, t.v_tile),
    }
    if not t.out_in_q:
        types["out_smem"] = tiles(s.consumers, t.out_tile)
    if p.return_lse:
        types["lse_smem"] = plgpu.SMEM((s.consumers, WGMMA_ROWS), jnp.float32)
    return types | {
        "q_full": plgpu.Barrier(num_arrivals=t.q_tile.copies, num_barriers=s.consumers),
        "k_full": plgpu.Barrier(num_arrivals=t.k_tile.copies, num_barriers=s.stages),
        "v_full": plgpu.Barrier(num_arrivals=t.v_tile.copies, num_barriers=s.stages),
        "k_empty": plgpu.Barrier(num_arrivals=s.consumers, num_barriers=s.stages),
        "v_empty": plgpu.Barrier(num_arrivals=s.consumers, num_barriers=s.stages),
    }


@dataclasses.dataclass(frozen=True)
class Cta:
    """A CTA of a launch.

    Attributes:
      t, softmax: of the launch.
      order: the tiles of this CTA.
      q, k, v, out, lse: arrays in device memory; `lse` is None without `return_lse`.
      the others: see `scratch`. A "full" barrier completes when TMA has filled a stage, an "empty" barrier when all
        consumers have read it.
    """

    t: Tiling
    softmax: OnlineSoftmax
    order: TileOrder
    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any
    q_smem: Any
    k_smem: Any
    v_smem: Any
    q_full: Any
    k_full: Any
    v_full: Any
    k_empty: Any
    v_empty: Any
    out_smem: Any = None
    lse_smem: Any = None

    def stage(self, step: Any) -> Any:
        return lax.rem(step, jnp.int32(self.t.s.stages))


def results(t: Tiling) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the outputs of the kernel: the result, and the log-sum-exp with `return_lse`.

    TMA clips the rows of a tile that lie beyond the result. The log-sum-exp is padded to whole tiles, because a bulk
    copy of one axis is not clipped.
    """
    p = t.p
    out = p.array(p.batch, t.q_rows, p.heads, p.value_dim)
    return (out, p.array(p.batch, p.heads, int(t.q_tiles * t.rows), dtype="float32")) if p.return_lse else (out,)
