"""The decode kernel: a CTA computes one tile of packed rows with one split of the keys of one head.

The producer warpgroup loads q once, and blocks of keys and values by TMA into two pipelines of `stages` each. Loads run
ahead as far as the pipelines allow, because bytes in flight determine the speed. The consumer always computes 64 rows,
even if fewer are valid: a block of 64 keys of 128 elements takes half of the cycles that its load from device memory
takes.

      producer            consumer
      load q
      load k 0, v 0       wait k;  s = q k^T  -> k empty
      load k 1, v 1       p = exp2(s - max)
         :                wait v;  o += p v   -> v empty
         :                   :
                          combine with the other splits (combine.py), and store

TMA fills rows beyond the packed ones with zeros. These rows are not stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from search_spaces.attention import hopper
from search_spaces.attention.hopper import zero_rows_from
from search_spaces.attention.problem import Lengths
from search_spaces.flash_attention.hopper.combine import (
    CONSUMER_REGISTERS,
    LOWEST,
    PRODUCER_REGISTERS,
    RANK,
    DecodePlan,
    SplitCombine,
    natural,
    store_fragment,
)
from search_spaces.hopper import WARP, WGMMA_ROWS, synchronization
from search_spaces.hopper.synchronization import Pipeline
from search_spaces.jax_compat import interprets, mosaic_gpu_code, plgpu

# ------------------------------------------------------------------------------
# Masks logits in registers by the first column and the end of the columns that each row sees.
#
# A comparison with an array of column indices would need as many registers as the logits: LLVM keeps that array in
# registers, because it is the same for all blocks. Here a column index is the first column of the thread plus a
# constant. The first column is subtracted from the bounds, and the constant is an immediate of the compare
# instruction.

# Layout of wgmma accumulators (PTX ISA, register fragments of wgmma.mma_async): a thread has two of every eight columns
# in two rows, and four threads share a row.
COLUMNS, EACH, HALVES = 8, 2, 2
SHARING = COLUMNS // EACH


def mask_columns(x: jax.Array, end: jax.Array, *first: jax.Array) -> jax.Array:
    """Returns `x` where ``first[row] <= column < end[row]``, and minus infinity elsewhere.

    Args:
      x: float32 ``[64, columns]`` in the layout of wgmma accumulators.
      end, first: int32 ``[64]`` in the layout of the rows of `x`. `first` is optional, and defaults to column 0.
    """
    layout = plgpu.Layout.WGMMA

    def meaning(x: jax.Array, end: jax.Array, *first: jax.Array) -> jax.Array:
        column = lax.broadcasted_iota(jnp.int32, x.shape, 1)
        seen = column < end[:, None]
        for one in first:
            seen &= column >= one[:, None]
        return jnp.where(seen, x, -jnp.inf)

    @mosaic_gpu_code(
        meaning,
        arg_types=(layout, *[layout.reduce(1)] * (1 + len(first))),
        return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=layout),
    )
    def mask(_: Any, x: Any, *limits: Any) -> Any:
        bits, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        own = arith.muli(arith.remui(mgpu.thread_idx(), mgpu.c(SHARING, bits)), mgpu.c(EACH, bits))
        end, *first = ([arith.subi(_scalar(limit), own) for limit in each.registers.flat] for each in limits)
        hidden = mgpu.c(float("-inf"), f32)
        registers = x.registers.copy()
        for number, pair in enumerate(x.registers.flat):
            block, half = divmod(number, HALVES)
            elements = []
            for position in range(EACH):
                column = mgpu.c(block * COLUMNS + position, bits)
                element = vector.extract(pair, [], [position])
                shown = arith.cmpi(arith.CmpIPredicate.slt, column, end[half])
                for one in first:
                    shown = arith.andi(shown, arith.cmpi(arith.CmpIPredicate.sge, column, one[half]))
                elements.append(arith.select(shown, element, hidden))
            registers.flat[number] = vector.from_elements(pair.type, elements)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    masked: jax.Array = mask(x, end, *first)
    return masked


def _scalar(register: Any) -> Any:
    return vector.extract(register, [], [0]) if isinstance(register.type, ir.VectorType) else register


# The stores of a result are unrolled up to this number of fragments.
MOST_UNROLLED = 8
LOG2_E = 1.4426950408889634


def scratch(plan: DecodePlan) -> dict[str, Any]:
    """Returns the shared memory and barriers of a CTA, by name."""
    p, stages = plan.p, plan.stages
    k, v, barriers = plan.k_tile, plan.v_tile, plgpu.Barrier(num_barriers=stages)
    return {
        "q": plgpu.SMEM((WGMMA_ROWS, p.head_dim), plan.dtype, transforms=plan.q_tile.transforms),
        "k": plgpu.SMEM((stages, *k.shape), plan.dtype, transforms=k.transforms),
        "v": plgpu.SMEM((stages, *v.shape), plan.dtype, transforms=v.transforms),
        "q_full": plgpu.Barrier(num_barriers=1),
        "k_full": plgpu.Barrier(num_arrivals=k.copies, num_barriers=stages),
        "k_empty": barriers,
        "v_full": plgpu.Barrier(num_arrivals=v.copies, num_barriers=stages),
        "v_empty": barriers,
    }


@dataclasses.dataclass(frozen=True)
class Cta:
    """A CTA of a launch.

    Attributes:
      plan: of the launch.
      scale, softcap: of logits; `scale` includes log2(e) unless logits are capped.
      batch, kv_head, tile, partial, rank: indices of the CTA in the grid and its cluster.
      q, k, v: arrays in device memory.
      smem: shared memory and barriers by name, see `scratch`.
      keys: pipelines of keys and of values.
      first, end: range of the blocks of keys of this split.
      visible: first key and end of the keys that any row of the tile sees.
      q_end: number of queries of the sequence that see a key.
    """

    plan: DecodePlan
    scale: float
    softcap: float
    batch: Any
    kv_head: Any
    tile: Any
    partial: Any
    rank: Any
    q: Any
    k: Any
    v: Any
    smem: dict[str, Any]
    keys: tuple[Pipeline, Pipeline]
    first: Any
    end: Any
    visible: tuple[Any, Any]
    q_end: Any

    @property
    def cluster(self) -> Any:
        """Index of the CTA's cluster in the order of the stored results."""
        group = (self.batch * self.plan.p.kv_heads + self.kv_head) * self.plan.tiles + self.tile
        return self.partial * self.plan.groups + group


def kernel(plan: DecodePlan, scale: float, softcap: float) -> Callable[..., None]:
    """Returns the kernel body.

    Its arguments are arrays in device memory: operands, flat results and the interpreter's mailbox.
    """
    p = plan.p
    merge = SplitCombine(plan.cluster, plan.smem_rows, p.value_dim)
    types = scratch(plan)

    def decode(*arrays: Any) -> None:
        operands, (out, *others) = arrays[: len(p.operands())], arrays[len(p.operands()) :]
        lse, mailbox = (others[0], others[1:]) if plan.second_launch or p.return_lse else (None, others)
        batch, warpgroup = lax.axis_index("batch"), lax.axis_index("wg")

        def with_scratch(*refs: Any) -> None:
            smem = dict(zip(types, refs, strict=False))
            keys = tuple(Pipeline(plan.stages, 1, smem[f"{x}_full"], smem[f"{x}_empty"]) for x in "kv")
            tile, partial, rank = lax.axis_index("tile"), lax.axis_index("partial"), lax.axis_index(RANK)
            lengths = Lengths(*(None if x is None else x[batch] for x in p.lengths(operands)))
            visible = visible_keys(plan, tile, lengths)
            first, end = split(plan, visible, partial * plan.cluster + rank)
            cta = Cta(
                plan=plan,
                scale=scale * (1.0 if p.softcap else LOG2_E),
                softcap=softcap,
                batch=batch,
                kv_head=lax.axis_index("kv_head"),
                tile=tile,
                partial=partial,
                rank=rank,
                q=operands[0],
                k=operands[1],
                v=operands[2],
                smem=smem,
                keys=(keys[0], keys[1]),
                first=first,
                end=end,
                visible=visible,
                q_end=p.counted(lengths).q,
            )

            @pl.when(warpgroup == 1)
            def producer() -> None:
                if plan.two_ctas:
                    plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
                produce(cta)
                merge.meet()

            @pl.when(warpgroup == 0)
            def consumer() -> None:
                if plan.two_ctas:
                    plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
                finish(cta, merge, attend(cta), refs[len(types) :], mailbox, out, lse)

        # Positional arguments keep this order; JAX would sort keyword arguments by name.
        pl.run_scoped(with_scratch, *types.values(), *merge.scratch(), collective_axes="wg")

    return decode


def visible_keys(plan: DecodePlan, tile: Any, lengths: Lengths) -> tuple[Any, Any]:
    """Returns the first key and the end of the keys that any query of the tile sees."""
    p = plan.p
    start: Any = 0
    queries, keys = p.counted(lengths)
    end = jnp.int32(keys)
    if p.left is not None:
        start = lax.max(lax.div(tile * WGMMA_ROWS, p.group) - p.left, 0)
    if p.right is not None:
        last = lax.min(lax.div(tile * WGMMA_ROWS + WGMMA_ROWS - 1, p.group), queries - 1)
        end = lax.min(end, last + p.right + 1)
    return start, end


def split(plan: DecodePlan, visible: tuple[Any, Any], number: Any) -> tuple[Any, Any]:
    """Returns the first block and the end of split `number`; the sizes of splits differ by at most one block."""
    start, end = visible
    first = 0 if isinstance(start, int) else lax.div(start, plan.block_kv)
    blocks = lax.max(lax.div(end + (plan.block_kv - 1), plan.block_kv) - first, 0)
    each, more = lax.div(blocks, plan.split_kv), lax.rem(blocks, plan.split_kv)
    begin = first + number * each + lax.min(number, more)
    return begin, begin + each + (number < more).astype(jnp.int32)


def produce(cta: Cta) -> None:
    """Loads q and all blocks of the split, in the producer warpgroup."""
    plan, smem = cta.plan, cta.smem
    rows = pl.ds(cta.tile * WGMMA_ROWS, WGMMA_ROWS)
    plgpu.copy_gmem_to_smem(cta.q.at[cta.batch, cta.kv_head, rows], smem["q"], smem["q_full"].at[0])

    def load(block: Any, _: None) -> None:
        step = block - cta.first
        where, tiles = (cta.batch, block * plan.block_kv, cta.kv_head), (plan.k_tile, plan.v_tile)
        for pipeline, array, tile, name in zip(cta.keys, (cta.k, cta.v), tiles, "kv", strict=True):
            stage = pipeline.stage(step)
            pipeline.producer_acquire(step, stage)
            hopper.load_head_rows(tile, array, where, smem[name].at[stage], pipeline.full.at[stage])

    lax.fori_loop(cta.first, cta.end, load, None)
    for pipeline in cta.keys:
        pipeline.producer_tail(cta.end - cta.first)


def attend(cta: Cta) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs the loop of the consumer and returns o, m and l of the split, as defined in combine.py."""
    plan, p, smem = cta.plan, cta.plan.p, cta.smem
    layout = plgpu.Layout.WGMMA
    by_row = layout.reduce(1)
    plgpu.barrier_wait(smem["q_full"].at[0])

    def step(block: Any, carry: tuple[jax.Array, ...], masks: bool) -> tuple[jax.Array, ...]:
        o, m, total = carry
        stage = cta.keys[0].stage(block - cta.first)
        cta.keys[0].consumer_wait(0, stage)
        x = _logits(plan, smem["q"], smem["k"].at[stage])
        cta.keys[0].consumer_release(stage)
        x = x * cta.scale
        if p.softcap:  # tanh by exponentials, because the hardware tanh has only 11 bits of precision.
            x = LOG2_E * cta.softcap * (1 - 2 / (1 + jnp.exp2(x * (2 * LOG2_E / cta.softcap))))
        if masks:
            x = _masked(cta, x, block)
        most = lax.max(m, jnp.max(x, axis=1))
        weights = jnp.exp2(x - _by_column(most, x))
        again = jnp.exp2(m - most)
        total = total * again + jnp.sum(weights, axis=1)
        o = o * _by_column(again, o)
        cta.keys[1].consumer_wait(0, stage)
        if masks and p.pads_keys:
            zero_rows_from(cta.visible[1] - block * plan.block_kv, plan.v_tile, smem["v"].at[stage])
        o = _add_product(plan, o, weights.astype(plan.dtype), smem["v"].at[stage])
        cta.keys[1].consumer_release(stage)
        return o, most, total

    carry = (
        plgpu.layout_cast(jnp.zeros((WGMMA_ROWS, p.value_dim), jnp.float32), layout),
        plgpu.layout_cast(jnp.full((WGMMA_ROWS,), LOWEST, jnp.float32), by_row),
        plgpu.layout_cast(jnp.zeros((WGMMA_ROWS,), jnp.float32), by_row),
    )
    whole, masked = cta.first, cta.end
    if not _masks_all(p):
        whole = lax.clamp(cta.first, lax.div(cta.visible[1], plan.block_kv), cta.end)
        carry = lax.fori_loop(cta.first, whole, lambda block, carry: step(block, carry, False), carry)
    if p.left is not None or p.right is not None or p.kv_lengths or p.kv_len % plan.block_kv:
        carry = lax.fori_loop(whole, masked, lambda block, carry: step(block, carry, True), carry)
    return carry[0], carry[1], carry[2]


def _masks_all(p: Any) -> bool:
    """Returns whether rows see different keys, or may not see the first keys."""
    return p.left is not None or (p.right is not None and p.q_len > 1)


def _masked(cta: Cta, x: jax.Array, block: Any) -> jax.Array:
    """Sets logits of keys that a row does not see to minus infinity."""
    p, before = cta.plan.p, block * cta.plan.block_kv
    by_row = plgpu.Layout.WGMMA.reduce(1)
    end = plgpu.layout_cast(lax.broadcast(cta.visible[1] - before, (WGMMA_ROWS,)), by_row)
    if p.right is not None:
        end = lax.min(end, _queries(cta) + (p.right + 1 - before))
    first = () if p.left is None else (_queries(cta) - (p.left + before),)
    return mask_columns(x, end, *first)


def _queries(cta: Cta) -> jax.Array:
    """Returns the query of each row."""
    row = plgpu.broadcasted_iota(jnp.int32, (WGMMA_ROWS,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
    row = row + cta.tile * WGMMA_ROWS
    return row if cta.plan.p.group == 1 else lax.div(row, jnp.full_like(row, cta.plan.p.group))


def _by_column(by_row: jax.Array, like: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(by_row, like.shape, [0])


def _product(acc: Any, a: Any, b: Any) -> jax.Array:
    plgpu.wgmma(acc, a, b)
    product: jax.Array = acc[...]
    return product


def _logits(plan: DecodePlan, q: Any, k: Any) -> jax.Array:
    if plan.untiled:
        transforms = plan.q_tile.transforms, plan.k_tile.transforms
        started = hopper.start_product(
            None, q, k, columns=plan.block_kv, transforms=transforms, transpose_a=False, transpose_b=True
        )
        return synchronization.wait_wgmma(0, started)
    found: jax.Array = pl.run_scoped(
        lambda acc: _product(acc, q, k.T), plgpu.ACC((WGMMA_ROWS, plan.block_kv), jnp.float32)
    )
    return found


def _add_product(plan: DecodePlan, o: jax.Array, p: jax.Array, v: Any) -> jax.Array:
    """Returns ``o + p v``; the interpreter's wgmma does not support probabilities in registers."""
    if plan.untiled:
        return hopper.finish_register_wgmma(hopper.start_register_wgmma(o, p, v, plan.swizzle))
    if interprets():
        return o + jnp.dot(p.astype(jnp.float32), v[...].astype(jnp.float32))

    def accumulate(acc: Any) -> jax.Array:
        acc[...] = o
        return _product(acc, p, v)

    added: jax.Array = pl.run_scoped(accumulate, plgpu.ACC(o.shape, jnp.float32))
    return added


def finish(
    cta: Cta,
    merge: SplitCombine,
    result: tuple[jax.Array, jax.Array, jax.Array],
    smem: Any,
    mailbox: Any,
    out: Any,
    lse: Any | None,
) -> None:
    """Combines the results of a cluster, and stores this CTA's part of the result, and of `lse` if it is not None."""
    plan = cta.plan
    o, m, total = result
    if plan.p.q_lengths:
        there = _queries(cta) < cta.q_end
        m, total = jnp.where(there, m, LOWEST), jnp.where(there, total, 0.0)
    merge.publish((o, m, total), smem, mailbox, cta.cluster)

    def store(number: Any, count: int, elements: int, output: bool) -> None:
        start = number * count
        value, logarithm = merge.fragment(start, count, smem, mailbox, cta.cluster, output=output)
        place = cta.cluster * elements + start
        if output:
            store_fragment(out, place, value)
        if plan.second_launch:
            store_fragment(lse, place, logarithm)
        elif not output:
            store_fragment(lse, place, natural(logarithm))

    def store_all(count: int, elements: int, *, output: bool) -> None:
        """Stores the fragments of this rank."""
        fragments = elements // count
        if plan.cluster == 1 and fragments <= MOST_UNROLLED:
            for number in range(fragments):
                store(number, count, elements, output)
            return
        own = lax.div(fragments - 1 - cta.rank + plan.cluster, plan.cluster)
        lax.fori_loop(0, own, lambda i, _: store(i * plan.cluster + cta.rank, count, elements, output), None)

    store_all(plan.fragment, plan.tile_rows * plan.p.value_dim, output=True)
    if lse is not None and not plan.second_launch:
        store_all(WARP, WGMMA_ROWS, output=False)
    merge.leave(smem)
