"""The kernel itself: what a block keeps on chip, and who does what with it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from search_spaces.jax_compat import plgpu
from search_spaces.matmul.mosaic_gpu.following import Following, following_on_chip, transforms
from search_spaces.matmul.mosaic_gpu.geometry import ATOM_M, Geometry
from search_spaces.matmul.mosaic_gpu.schedule import HopperSchedule, mirrored
from search_spaces.matmul.problem import MatmulProblem

# Registers per thread, in multiples of 8. A block of 384 threads starts with 168 each (65,536 / 384, rounded down);
# what the copying threads give back, the computing ones share. With one computing warpgroup each thread starts with
# all that it can address, and nobody needs to give.
COPY_REGISTERS = 40
COMPUTE_REGISTERS = 232


def product(problem: MatmulProblem, schedule: HopperSchedule) -> Any:
    """The kernel, from its arrays in device memory: the operands, and the result or the sums of parts of k.

    One warpgroup copies operands into a ring of `stages` slots, one or two warpgroups multiply them. Both sides count
    the steps of all tiles of their block, so that the ring stays full from one tile to the next. The copier waits for
    "released" of a slot that it has filled before, a multiplier for "loaded". Where multipliers take whole tiles in
    turns, each has "loaded" barriers of its own: a barrier tells only who waits for every load that it announces.

    Below, `a` fills the rows of wgmma and `b` its columns. Where operands are swapped, that is the mirrored product,
    and only what leaves the kernel is turned back. Multipliers fetch a bias and a residual themselves.
    """
    out = Geometry(problem, schedule)
    swap = schedule.swap
    p, s = mirrored(problem, schedule) if swap else (problem, schedule)
    g = Geometry(p, s)
    multipliers, slots, parts = g.warpgroups, int(out.slots), g.parts
    a_block = (s.tile_k, s.tile_m) if p.transpose_a else (s.tile_m, s.tile_k)
    b_block = (s.tile_n, s.tile_k) if p.transpose_b else (s.tile_k, s.tile_n)
    piece_block = (int(out.piece_m), int(out.piece_n))
    dtype = jnp.dtype(p.dtype)
    out_dtype = p.result().dtype if s.split_k == 1 else p.sums_dtype
    swizzled, out_swizzled = transforms(int(g.swizzle), dtype), transforms(int(out.out_swizzle), out_dtype)
    takers = multipliers // g.readers  # of whole tiles, in turns
    both = {"num_arrivals": g.readers, "num_barriers": s.stages}
    on_chip = {
        "a_ring": plgpu.SMEM((s.stages, *a_block), dtype, transforms=swizzled),
        "b_ring": plgpu.SMEM((s.stages, *b_block), dtype, transforms=swizzled),
        "pieces": plgpu.SMEM((multipliers, slots, *piece_block), out_dtype, transforms=out_swizzled),
        "loaded": plgpu.Barrier(num_arrivals=2, num_barriers=takers * s.stages),
        # A slot that two blocks fill is free when both have read theirs.
        "released": plgpu.Barrier(**both)
        if s.cluster == "none"
        else plgpu.ClusterBarrier(collective_axes=("pair",), **both),
        **following_on_chip(problem, out),
    }

    def window(array: Any, batch: Any, *slices: Any) -> Any:
        return array.at[(batch, *slices) if p.batch > 1 else slices]

    def place(array: Any, part: Any, *slices: Any) -> Any:
        return array.at[(part, *slices) if parts > 1 else slices]

    def matmul(*arrays: Any) -> None:
        *operands, c = arrays
        a, b, bias, residual = problem.named(operands)
        a, b = (b, a) if swap else (a, b)
        worker, workers, pair = lax.axis_index("worker"), lax.axis_size("worker"), lax.axis_index("pair")
        warpgroup = lax.axis_index("warpgroup")
        tiles = lax.div(parts * g.rows * g.columns - 1 - worker + workers, workers)

        def barrier_of(tile: Any, slot: Any) -> Any:
            """Which of "loaded" the multipliers of this `tile` wait for."""
            return lax.rem(tile, takers) * s.stages + slot if takers > 1 else slot

        def origin(tile: Any) -> tuple[Any, Any, Any]:
            """Part, first row and first column of the `tile`-th tile of this block."""
            part, row, column = walk(worker + tile * workers, g.rows, g.columns, s.raster, s.raster_width)
            row = 2 * row + pair if s.cluster == "m" else row
            column = 2 * column + pair if s.cluster == "n" else column
            return part, row * s.tile_m, column * s.tile_n

        def load(a_ring: Any, b_ring: Any, loaded: Any, released: Any) -> None:
            def load_tile(tile: Any, _: None) -> None:
                part, row, column = origin(tile)
                rows, columns = pl.ds(row, s.tile_m), pl.ds(column, s.tile_n)
                batch, first_step = part, 0
                if s.split_k > 1:
                    batch, first_step = lax.rem(part, p.batch), lax.div(part, p.batch) * g.steps

                def load_step(k_step: Any, _: None) -> None:
                    step = tile * g.steps + k_step
                    slot = lax.rem(step, s.stages)
                    arrival = loaded.at[barrier_of(tile, slot)]
                    ks = pl.ds((first_step + k_step) * s.tile_k, s.tile_k)

                    @pl.when(step >= s.stages)
                    def wait_for_room() -> None:
                        plgpu.barrier_wait(released.at[slot])

                    plgpu.copy_gmem_to_smem(
                        window(a, batch, *((ks, rows) if p.transpose_a else (rows, ks))),
                        a_ring.at[slot],
                        arrival,
                        collective_axes="pair" if s.cluster == "n" else None,
                    )
                    plgpu.copy_gmem_to_smem(
                        window(b, batch, *((columns, ks) if p.transpose_b else (ks, columns))),
                        b_ring.at[slot],
                        arrival,
                        collective_axes="pair" if s.cluster == "m" else None,
                    )

                lax.fori_loop(0, g.steps, load_step, None)

            lax.fori_loop(0, tiles, load_tile, None)

            # The other block of a cluster writes into this one's slots and barriers: stay until both released the last.
            def drain(step: Any, _: None) -> None:
                plgpu.barrier_wait(released.at[lax.rem(step, s.stages)])

            lax.fori_loop(lax.max(tiles * g.steps - s.stages, 0), tiles * g.steps, drain, None)

        def multiply(a_ring: Any, b_ring: Any, pieces: Any, loaded: Any, released: Any, **following_refs: Any) -> None:
            following = Following(problem, swap, warpgroup, bias, residual, **following_refs)
            first_row = warpgroup * g.wg_m if s.split == "m" else 0
            first_column = warpgroup * g.wg_n if s.split == "n" else 0
            rows, columns = pl.ds(first_row, g.wg_m), pl.ds(first_column, g.wg_n)
            width = g.wg_n if swap else s.epilogue_n
            corners = [(m, n) for m in range(0, g.wg_m, ATOM_M) for n in range(0, g.wg_n, width)]

            def slices_of_result(row: Any, column: Any, m: int, n: int) -> tuple[Any, Any]:
                """Rows and columns of a piece of the tile at `row` and `column`."""
                corner = pl.ds(row + first_row + m, ATOM_M), pl.ds(column + first_column + n, width)
                return corner[::-1] if swap else corner

            def fetch_residual(count: int, part: Any, row: Any, column: Any) -> None:
                following.fetch_residual(count % slots, part, *slices_of_result(row, column, *corners[count]))

            def multiply_tile(tile: Any, _: None) -> None:
                if problem.fused:
                    part, row, column = origin(tile)
                    following.fetch_bias(part, row + first_row if swap else column + first_column)
                    for count in range(slots):
                        fetch_residual(count, part, row, column)

                def slot_of(k_step: Any) -> Any:
                    return lax.rem(tile * g.steps + k_step, s.stages)

                def start(slot: Any, sums: Any) -> None:
                    a_half = a_ring.at[slot, :, rows].T if p.transpose_a else a_ring.at[slot, rows, :]
                    b_half = b_ring.at[slot, columns, :].T if p.transpose_b else b_ring.at[slot, :, columns]
                    plgpu.barrier_wait(loaded.at[barrier_of(tile, slot)])
                    plgpu.wgmma(sums, a_half, b_half)

                def release(slot: Any, running: int) -> None:
                    """Gives a slot back when no more than so many steps, all later ones, are still `running`."""
                    plgpu.wgmma_wait(running)
                    plgpu.barrier_arrive(released.at[slot])

                def multiply_step(k_step: Any, sums: Any) -> None:
                    slot = slot_of(k_step)
                    start(slot, sums)
                    release(slot_of(k_step - s.in_flight) if s.in_flight else slot, s.in_flight)

                def multiply_steps(sums: Any) -> jax.Array:
                    for k_step in range(s.in_flight):
                        start(slot_of(k_step), sums)
                    lax.fori_loop(s.in_flight, g.steps, lambda k_step, _: multiply_step(k_step, sums), None)
                    for k_step in range(g.steps - s.in_flight, g.steps):
                        release(slot_of(k_step), 0)
                    return sums[...]

                half = pl.run_scoped(multiply_steps, plgpu.ACC((g.wg_m, g.wg_n), p.sums_dtype))
                # A plain product is rounded whole, another one piece by piece.
                half = half if problem.fused else half.astype(out_dtype)
                part, row, column = origin(tile)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                following.wait_for_bias()
                for count, (m, n) in enumerate(corners):
                    piece = pieces.at[warpgroup, count % slots]
                    if count >= slots:
                        plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
                    sums = half[m : m + ATOM_M, n : n + width]
                    sums = plgpu.layout_cast(sums, plgpu.Layout.WGMMA_TRANSPOSED) if swap else sums
                    if problem.fused:
                        columns_of_half = pl.ds(m, ATOM_M) if swap else pl.ds(n, width)
                        sums = following.finish(sums, count % slots, columns_of_half).astype(out_dtype)
                    if swap:
                        piece.T[...] = sums
                    else:
                        piece[...] = sums
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(piece, place(c, part, *slices_of_result(row, column, m, n)))
                    if problem.fused and count + slots < len(corners):
                        fetch_residual(count + slots, part, row, column)

            if takers > 1:
                turns = lax.div(tiles - 1 - warpgroup + takers, takers)
                lax.fori_loop(0, turns, lambda turn, _: multiply_tile(turn * takers + warpgroup, None), None)
            else:
                lax.fori_loop(0, tiles, multiply_tile, None)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def block(a_ring: Any, b_ring: Any, pieces: Any, loaded: Any, released: Any, **following_refs: Any) -> None:
            @pl.when(warpgroup == multipliers)
            def copier() -> None:
                if multipliers == 2:
                    plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
                load(a_ring, b_ring, loaded, released)

            @pl.when(warpgroup != multipliers)
            def multiplier() -> None:
                if multipliers == 2:
                    plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
                multiply(a_ring, b_ring, pieces, loaded, released, **following_refs)

        pl.run_scoped(block, **on_chip, collective_axes="warpgroup")

    return matmul


def walk(number: Any, rows: int, columns: int, raster: str, width: int) -> tuple[Any, Any, Any]:
    """Part, row and column of a tile by its number: in bands of `width` tiles, every other one walked backwards."""
    minors, majors = (rows, columns) if raster == "m" else (columns, rows)
    part, number = lax.div(number, rows * columns), lax.rem(number, rows * columns)
    band, number = lax.div(number, width * majors), lax.rem(number, width * majors)
    width_here = width if minors % width == 0 else lax.min(width, minors - band * width)
    major, minor = lax.div(number, width_here), band * width + lax.rem(number, width_here)
    major = lax.select(lax.rem(band, 2) == 0, major, majors - 1 - major)
    return (part, minor, major) if raster == "m" else (part, major, minor)
