"""The kernel itself: what a block keeps on chip, and who does what with it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from search_spaces.jax_compat import plgpu
from search_spaces.matmul.mosaic_gpu import groups
from search_spaces.matmul.mosaic_gpu.exchange import exchange
from search_spaces.matmul.mosaic_gpu.following import Following, following_on_chip
from search_spaces.matmul.mosaic_gpu.geometry import ATOM_M, Geometry
from search_spaces.matmul.mosaic_gpu.parts import Grouped, Tiled
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
    swap = schedule.swap_ab
    p, s = mirrored(problem, schedule) if swap else (problem, schedule)
    g = Geometry(p, s)
    multipliers, slots, parts = g.warpgroups, int(out.slots), g.parts
    dtype = jnp.dtype(p.dtype)
    out_dtype = p.result().dtype if s.split_k == 1 else p.sums_dtype
    part_on_chip = Grouped if out.exact else Tiled
    a_extents = (s.tile_k, s.tile_m) if p.transpose_a else (s.tile_m, s.tile_k)
    b_extents = (s.tile_n, s.tile_k) if p.transpose_b else (s.tile_k, s.tile_n)
    a_part, b_part = (part_on_chip(*extents, dtype, int(out.swizzle)) for extents in (a_extents, b_extents))
    piece_part = part_on_chip(int(out.piece_m), int(out.piece_n), out_dtype, int(out.out_swizzle))
    as_stored = {"transpose_a": p.transpose_a, "transpose_b": p.transpose_b}
    takers = multipliers // g.readers  # of whole tiles, in turns
    shared = exchange(problem, schedule)
    larger = a_part if s.tile_m > s.tile_n else b_part
    if shared and shared.onchip_bytes > s.stages * larger.rows * larger.columns * dtype.itemsize:
        raise ValueError(f"{schedule}: half of a tile's sums find no room where its operands were: more stages do it")
    own_n = g.wg_n // g.pair_k  # columns that a warpgroup finishes
    both = {"num_arrivals": g.readers, "num_barriers": s.stages}
    on_chip = {
        "a_ring": plgpu.SMEM((s.stages, *a_part.shape), dtype, transforms=a_part.transforms),
        "b_ring": plgpu.SMEM((s.stages, *b_part.shape), dtype, transforms=b_part.transforms),
        "pieces": plgpu.SMEM((multipliers, slots, *piece_part.shape), out_dtype, transforms=piece_part.transforms),
        "loaded": plgpu.Barrier(num_arrivals=a_part.copies + b_part.copies, num_barriers=takers * s.stages),
        # A slot that two blocks fill is free when both have read theirs.
        "released": plgpu.Barrier(**both)
        if s.cluster in ("none", "split_k")
        else plgpu.ClusterBarrier(collective_axes=("pair",), **both),
        **following_on_chip(problem, out),
        **(shared.on_chip() if shared else {}),
    }

    def window(array: Any, batch: Any, *slices: Any) -> Any:
        return array.at[(batch, *slices) if p.batch > 1 else slices]

    def place(array: Any, part: Any, *slices: Any) -> Any:
        return array.at[(part, *slices) if parts > 1 else slices]

    def matmul(*arrays: Any) -> None:
        operands, (c, *mail) = arrays[: len(problem.operands())], arrays[len(problem.operands()) :]
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
            part, row, column = walk(worker + tile * workers, g.rows, g.columns, s.grid_minor_dim, s.grid_tile_width)
            row = 2 * row + pair if s.cluster == "m" else row
            column = 2 * column + pair if s.cluster == "n" else column
            return part, row * s.tile_m, column * s.tile_n

        def load(a_ring: Any, b_ring: Any, loaded: Any, released: Any) -> None:
            def load_tile(tile: Any, _: None) -> None:
                part, row, column = origin(tile)
                batch, first_step = part, 0
                if s.split_k > 1:
                    batch, first_step = lax.rem(part, p.batch), lax.div(part, p.batch) * g.steps
                if s.cluster == "split_k":
                    first_step = pair * g.steps

                def load_step(k_step: Any, _: None) -> None:
                    step = tile * g.steps + k_step
                    slot = lax.rem(step, s.stages)
                    arrival = loaded.at[barrier_of(tile, slot)]
                    k = (first_step + k_step) * s.tile_k

                    @pl.when(step >= s.stages)
                    def wait_for_room() -> None:
                        plgpu.barrier_wait(released.at[slot])

                    def fill(
                        ring: Any, lies: Tiled | Grouped, array: Any, corner: tuple[Any, Any], sharing: str
                    ) -> None:
                        """Loads a part of `array`, which blocks that pair up along the axis `sharing` share."""
                        for group, box in lies.boxes(*corner):
                            plgpu.copy_gmem_to_smem(
                                window(array, batch, *box),
                                ring.at[slot, *group],
                                arrival,
                                collective_axes="pair" if s.cluster == sharing else None,
                            )

                    fill(a_ring, a_part, a, (k, row) if p.transpose_a else (row, k), "n")
                    fill(b_ring, b_part, b, (column, k) if p.transpose_b else (k, column), "m")

                lax.fori_loop(0, g.steps, load_step, None)

            lax.fori_loop(0, tiles, load_tile, None)

            # The other block of a cluster writes into this one's slots and barriers: stay until both released the last.
            def drain(step: Any, _: None) -> None:
                plgpu.barrier_wait(released.at[lax.rem(step, s.stages)])

            lax.fori_loop(lax.max(tiles * g.steps - s.stages, 0), tiles * g.steps, drain, None)

        def multiply(a_ring: Any, b_ring: Any, pieces: Any, loaded: Any, released: Any, **others: Any) -> None:
            exchanged = {name: others.pop(name) for name in (shared.on_chip() if shared else ())}
            following = Following(out, problem, swap, warpgroup, bias, residual, **others)
            first_row = warpgroup * g.wg_m if s.consumers == "cooperative_m" else 0
            first_column = warpgroup * g.wg_n if s.consumers == "cooperative_n" else 0
            rows, columns, ks = pl.ds(first_row, g.wg_m), pl.ds(first_column, g.wg_n), slice(None)
            first_own = first_column + pair * own_n if shared else first_column
            width = own_n if swap else s.epi_tile_n
            corners = [(m, n) for m in range(0, g.wg_m, ATOM_M) for n in range(0, own_n, width)]

            def corner_of_result(row: Any, column: Any, m: int, n: int) -> tuple[Any, Any]:
                """First row and column of a piece of the tile at `row` and `column`."""
                corner = row + first_row + m, column + first_own + n
                return corner[::-1] if swap else corner

            def fetch_residual(count: int, part: Any, row: Any, column: Any) -> None:
                following.fetch_residual(count % slots, part, *corner_of_result(row, column, *corners[count]))

            def multiply_tile(tile: Any, _: None) -> None:
                if problem.fused:
                    part, row, column = origin(tile)
                    following.fetch_bias(part, row + first_row if swap else column + first_own)
                    for count in range(slots):
                        fetch_residual(count, part, row, column)

                def slot_of(k_step: Any) -> Any:
                    return lax.rem(tile * g.steps + k_step, s.stages)

                def start(slot: Any, sums: Any) -> Any:
                    """The sums to go on with: new ones, or `sums` themselves, an accumulator in place."""
                    a_half = a_part.share(a_ring, slot, *((ks, rows) if p.transpose_a else (rows, ks)))
                    b_half = b_part.share(b_ring, slot, *((columns, ks) if p.transpose_b else (ks, columns)))
                    plgpu.barrier_wait(loaded.at[barrier_of(tile, slot)])
                    if out.exact:
                        return groups.multiply(sums, a_half, b_half, a_part.swizzle, **as_stored)
                    a_half, b_half = a_half.T if p.transpose_a else a_half, b_half.T if p.transpose_b else b_half
                    plgpu.wgmma(sums, a_half, b_half)
                    return sums

                def release(slot: Any, running: int) -> None:
                    """Gives a slot back when no more than so many steps, all later ones, are still `running`."""
                    plgpu.wgmma_wait(running)
                    plgpu.barrier_arrive(released.at[slot])

                def multiply_step(k_step: Any, sums: Any) -> Any:
                    slot = slot_of(k_step)
                    sums = start(slot, sums)
                    release(slot_of(k_step - s.delay_release) if s.delay_release else slot, s.delay_release)
                    return sums

                def multiply_in_place(sums: Any) -> jax.Array:
                    def step_in_place(k_step: Any, _: None) -> None:
                        multiply_step(k_step, sums)

                    for k_step in range(s.delay_release):
                        start(slot_of(k_step), sums)
                    lax.fori_loop(s.delay_release, g.steps, step_in_place, None)
                    for k_step in range(g.steps - s.delay_release, g.steps):
                        release(slot_of(k_step), 0)
                    return sums[...]

                half_shape = (g.wg_m, g.wg_n)
                if out.exact:  # Each step is waited for: what follows could not see that sums are still to come.
                    half = lax.fori_loop(0, g.steps, multiply_step, groups.zeros(half_shape, p.sums_dtype))
                else:
                    half = pl.run_scoped(multiply_in_place, plgpu.ACC(half_shape, p.sums_dtype))
                if shared:
                    room = a_ring if larger is a_part else b_ring
                    half = shared.add(half, warpgroup, room, larger.transforms, mail, **exchanged)
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
                    if out.written:
                        first_of_piece = corner_of_result(row, column, m, n)
                        whole = c.at[part] if parts > 1 else c
                        groups.write(whole, *first_of_piece, piece, sums, piece_part.swizzle, transposed=swap)
                        plgpu.commit_smem()
                    else:
                        piece_part.store(piece, sums, transposed=swap)
                        plgpu.commit_smem()
                        boxes = piece_part.boxes(*corner_of_result(row, column, m, n))
                        for number, (group, box) in enumerate(boxes, 1):
                            plgpu.copy_smem_to_gmem(
                                piece.at[group] if group else piece,
                                place(c, part, *box),
                                commit_group=number == len(boxes),
                            )
                    if problem.fused and count + slots < len(corners):
                        fetch_residual(count + slots, part, row, column)

            if takers > 1:
                turns = lax.div(tiles - 1 - warpgroup + takers, takers)
                lax.fori_loop(0, turns, lambda turn, _: multiply_tile(turn * takers + warpgroup, None), None)
            else:
                lax.fori_loop(0, tiles, multiply_tile, None)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def block(a_ring: Any, b_ring: Any, pieces: Any, loaded: Any, released: Any, **others: Any) -> None:
            @pl.when(warpgroup == multipliers)
            def copier() -> None:
                if multipliers == 2:
                    plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
                load(a_ring, b_ring, loaded, released)
                if shared:
                    shared.meet()

            @pl.when(warpgroup != multipliers)
            def multiplier() -> None:
                if multipliers == 2:
                    plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
                multiply(a_ring, b_ring, pieces, loaded, released, **others)

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
