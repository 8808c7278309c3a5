"""Flash attention forward on Hopper: supported problems, the launch, the roles of the warpgroups, and the producer.

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

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from search_spaces.attention import hopper
from search_spaces.attention.problem import SOFTCAP
from search_spaces.flash_attention.hopper import space
from search_spaces.flash_attention.hopper.consumer import Consumer
from search_spaces.flash_attention.hopper.cta import Cta, OnlineSoftmax, results, scratch
from search_spaces.flash_attention.hopper.decode import FlashDecodingSchedule, MosaicGpuFlashDecoding
from search_spaces.flash_attention.hopper.schedule import REGISTERS, FlashAttentionSchedule, TileOrder, Tiling
from search_spaces.flash_attention.hopper.space import footprint
from search_spaces.flash_attention.problem import FlashAttentionProblem
from search_spaces.footprint import Footprint
from search_spaces.hopper import not_hopper, padded
from search_spaces.hopper.smem_layout import SmemTile
from search_spaces.jax_compat import plgpu
from search_spaces.kernel import INDICES_OF_32_BITS, Kernel, padded_elements
from search_spaces.space import Column, Columns, Space
from search_spaces.target import Target


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

        hopper.load_head_rows(kind, array, at, smem.at[stage], full.at[stage])

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


# ------------------------------------------------------------------------------
# Flash attention forward on Hopper: the supported problems and the launch.
#
# For lengths that are not multiples of 8, shared memory has the untiled layout from JAX 0.11 on
# (hopper/smem_layout.py). With earlier versions, the arrays are copied into padded arrays, and the padding is masked
# or dropped.

# Maximum columns of a wgmma result (PTX ISA, wgmma.mma_async). Registers hold this many as well.
MOST_HEAD_DIM = 256
# A swizzled row of operands has at least 32 bytes.
HEAD_DIM_STEP = 16


class MosaicGpuFlashAttention(Kernel[FlashAttentionProblem, FlashAttentionSchedule]):
    backend = "mosaic_gpu"
    version = 1
    most_elements = INDICES_OF_32_BITS
    verified_on = frozenset({"sm_90"})  # tests/device on an NVIDIA H200

    def verified(self, problem: FlashAttentionProblem, schedules: Columns, target: Target) -> Column | bool:
        if target.architecture not in self.verified_on:
            return False
        # "snake" with sections of more than one but not all heads has not run on a device yet.
        heads = problem.batch * problem.heads
        return (schedules.order != "snake") | (schedules.section == 1) | (schedules.section == heads)

    def supports(self, problem: FlashAttentionProblem, target: Target) -> str | None:
        p = problem
        if reason := not_hopper(target):
            return reason
        if jnp.dtype(p.dtype).itemsize != 2:
            return f"multiplies bfloat16 and float16, not {p.dtype}"
        for name, columns in (("head_dim", p.head_dim), ("head_dim_v", p.value_dim)):
            if columns % HEAD_DIM_STEP:
                return f"needs a {name} that is a multiple of {HEAD_DIM_STEP}, which {columns} is not"
            if columns > MOST_HEAD_DIM:
                return f"needs a {name} of at most {MOST_HEAD_DIM}, which {columns} is not"
        return None

    def largest_array(self, problem: FlashAttentionProblem) -> int:
        # Sequences are padded to whole tiles.
        return padded_elements((*problem.qkv(), problem.out()), -3, 256)

    def space(self, problem: FlashAttentionProblem, target: Target) -> Space[FlashAttentionSchedule]:
        return space.space(problem, target.cores)

    def footprint(self, problem: FlashAttentionProblem, schedules: Columns, target: Target) -> Footprint:
        return footprint(problem, schedules, target.cores)

    def run(
        self,
        problem: FlashAttentionProblem,
        schedule: FlashAttentionSchedule,
        target: Target,
        /,
        *args: Any,
        scale: float | None = None,
        softcap: float = SOFTCAP,
    ) -> Any:
        scale = problem.default_scale() if scale is None else scale
        softmax = OnlineSoftmax(float(scale), float(softcap) if problem.softcap else None)
        return _launch(problem, schedule, target, softmax, *args)


def _launch(
    p: FlashAttentionProblem, s: FlashAttentionSchedule, target: Target, softmax: OnlineSoftmax, *args: Any
) -> Any:
    t = Tiling(p, s)
    q, k, v, *lengths = args
    ctas = min(target.cores, t.tiles) if s.persistent else t.tiles
    launch = plgpu.kernel(
        kernel(p, s, softmax, ctas),
        out_type=results(t),
        scratch_types=tuple(scratch(t).values()),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=s.consumers + 1,
        thread_name="wg",
        # No scratch, because the lanes of one warp reduce each row.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=0, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )
    # Indices must be 32 bits wide, even if the user enables x64.
    with jax.enable_x64(False):
        rows = (t.q_rows, t.kv_rows, t.kv_rows)
        out, *lse = launch(*(padded(x, (n, None, None)) for x, n in zip((q, k, v), rows, strict=True)), *lengths)
    out = out[:, : p.q_len]
    return (out, lse[0][..., : p.q_len]) if p.return_lse else out


__all__ = ["FlashAttentionSchedule", "FlashDecodingSchedule", "MosaicGpuFlashAttention", "MosaicGpuFlashDecoding"]
