"""Building blocks shared by the attention kernels for Hopper."""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import mma_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, scf

from search_spaces.hopper import WARPGROUP, WGMMA_ROWS, untiled_swizzled
from search_spaces.hopper.smem_layout import SmemTile, Tiled, Untiled
from search_spaces.hopper.synchronization import ptx
from search_spaces.jax_compat import HAS_UNTILED_SWIZZLE, interprets, issue_wgmma_of_registers, mosaic_gpu_code, plgpu
from search_spaces.space import round_up

# ------------------------------------------------------------------------------
# Asynchronous wgmma products with values as accumulators, to be waited for later (hopper/synchronization.py).
#
# `plgpu.wgmma` keeps accumulators in references, which a loop cannot carry from one step to the next while they are in
# flight. Here accumulators are values.

WGMMA_DEPTH = 16  # 16-bit elements of the contracted axis in one instruction (PTX ISA, wgmma.mma_async)
# The package exports a function of the same name.
_wgmma = importlib.import_module("jax.experimental.mosaic.gpu.wgmma")


def start_product(
    acc: jax.Array | None, a: Any, b: Any, *, columns: int, transforms: Any, transpose_a: bool, transpose_b: bool
) -> jax.Array:
    """Starts ``acc + a b``, float32 with 64 rows; call `wait_wgmma` before using the result.

    Args:
      acc: an earlier result, in flight or not, that has not been used since; None means zeros.
      a: 64 rows, in SMEM, or an array in registers in wgmma's layout. No product may be in flight before its cast to 16
        bits; otherwise ptxas waits for each product before it starts the next one, with warning C7513.
      b: `columns` columns, in SMEM.
      transforms: of `a` (None in registers) and `b` in SMEM. Untiled operands have three axes (smem_layout.py).
      transpose_a, transpose_b: whether rows of the operand in SMEM are columns of the factor.
    """
    in_registers = isinstance(a, jax.Array)
    shape = (WGMMA_ROWS, columns)

    def meaning(*operands: Any) -> jax.Array:
        *sum_so_far, a, b = operands
        a, b = a if in_registers else _matrix(a), _matrix(b)
        plgpu.commit_smem()  # Threads, unlike wgmma, read these: later copies must be ordered after the reads.
        a, b = a.T if transpose_a else a, b.T if transpose_b else b
        product: jax.Array = jnp.dot(a.astype(jnp.float32), b.astype(jnp.float32))
        return sum_so_far[0] + product if sum_so_far else product

    layout = plgpu.Layout.WGMMA
    a_type = layout if in_registers else plgpu.RefType(transforms[0])

    @mosaic_gpu_code(
        meaning,
        arg_types=(*(() if acc is None else (layout,)), a_type, plgpu.RefType(transforms[1])),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=layout),
    )
    def product(_: Any, *operands: Any) -> Any:
        *sum_so_far, a, b = operands
        if sum_so_far:
            accumulator = mgpu.WGMMAAccumulator.from_registers(sum_so_far[0], sync=False)
        else:  # Undefined, because it is not read.
            zero = llvm.ConstantOp(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), 0.0)).result
            zeros = mgpu.FragmentedArray.splat(zero, shape, layout.to_mgpu())
            accumulator = mgpu.WGMMAAccumulator.from_registers(zeros, sync=False)
        if in_registers:
            a = _wgmma.wgmma_fence(a)
        else:
            nvvm.wgmma_fence_aligned()
            a = _core_matrices(a, transpose_a)
        b = _core_matrices(b, transpose_b)
        return _issue(accumulator, a, b, columns, fresh=not sum_so_far)

    started: jax.Array = product(*(() if acc is None else (acc,)), a, b)
    return started


def own_index(index: Any) -> Any:
    """Returns `index`, the index of the calling warpgroup, recomputed at each call.

    Addresses that depend on it are then computed where they are used. Otherwise they would all be computed before a
    loop and occupy registers throughout (LLVM's loop-invariant code motion; about 40 addresses of 64 bits, which
    spill).
    """

    @mosaic_gpu_code(
        lambda: index,
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT),
    )
    def again(_: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        text = "{ .reg .b32 t; mov.u32 t, %tid.x; shr.u32 t, t, 7; shfl.sync.idx.b32 $0, t, 0, 0x1f, 0xffffffff; }"
        value: Any = llvm.inline_asm(i32, [], text, "=r", has_side_effects=True)
        return mgpu.FragmentedArray.splat(value, (), is_signed=True)

    return again()


def end_basic_block(index: Any) -> None:
    """Keeps ptxas from moving preceding code, for example exponentials, after a later wait.

    It emits a branch that is never taken, which ptxas cannot know.

    Args:
      index: from `own_index`.
    """

    @mosaic_gpu_code(lambda index: None, arg_types=(plgpu.Layout.WG_SPLAT,))
    def branch(_: Any, index: Any) -> None:
        text = "{ .reg .pred p; setp.eq.s32 p, $0, -1; again: @!p bra done; nanosleep.u32 1; bra again; done: }"
        ptx(text, [index.registers.item()], "r")

    branch(index)


def meet_warpgroups(barrier: Any, *, threads: int) -> None:
    """Synchronizes all consumers, and makes their SMEM stores visible to wgmma and TMA.

    Args:
      barrier: in the interpreter, which has no named barriers, a barrier with one arrival for each consumer; otherwise
        None.
      threads: of all consumers.
    """

    def meaning() -> None:
        plgpu.commit_smem()
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)

    @mosaic_gpu_code(meaning)
    def together(_: Any) -> None:
        ptx(f"fence.proxy.async.shared::cta; bar.sync {NAMED_BARRIER}, {threads};")

    together()


def add_product(gmem: Any, value: jax.Array, smem: Any) -> None:
    """Adds an array in registers atomically to one in device memory, through `smem`, once that is free."""
    if interprets():  # The interpreter has no such copies, and runs CTAs in sequence.
        gmem[...] += value
        return
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    smem[...] = value
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem, gmem, reduction_op="add")


# Mosaic GPU uses the low ones of 16 for its warpgroups.
NAMED_BARRIER = 8


def _matrix(ref: Any) -> jax.Array:
    value: jax.Array = ref[...]
    return untiled_swizzled.matrix(value) if value.ndim == 3 else value


def _core_matrices(ref: Any, transpose: bool) -> Any:
    if len(ir.MemRefType(ref.type).shape) == 3:
        ref = untiled_swizzled.core_matrices(ref)
    return mgpu.memref_transpose(ref, untiled_swizzled.TRANSPOSED) if transpose else ref


def _issue(accumulator: Any, a: Any, b: Any, columns: int, *, fresh: bool) -> Any:
    """Emits the instructions of a product, as one group to wait for."""
    (depth, _), element = mma_utils.tiled_memref_shape(b)
    registers: np.ndarray[Any, Any] = accumulator._value.registers.copy()
    b_base, b_steps, b_transpose = _descriptor(b, columns, depth, left=False)
    a_base: Any = None
    a_steps: list[int] | None = None
    a_transpose = False
    if not isinstance(a, mgpu.FragmentedArray):
        a_base, a_steps, a_transpose = _descriptor(a, WGMMA_ROWS, depth, left=True)
    for step in range(depth // WGMMA_DEPTH):
        if a_steps is None:
            factor = a[:, step * WGMMA_DEPTH : (step + 1) * WGMMA_DEPTH]
        else:
            factor = _advance(a_base, a_steps[step])
        registers = _instruction(
            registers,
            factor,
            _advance(b_base, b_steps[step]),
            transposes=((a_transpose,) if a_steps else ()) + (b_transpose,),
            columns=columns,
            dtype=element,
            accumulate=not fresh or step > 0,
        )
    ptx("wgmma.commit_group.sync.aligned;")
    value = mgpu.FragmentedArray(
        _registers=registers, _layout=accumulator._value.layout, _is_signed=accumulator._value.is_signed
    )
    return mgpu.WGMMAAccumulator(_value=value, _original_layout=accumulator._original_layout, _sync=False).value


def _instruction(
    registers: Any, a: Any, b: Any, *, transposes: tuple[bool, ...], columns: int, dtype: Any, accumulate: bool
) -> Any:
    """Emits one wgmma; without `accumulate` the accumulators are results only, and need not be defined before.

    An instruction that defines them while products are in flight makes ptxas wait for each product (C7515).
    """
    i32 = ir.IntegerType.get_signless(32)
    one = registers.flat[0].type
    count = registers.size
    left = [llvm.bitcast(i32, x) for x in a.registers.flat] if isinstance(a, mgpu.FragmentedArray) else [a]
    inputs = list(registers.flat) if accumulate else []
    first = count + len(inputs)
    names = [f"${first + number}" for number in range(len(left) + 1)]
    factor = names[0] if len(left) == 1 else "{" + ",".join(names[:-1]) + "}"
    text = (
        f"{{ .reg .pred p; setp.ne.b32 p, {int(accumulate)}, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{columns}k{WGMMA_DEPTH}.f32.{dtype}.{dtype} "
        "{" + ",".join(f"${number}" for number in range(count)) + "}"
        f", {factor}, {names[-1]}, p, 1, 1, " + ", ".join(str(int(t)) for t in transposes) + "; }"
    )
    constraints = ["=f"] * count + [str(number) for number in range(len(inputs))]
    constraints += (["l"] if len(left) == 1 else ["r"] * len(left)) + ["l"]
    results: Any = llvm.inline_asm(
        llvm.StructType.get_literal([one] * count),
        [*inputs, *left, b],
        text,
        ",".join(constraints),
        has_side_effects=True,
    )
    new = np.empty_like(registers)
    for number in range(count):
        new.flat[number] = llvm.extractvalue(one, results, [number])
    return new


def _descriptor(ref: Any, extent: int, depth: int, *, left: bool) -> tuple[Any, list[int], bool]:
    """Returns a factor's descriptor in SMEM, the byte offsets of its steps, and whether it is transposed."""
    tiling = ir.MemRefType(ref.type).shape[2:]
    k_tiling = tiling[1] if left else tiling[0]
    width = max(tiling)
    # 8 x width elements are contiguous; the contracted axis is the longer one, or the shorter one, of 8.
    group = width if k_tiling == width else WGMMA_DEPTH
    (base, _), (_, stride), fastest = mma_utils.create_descriptor(
        ref,
        swizzle=2 * width,
        group_size=(extent, group) if left else (group, extent),
        logical_k_major=not left,
    )
    steps = [k // group * stride + k % group * 2 for k in range(0, depth, WGMMA_DEPTH)]
    return base, steps, fastest != mma_utils.Dim.K


def _advance(descriptor: Any, distance: int) -> Any:
    i64 = ir.IntegerType.get_signless(64)
    offset = llvm.ConstantOp(i64, ir.IntegerAttr.get(i64, mma_utils.encode_addr(distance))).result
    return llvm.add(descriptor, offset, overflow_flags=llvm.IntegerOverflowFlags.none)


# ------------------------------------------------------------------------------
# Products of a matrix in registers, such as probabilities, with one in shared memory, 16 rows at a time.
#
# Mosaic GPU's own `wgmma` requires these rows in whole swizzled widths, which are 64 for rows of 128 bytes of 16-bit
# elements. One instruction takes 16 rows (PTX ISA, wgmma.mma_async). Here blocks of keys may have any multiple of 16.


def start_register_wgmma(acc: jax.Array, a: jax.Array, b: Any, swizzle: int) -> jax.Array:
    """Starts ``acc + a b``; the result must not be used before `finish_register_wgmma`.

    Args:
      acc: ``float32[64, n]`` in the layout of wgmma's accumulators.
      a: ``[64, k]`` of 16 bits in the same layout.
      b: ``[k, n]`` in shared memory, in tiles of 8 rows, or untiled, with three axes (smem_layout.py).
      swizzle: bytes of a swizzled row.
    """
    untiled = len(b.shape) == 3
    tiling = () if untiled else (plgpu.TilingTransform((8, swizzle // 2)),)
    transforms = (*tiling, plgpu.SwizzleTransform(swizzle))

    def meaning(acc: jax.Array, a: jax.Array, b: Any) -> jax.Array:
        b = untiled_swizzled.matrix(b[...]) if untiled else b[...]
        plgpu.commit_smem()  # Threads, unlike wgmma, read this: later copies must be ordered after the reads.
        return acc + jnp.dot(a, b, preferred_element_type=jnp.float32)

    @mosaic_gpu_code(
        meaning,
        arg_types=(plgpu.Layout.WGMMA, plgpu.Layout.WGMMA, plgpu.RefType(transforms)),
        return_type=plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def issue(_: Any, acc: Any, a: Any, b: Any) -> Any:
        b = untiled_swizzled.core_matrices(b) if untiled else b
        started = issue_wgmma_of_registers(acc, a, b, swizzle)
        _ptx("wgmma.commit_group.sync.aligned;")
        return started

    started: jax.Array = issue(acc, a, b)
    return started


def finish_register_wgmma(acc: jax.Array) -> jax.Array:
    """Waits for all products that this warpgroup has started."""

    @mosaic_gpu_code(
        lambda acc: acc,
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def wait(_: Any, acc: Any) -> Any:
        _ptx("wgmma.wait_group.sync.aligned 0;")
        return mgpu.optimization_barrier(acc)

    finished: jax.Array = wait(acc)
    return finished


def _ptx(text: str) -> None:
    llvm.inline_asm(ir.Type.parse("!llvm.void"), [], text, "", has_side_effects=True)


# ------------------------------------------------------------------------------
# Copies of a head's rows between ``[batch, length, heads, columns]`` in device memory and a tile in shared memory.
#
# TMA fills rows of a tile beyond the length with zeros, and does not store them.

# Mosaic GPU tiles arrays in device memory by this many rows.
HEAD_ROWS = 8


def head_layout(*lengths: int) -> type[SmemTile]:
    """Returns the layout of tiles of arrays of these lengths: untiled, if tiles of 8 rows do not divide all lengths."""
    return Untiled if HAS_UNTILED_SWIZZLE and any(length % HEAD_ROWS for length in lengths) else Tiled


def head_length(of: type[SmemTile], rows: int) -> int:
    """Returns the length of an array in device memory, padded as its tiles require."""
    return rows if of is Untiled else round_up(rows, HEAD_ROWS)


def load_head_rows(tile: SmemTile, array: Any, place: tuple[Any, Any, Any], smem: Any, full: Any) -> None:
    """Starts the load of the tile at `place` (batch index, first row, head); each copy arrives at `full`."""
    batch, row, head = place
    for index, (rows, columns) in tile.boxes(row, 0):
        plgpu.copy_gmem_to_smem(array.at[batch, rows, head, columns], _box(smem, index), full)


def store_head_rows(tile: SmemTile, array: Any, place: tuple[Any, Any, Any], smem: Any, *, column: int = 0) -> None:
    """Stores the tile at `place`, from `column` on. All copies form one group to wait for."""
    batch, row, head = place
    boxes = tile.boxes(row, column)
    for number, (index, (rows, columns)) in enumerate(boxes, 1):
        plgpu.copy_smem_to_gmem(
            _box(smem, index),
            array.at[batch, rows, head, columns],
            commit_group=number == len(boxes),
        )


def _box(smem: Any, index: tuple[int, ...]) -> Any:
    return smem.at[index] if index else smem


# ------------------------------------------------------------------------------
# The keys of a block that the queries of a warpgroup see, as a mask in the layout of wgmma's accumulators.

# The initial maximum, instead of minus infinity, so that the difference of two maxima is a number.
LEAST = -1e30


def visible(
    shape: tuple[int, int], row: Any, column: Any, *, left: int | None, right: int | None, columns: Any
) -> jax.Array | None:
    """Returns whether the query of each row sees the key of each column; None if no mask is needed.

    Column indices are compared with a limit per row, which takes fewer registers than row and column indices per
    element.

    Args:
      shape: of the block, rows and columns.
      row, column: indices of its first query and key.
      left, right: query i sees keys from ``i - left`` to ``i + right``; None means no bound.
      columns: number of keys; None if no block extends beyond them.
    """
    layout = plgpu.Layout.WGMMA
    number = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)

    def limit(shift: Any) -> jax.Array:
        rows = plgpu.broadcasted_iota(jnp.int32, shape[:1], 0, layout=layout.reduce(1))
        return lax.broadcast_in_dim(rows + shift, shape, [0])

    seen = [] if right is None else [number <= limit(row + right - column)]
    if columns is not None:
        seen.append(number < columns - column)
    if left is not None:
        seen.append(number >= limit(row - left - column))
    both = None
    for one in seen:
        both = one if both is None else both & one
    return both


# ------------------------------------------------------------------------------
# Zeros rows of a tile in shared memory beyond a sequence's end, before a product reads them.
#
# Their probabilities are 0, but 0 times NaN is NaN, and the rows may hold anything. (TMA only fills with zeros beyond
# an array's edge.) A warpgroup zeros all rows that its own products read; other warpgroups may write the same zeros.

_for: Any = scf.ForOp  # Its annotations are those of another class.
CHUNK = 16  # bytes that a thread stores at once
CORE_ROWS = 8  # A tiled array in shared memory is stored in groups of 8 rows of all swizzled columns.


def zero_rows_from(first: Any, tile: SmemTile, smem: Any) -> None:
    """Zeros the tile's rows from `first` on, if any, for the calling warpgroup's products and for later copies.

    Args:
      first: int32; all rows are zeroed if it is 0 or less.
      smem: the tile, which has arrived.
    """

    def meaning(ref: Any, first: Any) -> None:
        row = lax.broadcasted_iota(jnp.int32, tile.shape, len(tile.shape) - 2)
        ref[...] = jnp.where(row < first, ref[...], jnp.zeros((), tile.dtype))

    @mosaic_gpu_code(meaning, arg_types=(plgpu.RefType(tile.transforms), plgpu.Layout.WG_SPLAT))
    def store(_: Any, ref: Any, first: Any) -> None:
        bits = ir.IntegerType.get_signless(32)
        address = llvm.ptrtoint(bits, mgpu.utils.memref_ptr(ref))
        own = arith.remui(mgpu.thread_idx(), mgpu.c(WARPGROUP, bits))
        count = tile.rows * tile.columns * tile.dtype.itemsize // CHUNK
        zero, rows = mgpu.c(0, bits), first.registers.item()
        loop: Any = _for(own, mgpu.c(count, bits), mgpu.c(WARPGROUP, bits))
        with ir.InsertionPoint(loop.body):
            chunk = loop.induction_variable
            there = arith.cmpi(arith.CmpIPredicate.sge, _row(tile, chunk), rows)
            place = arith.addi(address, arith.muli(chunk, mgpu.c(CHUNK, bits)))
            ptx("@$0 st.shared.v4.b32 [$1], {$2, $2, $2, $2};", [there, place, zero], "b,r,r")
            scf.yield_([])

    @pl.when(first < tile.rows)
    def zero() -> None:
        store(smem, first)
        plgpu.commit_smem()


def _row(tile: SmemTile, chunk: Any) -> Any:
    """Returns the row of the tile that holds a chunk; swizzling only moves chunks within their row."""
    bits = ir.IntegerType.get_signless(32)
    row = arith.divui(chunk, mgpu.c(tile.swizzle // CHUNK, bits))  # rows are counted over consecutive swizzled columns
    if isinstance(tile, Untiled):
        return arith.remui(row, mgpu.c(tile.rows, bits))
    boxes = tile.columns * tile.dtype.itemsize // tile.swizzle
    core = arith.muli(arith.divui(row, mgpu.c(CORE_ROWS * boxes, bits)), mgpu.c(CORE_ROWS, bits))
    return arith.addi(core, arith.remui(row, mgpu.c(CORE_ROWS, bits)))
