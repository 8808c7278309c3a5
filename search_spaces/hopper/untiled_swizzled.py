"""Operations of a warpgroup on a tile in the untiled swizzled layout, by Mosaic GPU's own functions.

The shape is ``[boxes, rows, swizzled row]``, boxes side by side. 8 rows of a box lie in shared memory like a core
matrix ``[8, swizzled row]``; only the order of core matrices differs from Pallas's layout for wgmma. wgmma's
descriptors contain the distances between core matrices, so wgmma reads both layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from search_spaces.hopper import ACCESS_BYTES, WARP, WARPGROUP, WARPS
from search_spaces.jax_compat import mosaic_gpu_code, plgpu

# Swaps rows and columns, of core matrices and within each.
TRANSPOSED = (1, 0, 3, 2)


def zeros(shape: tuple[int, int], dtype: Any) -> jax.Array:
    """Returns zero accumulators."""

    @mosaic_gpu_code(
        lambda: jnp.zeros(shape, dtype),
        return_type=plgpu.ShapeDtypeStruct(shape, dtype, layout=plgpu.Layout.WGMMA),
    )
    def zero(_: Any) -> Any:
        integer = jnp.issubdtype(dtype, jnp.integer)
        element = _bits(32) if integer else ir.F32Type.get()
        return mgpu.WGMMAAccumulator.zero(*shape, element, is_signed=True if integer else None).value

    accumulators: jax.Array = zero()
    return accumulators


def wgmma(
    acc: jax.Array, a: Any, b: Any, swizzle: int, *, transpose_a: bool = False, transpose_b: bool = False
) -> jax.Array:
    """Starts ``acc + a b`` for operands in shared memory.

    Call `synchronization.wait_wgmma` before any other use of the result.

    Args:
      acc: from `zeros`, or from the last call, which may be in flight; it must not be used otherwise in between.
      a, b: in boxes, with the rows of ``[m, k]`` and ``[k, n]``, or of ``[k, m]`` and ``[n, k]`` if transposed.
      swizzle: bytes of a swizzled row of both.
    """
    operand = plgpu.RefType((plgpu.SwizzleTransform(swizzle),))

    def meaning(acc: jax.Array, a: Any, b: Any) -> jax.Array:
        a, b = matrix(a[...]), matrix(b[...])
        plgpu.commit_smem()  # Threads, unlike wgmma, read these: later copies must be ordered after the reads.
        a, b = a.T if transpose_a else a, b.T if transpose_b else b
        return acc + jnp.dot(a, b, preferred_element_type=acc.dtype)

    @mosaic_gpu_code(
        meaning,
        arg_types=(plgpu.Layout.WGMMA, operand, operand),
        return_type=plgpu.ShapeDtypeStruct(acc.shape, acc.dtype, layout=plgpu.Layout.WGMMA),
    )
    def start(_: Any, acc: Any, a: Any, b: Any) -> Any:
        a, b = core_matrices(a), core_matrices(b)
        a = mgpu.memref_transpose(a, TRANSPOSED) if transpose_a else a
        b = mgpu.memref_transpose(b, TRANSPOSED) if transpose_b else b
        # The accumulators are not accessed between one wgmma and the next, so they need no fence.
        accumulator = mgpu.WGMMAAccumulator.from_registers(acc, sync=False)
        accumulator = mgpu.wgmma(accumulator, a, b, swizzle=swizzle)
        commit = "wgmma.commit_group.sync.aligned;"
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], commit, "", has_side_effects=True)
        return accumulator.value

    started: jax.Array = start(acc, a, b)
    return started


def load(tile: Any, swizzle: int, *, transposed: bool) -> jax.Array:
    """Loads a tile in the layout of wgmma's accumulators, or its transpose in the transposed layout."""
    layout = _layout(transposed)
    rows, columns = tile.shape[1], tile.shape[0] * tile.shape[2]

    def meaning(tile: Any) -> jax.Array:
        return matrix(tile[...]).T if transposed else matrix(tile[...])

    @mosaic_gpu_code(
        meaning,
        arg_types=(plgpu.RefType((plgpu.SwizzleTransform(swizzle),)),),
        return_type=plgpu.ShapeDtypeStruct(
            (columns, rows) if transposed else (rows, columns), tile.dtype, layout=layout
        ),
    )
    def load_tile(_: Any, tile: Any) -> Any:
        matrices = core_matrices(tile)
        matrices = mgpu.memref_transpose(matrices, TRANSPOSED) if transposed else matrices
        return mgpu.FragmentedArray.load_tiled(matrices, swizzle=swizzle, layout=layout.to_mgpu())

    loaded: jax.Array = load_tile(tile)
    return loaded


def store(tile: Any, value: jax.Array, swizzle: int, *, transposed: bool) -> None:
    """Stores a value in the layout that `load` returns."""

    def meaning(tile: Any, value: jax.Array) -> None:
        tile[...] = _boxes(value.T if transposed else value, tile.shape[2])

    @mosaic_gpu_code(meaning, arg_types=(plgpu.RefType((plgpu.SwizzleTransform(swizzle),)), _layout(transposed)))
    def store_tile(_: Any, tile: Any, value: Any) -> None:
        _store(tile, value, swizzle, transposed)

    store_tile(tile, value)


def copy_to_gmem(c: Any, row: Any, column: Any, end: Any, tile: Any, swizzle: int) -> None:
    """Copies `tile` by ordinary stores to the rows of ``c[row:end, column:]`` in device memory.

    It serves rows that TMA cannot address, and tiles that end at any row. Consecutive threads write consecutive
    elements. 16-bit elements are written in pairs at multiples of 4 bytes; an odd row starts and ends with a single
    element. Call `plgpu.commit_smem` before it, and before the tile is used again.
    """
    boxes, rows, width = tile.shape

    def meaning(c: Any, row: Any, column: Any, end: Any, tile: Any) -> None:
        def copy(number: Any, _: None) -> None:
            for box in range(boxes):
                place = pl.ds(row + number, 1), pl.ds(column + box * width, width)
                plgpu.copy_smem_to_gmem(tile.at[box, pl.ds(number, 1)], c.at[place])

        lax.fori_loop(0, lax.clamp(0, end - row, rows), copy, None)
        plgpu.wait_smem_to_gmem(0)

    splat = plgpu.Layout.WG_SPLAT

    @mosaic_gpu_code(
        meaning,
        arg_types=(plgpu.RefType(), splat, splat, splat, plgpu.RefType((plgpu.SwizzleTransform(swizzle),))),
    )
    def copy_rows(_: Any, c: Any, row: Any, column: Any, end: Any, tile: Any) -> None:
        row, column, end = (_number(x.registers.item()) for x in (row, column, end))
        _copy_rows(tile, (boxes, rows, width), swizzle, itemsize, c, (end, n), row, column)

    n, itemsize = c.shape[1], tile.dtype.itemsize
    copy_rows(c, row, column, jnp.int32(end), tile)


def clear_rows(tile: Any, first: Any, swizzle: int) -> None:
    """Sets the rows from `first` on of a tile in shared memory to zero. Call `plgpu.commit_smem` after it.

    A swizzle permutes elements within a row only, so a row is a run of bytes.
    """
    boxes, rows, _ = tile.shape

    def meaning(tile: Any, first: Any) -> None:
        number = lax.broadcasted_iota(jnp.int32, tile.shape, 1)
        tile[...] = jnp.where(number < first, tile[...], jnp.zeros((), tile.dtype))

    @mosaic_gpu_code(meaning, arg_types=(plgpu.RefType((plgpu.SwizzleTransform(swizzle),)), plgpu.Layout.WG_SPLAT))
    def clear(_: Any, tile: Any, first: Any) -> None:
        runs = swizzle // ACCESS_BYTES  # accesses of a row
        thread, first = _number(mgpu.thread_idx()) % WARPGROUP, _number(first.registers.item())
        start = _number(llvm.ptrtoint(_bits(32), mgpu.utils.memref_ptr(tile))) + thread * ACCESS_BYTES
        for number in range(0, rows * runs, WARPGROUP):
            inside = (thread + number) // runs >= first
            if (rows * runs) % WARPGROUP:
                inside = inside & (thread + number < rows * runs)
            for box in range(boxes):
                _clear_if(start + (box * rows * runs + number) * ACCESS_BYTES, inside)

    clear(tile, first)


def _copy_rows(
    tile: Any,
    shape: tuple[int, int, int],
    swizzle: int,
    itemsize: int,
    c: Any,
    extents: tuple[Any, int],
    row: Any,
    column: Any,
) -> None:
    """Copies the tile ``[boxes, rows, width]`` from shared memory to ``c[row:, column:]``, of these `extents`.

    Numbers are unsigned, so an end before `row` must not occur.
    """
    boxes, rows, width = shape
    m, n = extents
    columns = boxes * width
    each = 4 // itemsize  # elements that a thread writes at a time
    thread = _number(mgpu.thread_idx()) % WARPGROUP
    warp, lane = thread // WARP, thread % WARP
    source, target = mgpu.utils.memref_ptr(tile), _number(llvm.ptrtoint(_bits(64), mgpu.utils.memref_ptr(c)))
    start = target + (_wide(row + warp) * n + _wide(column)) * itemsize
    # The same in all rows of a warp, because consecutive ones are `WARPS` rows of the array apart.
    odd = (start // itemsize & (each - 1)).astype(_bits(32), is_signed=False)

    def pointer(row_of_tile: Any, at: Any) -> Any:
        at = at % columns
        address = ((at // width * rows + row_of_tile) * width + at % width) * itemsize
        # In each 128 bytes, a swizzle permutes runs of 16: the run's index is xored with the index of the 128 bytes.
        address = address ^ ((address >> 7) & (swizzle // 16 - 1)) << 4
        return mgpu.utils.getelementptr(source, [address.registers.item()], _bits(8))

    for first in range(0, columns, WARP * each):
        at = lane * each + first
        # The swizzle repeats after 8 rows.
        pointers = [[pointer(warp + base, at + ahead) for ahead in (0, each)] for base in range(0, 8, WARPS)]
        address, at = start + _wide(at + odd) * itemsize, at + odd
        inside = (at < columns) & (column + at < n)
        both_inside = (at + 1 < columns) & (column + at + 1 < n)
        wraps = (at + 1 == columns) & (column < n)
        selector = odd * (0x5432 - 0x3210) + 0x3210

        def read(count: int, pointers: Any = pointers) -> list[Any]:
            which, offset = count % len(pointers), count // len(pointers) * 8 * swizzle
            return [_load_word(mgpu.utils.getelementptr(x, [offset], _bits(8))) for x in pointers[which]]

        counts = range(rows // WARPS)
        for some in (counts[batch : batch + 8] for batch in counts[::8]):
            # All loads are issued before the first result is used, which hides their latency.
            for count, (word, next_word) in zip(some, [read(count) for count in some], strict=True):
                there, further = row + warp + count * WARPS < m, count * WARPS * n * itemsize
                if each == 1:
                    _store_if(address + further, word, there & inside)
                    continue
                pair = _permute(word, next_word, selector)
                _store_if(address + further, pair, there & both_inside)
                _store_if(address + further, _half(pair), there & inside & ~both_inside)
                # The last element of an odd row is stored alone, by the thread that also stores the first one.
                _store_if(start + further, _half(next_word), there & wraps)


def _layout(transposed: bool) -> Any:
    return plgpu.Layout.WGMMA_TRANSPOSED if transposed else plgpu.Layout.WGMMA


def _store(tile: Any, value: Any, swizzle: int, transposed: bool) -> None:
    matrices = core_matrices(tile)
    value.store_tiled(mgpu.memref_transpose(matrices, TRANSPOSED) if transposed else matrices, swizzle=swizzle)


def _bits(width: int) -> Any:
    """Returns the integer type of this width."""
    return ir.IntegerType.get_signless(width)


def _number(value: Any) -> Any:
    """Returns a per-thread unsigned integer, for arithmetic."""
    return mgpu.FragmentedArray.splat(value, (), is_signed=False)


def _wide(number: Any) -> Any:
    return number.astype(_bits(64), is_signed=False)


def _load_word(pointer: Any) -> Any:
    return _number(llvm.load(_bits(32), pointer))


def _half(word: Any) -> Any:
    return word.astype(_bits(16), is_signed=False)


def _permute(word: Any, next_word: Any, selector: Any) -> Any:
    """Selects 4 of the 8 bytes of two words by index (PTX ISA, prmt)."""
    operands = [x.registers.item() for x in (word, next_word, selector)]
    return _number(llvm.inline_asm(_bits(32), operands, "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r"))


def _clear_if(address: Any, condition: Any) -> None:
    """Stores 16 zero bytes to shared memory under a condition, without a branch."""
    operands = [x.registers.item() for x in (address, condition)]
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"),
        operands,
        "{ .reg .b32 zero; mov.b32 zero, 0; @$1 st.shared.v4.b32 [$0], {zero, zero, zero, zero}; }",
        "r,b",
        has_side_effects=True,
    )


def _store_if(address: Any, value: Any, condition: Any) -> None:
    """Stores to device memory under a condition, without a branch."""
    operands = [x.registers.item() for x in (address, value, condition)]
    bits = operands[1].type.width
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"),
        operands,
        f"@$2 st.global.b{bits} [$0], $1;",
        f"l,{'h' if bits == 16 else 'r'},b",
        has_side_effects=True,
    )


def core_matrices(boxes: Any) -> Any:
    """Views ``[boxes, rows, width]`` as ``[rows / 8, boxes, 8, width]``."""
    return mgpu.memref_transpose(mgpu.memref_unfold(boxes, 1, (None, 8)), (1, 0, 2, 3))


def matrix(boxes: jax.Array) -> jax.Array:
    """Converts boxes to ``[rows, columns]``, the layout in device memory."""
    return boxes.swapaxes(0, 1).reshape(boxes.shape[1], -1)


def _boxes(matrix: jax.Array, width: int) -> jax.Array:
    """Converts ``[rows, columns]`` to boxes."""
    return matrix.reshape(matrix.shape[0], -1, width).swapaxes(0, 1)


# ------------------------------------------------------------------------------
# Converts an array's registers in a kernel to 32-bit words, which a thread can move freely, and back.
#
# In memory, the words of several threads are interleaved by accesses: the first `ACCESS` words of each thread, then
# the next ones.

WORD_BYTES = 4
ACCESS = ACCESS_BYTES // WORD_BYTES  # words in the widest access of a thread


def words(array: Any) -> list[Any]:
    """Returns the words of this thread, in order."""
    bits = ir.IntegerType.get_signless(32)
    return [
        vector.extract(vector.bitcast(ir.VectorType.get(register.type.shape, bits), register), [], [position])
        for register in array.registers.flat
        for position in range(register.type.shape[0])
    ]


def of_words(got: Sequence[Any], like: Any) -> Any:
    """Builds the array with these words, with the type and the layout of `like`."""
    bits, registers = ir.IntegerType.get_signless(32), np.empty_like(like.registers)
    for number, register in enumerate(like.registers.flat):
        width = register.type.shape[0]
        pair = vector.from_elements(ir.VectorType.get((width,), bits), got[number * width : (number + 1) * width])
        registers.flat[number] = vector.bitcast(register.type, pair)
    return mgpu.FragmentedArray(_registers=registers, _layout=like.layout, _is_signed=like.is_signed)


def access() -> Any:
    """Returns the type of a thread's widest access."""
    return ir.VectorType.get((ACCESS,), ir.IntegerType.get_signless(32))


def pointer(own: Any, first: int, threads: int) -> Any:
    """Returns the address of a thread's word `first` among `threads` threads, if its words begin at `own`."""
    return mgpu.utils.getelementptr(own, [first * WORD_BYTES * threads], ir.IntegerType.get_signless(8))


def load_words(own: Any, count: int, threads: int) -> list[Any]:
    """Loads `count` words of a thread from the same layout."""
    got = []
    for first in range(0, count, ACCESS):
        some = llvm.load(access(), pointer(own, first, threads), alignment=ACCESS_BYTES)
        got += [vector.extract(some, [], [position]) for position in range(ACCESS)]
    return got
