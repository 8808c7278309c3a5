"""What a warpgroup does with groups of swizzled rows, ``[groups, rows, swizzled row]``, by Mosaic GPU's own functions.

8 rows of a group lie on chip as a tile of ``[8, swizzled row]`` does; only the order of tiles is another than Pallas
takes for its products. Descriptors of wgmma give the distances between tiles, so it reads both.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from search_spaces.jax_compat import mosaic_gpu_code, plgpu
from search_spaces.matmul.mosaic_gpu.geometry import THREADS

WARP = 32
WARPS = THREADS // WARP
# Of tiles: rows and columns change places, of tiles and within each.
TRANSPOSED = (1, 0, 3, 2)


def zeros(shape: tuple[int, int], dtype: Any) -> jax.Array:
    """Accumulators to start with."""

    @mosaic_gpu_code(
        lambda: jnp.zeros(shape, dtype),
        return_type=plgpu.ShapeDtypeStruct(shape, dtype, layout=plgpu.Layout.WGMMA),
    )
    def zero(_: Any) -> Any:
        whole = jnp.issubdtype(dtype, jnp.integer)
        element = _bits(32) if whole else ir.F32Type.get()
        return mgpu.WGMMAAccumulator.zero(*shape, element, is_signed=True if whole else None).value

    accumulators: jax.Array = zero()
    return accumulators


def multiply(
    sums: jax.Array, a: Any, b: Any, swizzle: int, *, transpose_a: bool = False, transpose_b: bool = False
) -> jax.Array:
    """Starts ``sums + a b``, of groups of swizzled rows in on-chip memory: wait for it with `plgpu.wgmma_wait`.

    Args:
      sums: from `zeros`, or from the last call; no other work on them may come in between.
      a, b: rows of their groups are those of ``[m, k]`` and ``[k, n]``, or of ``[k, m]`` and ``[n, k]`` if transposed.
      swizzle: bytes of a row of both.
    """
    slot = plgpu.RefType((plgpu.SwizzleTransform(swizzle),))

    def meaning(sums: jax.Array, a: Any, b: Any) -> jax.Array:
        a, b = _matrix(a[...]), _matrix(b[...])
        plgpu.commit_smem()  # These were read by threads, other than by wgmma: copies must come after.
        a, b = a.T if transpose_a else a, b.T if transpose_b else b
        return sums + jnp.dot(a, b, preferred_element_type=sums.dtype)

    @mosaic_gpu_code(
        meaning,
        arg_types=(plgpu.Layout.WGMMA, slot, slot),
        return_type=plgpu.ShapeDtypeStruct(sums.shape, sums.dtype, layout=plgpu.Layout.WGMMA),
    )
    def wgmma(_: Any, sums: Any, a: Any, b: Any) -> Any:
        a, b = _tiles(a), _tiles(b)
        a = mgpu.memref_transpose(a, TRANSPOSED) if transpose_a else a
        b = mgpu.memref_transpose(b, TRANSPOSED) if transpose_b else b
        # Nothing touches the accumulators between one wgmma and the next, so they need no fence.
        accumulator = mgpu.WGMMAAccumulator.from_registers(sums, sync=False)
        accumulator = mgpu.wgmma(accumulator, a, b, swizzle=swizzle)
        commit = "wgmma.commit_group.sync.aligned;"
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], commit, "", has_side_effects=True)
        return accumulator.value

    started: jax.Array = wgmma(sums, a, b)
    return started


def load(piece: Any, swizzle: int, *, transposed: bool) -> jax.Array:
    """A piece, in the layout of wgmma's accumulators; or its transpose, in the transposed layout."""
    layout = _layout(transposed)
    rows, columns = piece.shape[1], piece.shape[0] * piece.shape[2]

    def meaning(piece: Any) -> jax.Array:
        return _matrix(piece[...]).T if transposed else _matrix(piece[...])

    @mosaic_gpu_code(
        meaning,
        arg_types=(plgpu.RefType((plgpu.SwizzleTransform(swizzle),)),),
        return_type=plgpu.ShapeDtypeStruct(
            (columns, rows) if transposed else (rows, columns), piece.dtype, layout=layout
        ),
    )
    def load_tiles(_: Any, piece: Any) -> Any:
        tiles = _tiles(piece)
        tiles = mgpu.memref_transpose(tiles, TRANSPOSED) if transposed else tiles
        return mgpu.FragmentedArray.load_tiled(tiles, swizzle=swizzle, layout=layout.to_mgpu())

    loaded: jax.Array = load_tiles(piece)
    return loaded


def store(piece: Any, value: jax.Array, swizzle: int, *, transposed: bool) -> None:
    """Stores what `load` would return to a piece."""

    def meaning(piece: Any, value: jax.Array) -> None:
        piece[...] = _groups(value.T if transposed else value, piece.shape[2])

    @mosaic_gpu_code(meaning, arg_types=(plgpu.RefType((plgpu.SwizzleTransform(swizzle),)), _layout(transposed)))
    def store_tiles(_: Any, piece: Any, value: Any) -> None:
        _store_tiles(piece, value, swizzle, transposed)

    store_tiles(piece, value)


def write(c: Any, row: Any, column: Any, piece: Any, value: jax.Array, swizzle: int, *, transposed: bool) -> None:
    """`store`, and from there to ``c[row:, column:]`` in device memory, whose rows no copy reaches.

    The rows start at any address. So consecutive threads write consecutive elements, two of 16 bits at a time where
    these lie at a multiple of 4 bytes: an odd row starts and ends with one alone. Call `plgpu.commit_smem` before the
    piece is used again.
    """
    groups, rows, width = piece.shape
    m, n = c.shape
    columns, itemsize = groups * width, value.dtype.itemsize
    each = 4 // itemsize  # elements that a thread writes at a time

    def meaning(c: Any, row: Any, column: Any, piece: Any, value: jax.Array) -> None:
        piece[...] = _groups(value.T if transposed else value, width)
        plgpu.commit_smem()
        for group in range(groups):
            plgpu.copy_smem_to_gmem(piece.at[group], c.at[pl.ds(row, rows), pl.ds(column + group * width, width)])
        plgpu.wait_smem_to_gmem(0)

    @mosaic_gpu_code(
        meaning,
        arg_types=(
            plgpu.RefType(),
            plgpu.Layout.WG_SPLAT,
            plgpu.Layout.WG_SPLAT,
            plgpu.RefType((plgpu.SwizzleTransform(swizzle),)),
            _layout(transposed),
        ),
    )
    def write_tiles(_: Any, c: Any, row: Any, column: Any, piece: Any, value: Any) -> None:
        _store_tiles(piece, value, swizzle, transposed)
        mgpu.warpgroup_barrier()
        row, column = _number(row.registers.item()), _number(column.registers.item())
        thread = _number(mgpu.thread_idx()) % THREADS
        warp, lane = thread // WARP, thread % WARP
        source, target = mgpu.utils.memref_ptr(piece), _number(llvm.ptrtoint(_bits(64), mgpu.utils.memref_ptr(c)))
        start = target + (_wide(row + warp) * n + _wide(column)) * itemsize
        # The same in all rows of a warp: from one to the next there are `WARPS` rows of the array.
        odd = (start // itemsize & (each - 1)).astype(_bits(32), is_signed=False)

        def pointer(row_of_piece: Any, at: Any) -> Any:
            at = at % columns
            address = ((at // width * rows + row_of_piece) * width + at % width) * itemsize
            # Of each 128 bytes, a swizzle exchanges runs of 16: their number becomes that xor the number of the 128.
            address = address ^ ((address >> 7) & (swizzle // 16 - 1)) << 4
            return mgpu.utils.getelementptr(source, [address.registers.item()], _bits(8))

        for first in range(0, columns, WARP * each):
            at = lane * each + first
            # A swizzle repeats itself after 8 rows.
            pointers = [[pointer(warp + turn * WARPS, at + ahead) for ahead in (0, each)] for turn in range(8 // WARPS)]
            address, at = start + _wide(at + odd) * itemsize, at + odd
            inside = (at < columns) & (column + at < n)
            both_inside = (at + 1 < columns) & (column + at + 1 < n)
            wraps = (at + 1 == columns) & (column < n)
            selector = odd * (0x5432 - 0x3210) + 0x3210

            def read(count: int, pointers: Any = pointers) -> list[Any]:
                turn, offset = count % len(pointers), count // len(pointers) * 8 * swizzle
                return [_load(mgpu.utils.getelementptr(x, [offset], _bits(8))) for x in pointers[turn]]

            counts = range(rows // WARPS)
            for some in (counts[first_of_batch : first_of_batch + 8] for first_of_batch in counts[::8]):
                # All is asked for before the first is used, which hides the latency of reading.
                for count, (word, following) in zip(some, [read(count) for count in some], strict=True):
                    there, further = row + warp + count * WARPS < m, count * WARPS * n * itemsize
                    if each == 1:
                        _put(address + further, word, there & inside)
                        continue
                    pair = _permute(word, following, selector)
                    _put(address + further, pair, there & both_inside)
                    _put(address + further, _half(pair), there & inside & ~both_inside)
                    # The last of an odd row is alone; its thread writes the first, too.
                    _put(start + further, _half(following), there & wraps)

    write_tiles(c, row, column, piece, value)


def _layout(transposed: bool) -> Any:
    return plgpu.Layout.WGMMA_TRANSPOSED if transposed else plgpu.Layout.WGMMA


def _store_tiles(piece: Any, value: Any, swizzle: int, transposed: bool) -> None:
    tiles = _tiles(piece)
    value.store_tiled(mgpu.memref_transpose(tiles, TRANSPOSED) if transposed else tiles, swizzle=swizzle)


def _bits(width: int) -> Any:
    """The type of whole numbers so wide."""
    return ir.IntegerType.get_signless(width)


def _number(value: Any) -> Any:
    """A whole number of each thread's own, not negative, for arithmetic."""
    return mgpu.FragmentedArray.splat(value, (), is_signed=False)


def _wide(number: Any) -> Any:
    return number.astype(_bits(64), is_signed=False)


def _load(pointer: Any) -> Any:
    return _number(llvm.load(_bits(32), pointer))


def _half(word: Any) -> Any:
    return word.astype(_bits(16), is_signed=False)


def _permute(word: Any, following: Any, selector: Any) -> Any:
    """4 of the 8 bytes of two words, by their numbers (PTX ISA, prmt)."""
    operands = [x.registers.item() for x in (word, following, selector)]
    return _number(llvm.inline_asm(_bits(32), operands, "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r"))


def _put(address: Any, value: Any, condition: Any) -> None:
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


def _tiles(groups: Any) -> Any:
    """``[rows / 8, groups, 8, width]`` of ``[groups, rows, width]``."""
    return mgpu.memref_transpose(mgpu.memref_unfold(groups, 1, (None, 8)), (1, 0, 2, 3))


def _matrix(groups: jax.Array) -> jax.Array:
    """``[rows, columns]``, as an array lies in device memory, of groups."""
    return groups.swapaxes(0, 1).reshape(groups.shape[1], -1)


def _groups(matrix: jax.Array, width: int) -> jax.Array:
    """Groups of ``[rows, columns]``."""
    return matrix.reshape(matrix.shape[0], -1, width).swapaxes(0, 1)
