"""The Mosaic GPU kernel: the roles of the warpgroups of a CTA, and the producer.

A producer warpgroup loads blocks of keys and values by TMA into two pipelines of `stages` each. Each consumer computes
64 rows of queries and overlaps its softmax with its own products, as in FlashAttention-3. At each step it issues
``S = Q K^T`` of a block, then ``O += P V`` of the previous block, and computes the softmax of S while the second
product runs. With `ping_pong`, consumers also take turns to issue products, so that the softmax of one overlaps the
products of another.

Persistent consumers continue this overlap from one tile to the next (t, j: block j of tile t, three blocks per tile):

      products                    lanes                              TMA
      S 0, 2 | O += P V 0, 1      softmax of S 0, 2                  load of q of tile 1, after S 0, 2 has read q
      S 1, 0 | O += P V 0, 2      softmax of S 1, 0
                                  normalized O of tile 0 to SMEM     store of O of tile 0
      S 1, 1 | O += P V 1, 0      softmax of S 1, 1

The softmax of a first block and the last product of a tile are therefore overlapped, too. The step after the last tile
of a CTA multiplies whatever is in shared memory; its result is unused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from search_spaces.attention.hopper import rows_of_heads
from search_spaces.flash_attention.hopper.consumer import Consumer
from search_spaces.flash_attention.hopper.cta import Cta, scratch
from search_spaces.flash_attention.hopper.schedule import FlashAttentionSchedule
from search_spaces.flash_attention.hopper.softmax import OnlineSoftmax
from search_spaces.flash_attention.hopper.tile_order import TileOrder
from search_spaces.flash_attention.hopper.tiling import REGISTERS, Tiling
from search_spaces.flash_attention.problem import FlashAttentionProblem
from search_spaces.hopper.smem_layout import SmemTile
from search_spaces.jax_compat import plgpu


def kernel(
    problem: FlashAttentionProblem, schedule: FlashAttentionSchedule, softmax: OnlineSoftmax, ctas: int
) -> Callable[..., None]:
    """Returns the kernel body for a grid of `ctas` CTAs.

    Its arguments are the operands and results in device memory, followed by `scratch`.
    """
    t = Tiling(problem, schedule)
    names = tuple(scratch(t))

    def attention(q: Any, k: Any, v: Any, *rest: Any) -> None:
        count = len(problem.length_operands())
        lengths, (out, *others) = problem.lengths(rest[:count]), rest[count:]
        lse = others.pop(0) if problem.return_lse else None
        order = TileOrder(t, lax.axis_index("cta"), ctas, lengths)
        cta = Cta(t, softmax, order, q, k, v, out, lse, **dict(zip(names, others, strict=True)))
        consumers, warpgroup = schedule.consumers, lax.axis_index("wg")
        consumer_registers, producer_registers = REGISTERS[consumers]

        @pl.when(warpgroup < consumers)
        def consumer() -> None:
            plgpu.set_max_registers(consumer_registers, action="increase")
            Consumer(cta, warpgroup).run()

        @pl.when(warpgroup == consumers)
        def producer() -> None:
            plgpu.set_max_registers(producer_registers, action="decrease")
            produce(cta)

    return attention


def produce(cta: Cta) -> None:
    """Loads the keys and values of all steps of all tiles, in the producer warpgroup."""
    size, stages, group = cta.t.s.block_kv, cta.t.s.stages, cta.t.p.group

    def load(kind: SmemTile, array: Any, at: Any, smem: Any, full: Any, empty: Any, step: Any) -> None:
        stage = cta.stage(step)

        @pl.when(step >= stages)
        def wait() -> None:
            plgpu.barrier_wait(empty.at[stage])

        rows_of_heads.load(kind, array, at, smem.at[stage], full.at[stage])

    def load_tile(position: Any, base: Any) -> Any:
        tile = cta.order.tile(position)

        def load_step(j: Any, _: None) -> None:
            at = tile.batch, (tile.last - j) * size, lax.div(tile.head, jnp.int32(group))
            load(cta.t.k_tile, cta.k, at, cta.k_smem, cta.k_full, cta.k_empty, base + j)
            load(cta.t.v_tile, cta.v, at, cta.v_smem, cta.v_full, cta.v_empty, base + j)

        lax.fori_loop(0, tile.steps, load_step, None)
        return base + tile.steps

    def drain(step: Any, _: None) -> None:
        plgpu.barrier_wait(cta.k_empty.at[cta.stage(step)])
        plgpu.barrier_wait(cta.v_empty.at[cta.stage(step)])

    steps = lax.fori_loop(0, cta.order.count, load_tile, jnp.int32(0))
    lax.fori_loop(jnp.maximum(steps - stages, 0), steps, drain, None)
