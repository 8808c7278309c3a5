"""The matrix product on Hopper: a persistent, warp-specialised Mosaic GPU kernel and its schedules."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from search_spaces.jax_compat import plgpu
from search_spaces.kernel import Footprint, Kernel, Operand, Target
from search_spaces.matmul.problem import MatmulProblem
from search_spaces.space import Columns, Space

# Two warpgroups compute; a third one only issues the copies from device memory.
COMPUTE = 2
THREADS = 128
# Registers per thread, in multiples of 8. A block of 384 threads starts with 168 each (65,536 / 384, rounded down);
# what the copying threads give back, the computing ones share.
COPY_REGISTERS = 40
COMPUTE_REGISTERS = 232
# What a computing thread holds besides its accumulators. With 192 of these it does not spill, with 208 it does (ptxas).
OTHER_REGISTERS = 40
# wgmma multiplies 64 rows at a time (PTX ISA, wgmma.mma_async).
ATOM_M = 64
# Mosaic GPU gives each on-chip array whole kibibytes, and each barrier 8 bytes.
ALIGNMENT = 1024
BARRIER_BYTES = 8


@dataclasses.dataclass(frozen=True)
class HopperSchedule:
    """How a product is laid over blocks, and over time.

    Attributes:
      tile_m, tile_n: extents of the output tile that one block computes at a time.
      tile_k: extent of k that one step loads and multiplies.
      stages: steps whose operands have room on chip; loads run so far ahead, into the next tile where this one ends.
      split: the axis along which the two computing warpgroups halve the tile, "m" or "n".
      cluster: the axis along which two blocks pair up, each loading half of the operand that both need, or "none".
      raster: the axis along which tiles that follow each other are neighbours, "m" or "n": bands of...
      raster_width: ...so many tiles (pairs of tiles along the axis of a cluster), walked to and fro.
      epilogue_n: columns of the 64-row pieces in which a warpgroup hands over its result.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    stages: int
    split: str
    cluster: str
    raster: str
    raster_width: int
    epilogue_n: int


class MosaicGpuMatmul(Kernel[MatmulProblem, HopperSchedule]):
    backend = "mosaic_gpu"
    version = 1
    verified_on = frozenset({"sm_90"})  # tests/device on an NVIDIA H200

    def supports(self, problem: MatmulProblem, target: Target) -> str | None:
        if target.platform != "cuda" or target.architecture != "sm_90":
            return f"is written for NVIDIA Hopper (sm_90), not for {target.kind} ({target.architecture})"
        if problem.fused:
            return "fuses no bias, activation or residual yet"
        if problem.dtype == "float32" and problem.precision != "default":
            return f"multiplies float32 as TF32, not at precision {problem.precision!r}"
        if problem.dtype == "float32" and (problem.transpose_a or not problem.transpose_b):
            return "multiplies float32 only where k is the last axis of both operands (transpose_b alone)"
        return None

    def space(self, problem: MatmulProblem, target: Target) -> Space[HopperSchedule]:
        p, cores = problem, target.cores
        itemsize, out_itemsize = jnp.dtype(p.dtype).itemsize, p.result().dtype.itemsize

        def tiles(tile_m: Any, tile_n: Any) -> Any:
            return p.batch * _cdiv(p.m, tile_m) * _cdiv(p.n, tile_n)

        def turns(s: Any) -> Any:
            """Tiles of the busiest block."""
            return _cdiv(tiles(s.tile_m, s.tile_n), cores)

        def area_of_turns(tile_m: Any, tile_n: Any) -> Any:
            return _cdiv(tiles(tile_m, tile_n), cores) * tile_m * tile_n

        def bytes_in_flight(s: Any) -> Any:
            return s.stages * (s.tile_m + s.tile_n) * s.tile_k * itemsize

        def steps(s: Any) -> Any:
            return _cdiv(p.k, s.tile_k) * turns(s)

        def clusters(s: Any, axis: str) -> Any:
            extent, tile = (p.m, s.tile_m) if axis == "m" else (p.n, s.tile_n)
            return _cdiv(extent, tile * (1 + (s.cluster == axis)))

        def order_matters(s: Any) -> Any:
            return (turns(s) > 1) & (clusters(s, "m") > 1) & (clusters(s, "n") > 1)

        tile_m, tile_n = _up_to(p.m, (128, 256, 64)), _up_to(p.n, (256, 128, 64))
        least_area = min(area_of_turns(m, n) for m in tile_m for n in tile_n)
        filling = [
            (m, n)
            for m in (*tile_m, 192)
            for n in (*tile_n, 96, 160, 192, 224)
            if m < 2 * p.m and n < 2 * p.n and not _is_power_of_two(m * n) and area_of_turns(m, n) <= least_area
        ]
        idle_cores = tiles(64, 64) < cores

        return Space(
            HopperSchedule,
            choices={
                "epilogue_n": (64, 128, 32, 16) if idle_cores else (64, 128, 32),
                "split": ("m", "n"),
                "tile_m": _distinct(*tile_m, *(m for m, _ in filling)),
                "tile_n": _distinct(*tile_n, *(n for _, n in filling), *((32,) if idle_cores else ())),
                # One or two swizzled rows of 128 bytes.
                "tile_k": _up_to(p.k, (128 // itemsize, 256 // itemsize)),
                "stages": (4, 3, 5, 6, 2, 8, 12),
                "cluster": ("none", "m", "n") if cores > 1 else ("none",),
                "raster": ("n",) if idle_cores else ("n", "m"),
                "raster_width": (1,) if idle_cores else (8, 4, 16, 1),
            },
            rules={
                "each of two warpgroups multiplies a multiple of 64 rows": lambda s: (
                    s.tile_m % np.where(s.split == "m", 128, 64) == 0
                ),
                "pieces of the epilogue divide a warpgroup's columns": lambda s: _columns(s) % s.epilogue_n == 0,
                "pieces of the epilogue are 128 or 256 bytes wide where the columns allow it": lambda s: (
                    (s.epilogue_n * out_itemsize <= 256)
                    & ((s.epilogue_n * out_itemsize >= 128) | (_columns(s) % (2 * s.epilogue_n) != 0))
                ),
                "tiles of no power of two serve to fill the last wave": lambda s: (
                    _is_power_of_two(s.tile_m * s.tile_n) | (area_of_turns(s.tile_m, s.tile_n) <= least_area)
                ),
                "more stages than steps stay empty": lambda s: (s.stages == 2) | (s.stages <= steps(s)),
                "with under 80 KiB in flight, and more to come, the tensor cores wait for memory": lambda s: (
                    (bytes_in_flight(s) >= 80 * 1024) | (s.stages + 1 >= steps(s))
                ),
                "more than 256 KiB in flight hide no more latency": lambda s: bytes_in_flight(s) <= 256 * 1024,
                "a cluster has a pair of tiles, and halves the loads of the larger operand": lambda s: (
                    (s.cluster == "none")
                    | ((s.cluster == "m") & (p.m > s.tile_m) & (s.tile_n >= s.tile_m))
                    | ((s.cluster == "n") & (p.n > s.tile_n) & (s.tile_m >= s.tile_n))
                ),
                "where the order changes nothing, one is enough": lambda s: (
                    order_matters(s) | ((s.raster == "n") & (s.raster_width == 1))
                ),
                "bands one tile wide load more than wider ones": lambda s: (
                    (s.raster_width > 1) | np.logical_not(order_matters(s))
                ),
                "bands wider than the grid are as wide as the grid": lambda s: (
                    (s.raster_width <= 4)
                    | (s.raster_width < 2 * np.where(s.raster == "m", clusters(s, "m"), clusters(s, "n")))
                ),
            },
        )

    def footprint(self, problem: MatmulProblem, schedules: Columns, target: Target) -> Footprint:
        p, s = problem, schedules
        g = _Geometry(p, s)
        itemsize, out_itemsize = jnp.dtype(p.dtype).itemsize, p.result().dtype.itemsize
        blocks_m, blocks_n = g.rows * g.pair_m, g.columns * g.pair_n
        row_bytes = p.k / g.steps * itemsize
        registers = g.wg_m * g.wg_n // THREADS + OTHER_REGISTERS
        copies = [
            _copied_elements(array.shape, extents) * array.dtype.itemsize
            for array, extents in zip((*p.operands(), p.result()), (g.a_extents, g.b_extents, g.c_extents), strict=True)
        ]
        return Footprint(
            arithmetic=p.arithmetic,
            grid=(np.full(len(s), p.batch), blocks_m, blocks_n),
            operands=(
                Operand(bytes=p.m / blocks_m * row_bytes, axes=(0, 1), multicast=g.pair_n),
                Operand(bytes=p.n / blocks_n * row_bytes, axes=(0, 2), multicast=g.pair_m),
            ),
            flops=2.0 * s.tile_m * s.tile_n * s.tile_k,
            bytes_written=(p.m / blocks_m) * (p.n / blocks_n) * out_itemsize,
            onchip_bytes=_round_up(s.stages * s.tile_m * s.tile_k * itemsize, ALIGNMENT)
            + _round_up(s.stages * s.tile_k * s.tile_n * itemsize, ALIGNMENT)
            + _round_up(COMPUTE * g.slots * ATOM_M * s.epilogue_n * out_itemsize, ALIGNMENT)
            + 2 * s.stages * BARRIER_BYTES,
            steps=g.steps,
            minor=np.where(s.raster == "m", 1, 2),
            group=s.raster_width * np.where(s.raster == "m", g.pair_m, g.pair_n),
            stages=s.stages,
            threads=COMPUTE * THREADS,
            registers=registers,
            registers_per_block=THREADS * (COMPUTE * _round_up(registers, 8) + COPY_REGISTERS),
            # Each multiplication of 64 rows reads these, and its columns once more.
            onchip_bytes_read=COMPUTE * (g.wg_m + g.wg_m // ATOM_M * g.wg_n) * s.tile_k * itemsize,
            cluster=g.pair_m * g.pair_n,
            persistent=True,
            copied_bytes=sum(copies),
            launches=1 + sum(copy > 0 for copy in copies),
        )

    def run(
        self, problem: MatmulProblem, schedule: HopperSchedule, target: Target, /, *args: Any, **params: Any
    ) -> jax.Array:
        p, s = problem, schedule
        g = _Geometry(p, s)
        a, b = (_pad(x, extents) for x, extents in zip(args, (g.a_extents, g.b_extents), strict=True))
        pairs = g.pair_m * g.pair_n
        kernel = plgpu.kernel(
            _body(p, s),
            out_type=jax.ShapeDtypeStruct((*p.result().shape[:-2], *g.c_extents), p.result().dtype),
            grid=(max(1, min(target.cores // pairs, p.batch * g.rows * g.columns)),),
            grid_names=("worker",),
            cluster=(pairs,),
            cluster_names=("pair",),
            num_threads=COMPUTE + 1,
            thread_name="warpgroup",
            compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        )
        # Indices are 32 bits wide, whatever the user's default.
        with jax.enable_x64(False):
            c: jax.Array = kernel(a, b)
        return c if g.c_extents == (p.m, p.n) else c[..., : p.m, : p.n]


class _Geometry:
    """What follows from a problem and a schedule, or from a problem and `Columns` of schedules.

    Attributes:
      wg_m, wg_n: what one warpgroup computes of a tile.
      pair_m, pair_n: tiles of a cluster along each axis.
      rows, columns: clusters along each axis.
      steps: of one tile.
      slots: pieces of the epilogue that a warpgroup has room for.
      swizzle, out_swizzle: bytes of a swizzled row of the operands, of the result.
      a_extents, b_extents, c_extents: of the arrays in device memory, padded as far as copies demand it.
    """

    def __init__(self, p: MatmulProblem, s: Any) -> None:
        itemsize, out_itemsize = jnp.dtype(p.dtype).itemsize, p.result().dtype.itemsize
        self.wg_m, self.wg_n = s.tile_m // (1 + (s.split == "m")), s.tile_n // (1 + (s.split == "n"))
        self.pair_m, self.pair_n = 1 + (s.cluster == "m"), 1 + (s.cluster == "n")
        self.rows, self.columns = _cdiv(p.m, s.tile_m * self.pair_m), _cdiv(p.n, s.tile_n * self.pair_n)
        self.steps = _cdiv(p.k, s.tile_k)
        self.slots = np.minimum(2, (self.wg_m // ATOM_M) * (self.wg_n // s.epilogue_n))
        a, b = ((p.k, p.m) if p.transpose_a else (p.m, p.k)), ((p.n, p.k) if p.transpose_b else (p.k, p.n))
        # A wgmma wants both operands swizzled alike, and a warpgroup's half must end where a swizzled row ends.
        a_row, b_row = (self.wg_m if p.transpose_a else s.tile_k), (s.tile_k if p.transpose_b else self.wg_n)
        self.swizzle = _swizzle(np.gcd(a_row, b_row), (a[1], b[1]), itemsize)
        self.out_swizzle = _swizzle(s.epilogue_n, (p.n,), out_itemsize)
        self.a_extents = _legal_extents(a, self.swizzle, itemsize)
        self.b_extents = _legal_extents(b, self.swizzle, itemsize)
        self.c_extents = _legal_extents((p.m, p.n), self.out_swizzle, out_itemsize)


def _body(p: MatmulProblem, s: HopperSchedule) -> Any:
    """The kernel, from its arrays in device memory: what a block keeps on chip, and who does what with it.

    One warpgroup copies operands into a ring of `stages` slots, two warpgroups multiply them. Both sides count the
    steps of all tiles of their block, so that the ring stays full from one tile to the next. The copier waits for
    "released" of a slot that it has filled before, a multiplier for "loaded".
    """
    g = _Geometry(p, s)
    slots = int(g.slots)
    a_block = (s.tile_k, s.tile_m) if p.transpose_a else (s.tile_m, s.tile_k)
    b_block = (s.tile_n, s.tile_k) if p.transpose_b else (s.tile_k, s.tile_n)
    dtype, out_dtype = jnp.dtype(p.dtype), p.result().dtype
    swizzled, out_swizzled = _transforms(int(g.swizzle), dtype), _transforms(int(g.out_swizzle), out_dtype)
    both = {"num_arrivals": COMPUTE, "num_barriers": s.stages}
    on_chip = {
        "a_ring": plgpu.SMEM((s.stages, *a_block), dtype, transforms=swizzled),
        "b_ring": plgpu.SMEM((s.stages, *b_block), dtype, transforms=swizzled),
        "pieces": plgpu.SMEM((COMPUTE, slots, ATOM_M, s.epilogue_n), out_dtype, transforms=out_swizzled),
        "loaded": plgpu.Barrier(num_arrivals=2, num_barriers=s.stages),
        # A slot that two blocks fill is free when both have read theirs.
        "released": plgpu.Barrier(**both)
        if s.cluster == "none"
        else plgpu.ClusterBarrier(collective_axes=("pair",), **both),
    }

    def window(array: Any, batch: Any, *slices: Any) -> Any:
        return array.at[(batch, *slices) if p.batch > 1 else slices]

    def matmul(a: Any, b: Any, c: Any) -> None:
        worker, workers, pair = lax.axis_index("worker"), lax.axis_size("worker"), lax.axis_index("pair")
        warpgroup = lax.axis_index("warpgroup")
        tiles = lax.div(p.batch * g.rows * g.columns - 1 - worker + workers, workers)

        def origin(tile: Any) -> tuple[Any, Any, Any]:
            """Batch, first row and first column of the `tile`-th tile of this block."""
            batch, row, column = _walk(worker + tile * workers, g.rows, g.columns, s.raster, s.raster_width)
            row = 2 * row + pair if s.cluster == "m" else row
            column = 2 * column + pair if s.cluster == "n" else column
            return batch, row * s.tile_m, column * s.tile_n

        def load(a_ring: Any, b_ring: Any, loaded: Any, released: Any) -> None:
            def load_tile(tile: Any, _: None) -> None:
                batch, row, column = origin(tile)
                rows, columns = pl.ds(row, s.tile_m), pl.ds(column, s.tile_n)

                def load_step(k_step: Any, _: None) -> None:
                    step = tile * g.steps + k_step
                    slot = lax.rem(step, s.stages)
                    ks = pl.ds(k_step * s.tile_k, s.tile_k)

                    @pl.when(step >= s.stages)
                    def wait_for_room() -> None:
                        plgpu.barrier_wait(released.at[slot])

                    plgpu.copy_gmem_to_smem(
                        window(a, batch, *((ks, rows) if p.transpose_a else (rows, ks))),
                        a_ring.at[slot],
                        loaded.at[slot],
                        collective_axes="pair" if s.cluster == "n" else None,
                    )
                    plgpu.copy_gmem_to_smem(
                        window(b, batch, *((columns, ks) if p.transpose_b else (ks, columns))),
                        b_ring.at[slot],
                        loaded.at[slot],
                        collective_axes="pair" if s.cluster == "m" else None,
                    )

                lax.fori_loop(0, g.steps, load_step, None)

            lax.fori_loop(0, tiles, load_tile, None)

            # The other block of a cluster writes into this one's slots and barriers: stay until both released the last.
            def drain(step: Any, _: None) -> None:
                plgpu.barrier_wait(released.at[lax.rem(step, s.stages)])

            lax.fori_loop(lax.max(tiles * g.steps - s.stages, 0), tiles * g.steps, drain, None)

        def multiply(a_ring: Any, b_ring: Any, pieces: Any, loaded: Any, released: Any) -> None:
            first_row, first_column = (warpgroup * g.wg_m, 0) if s.split == "m" else (0, warpgroup * g.wg_n)
            rows, columns = pl.ds(first_row, g.wg_m), pl.ds(first_column, g.wg_n)
            corners = [(m, n) for m in range(0, g.wg_m, ATOM_M) for n in range(0, g.wg_n, s.epilogue_n)]

            def multiply_tile(tile: Any, _: None) -> None:
                def multiply_step(k_step: Any, sums: Any) -> None:
                    slot = lax.rem(tile * g.steps + k_step, s.stages)
                    a_half = a_ring.at[slot, :, rows].T if p.transpose_a else a_ring.at[slot, rows, :]
                    b_half = b_ring.at[slot, columns, :].T if p.transpose_b else b_ring.at[slot, :, columns]
                    plgpu.barrier_wait(loaded.at[slot])
                    plgpu.wgmma(sums, a_half, b_half)
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(released.at[slot])

                def multiply_steps(sums: Any) -> jax.Array:
                    lax.fori_loop(0, g.steps, lambda k_step, _: multiply_step(k_step, sums), None)
                    return sums[...]

                half = pl.run_scoped(multiply_steps, plgpu.ACC((g.wg_m, g.wg_n), jnp.float32)).astype(out_dtype)
                batch, row, column = origin(tile)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for count, (m, n) in enumerate(corners):
                    piece = pieces.at[warpgroup, count % slots]
                    if count >= slots:
                        plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
                    piece[...] = half[m : m + ATOM_M, n : n + s.epilogue_n]
                    plgpu.commit_smem()
                    place = pl.ds(row + first_row + m, ATOM_M), pl.ds(column + first_column + n, s.epilogue_n)
                    plgpu.copy_smem_to_gmem(piece, window(c, batch, *place))

            lax.fori_loop(0, tiles, multiply_tile, None)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def block(a_ring: Any, b_ring: Any, pieces: Any, loaded: Any, released: Any) -> None:
            @pl.when(warpgroup == COMPUTE)
            def copier() -> None:
                plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
                load(a_ring, b_ring, loaded, released)

            @pl.when(warpgroup != COMPUTE)
            def multiplier() -> None:
                plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
                multiply(a_ring, b_ring, pieces, loaded, released)

        pl.run_scoped(block, **on_chip, collective_axes="warpgroup")

    return matmul


def _walk(number: Any, rows: int, columns: int, raster: str, width: int) -> tuple[Any, Any, Any]:
    """Batch, row and column of a tile by its number: in bands of `width` tiles, every other one walked backwards."""
    minors, majors = (rows, columns) if raster == "m" else (columns, rows)
    batch, number = lax.div(number, rows * columns), lax.rem(number, rows * columns)
    band, number = lax.div(number, width * majors), lax.rem(number, width * majors)
    width_here = width if minors % width == 0 else lax.min(width, minors - band * width)
    major, minor = lax.div(number, width_here), band * width + lax.rem(number, width_here)
    major = lax.select(lax.rem(band, 2) == 0, major, majors - 1 - major)
    return (batch, minor, major) if raster == "m" else (batch, major, minor)


def _transforms(swizzle: int, dtype: Any) -> tuple[Any, ...]:
    return plgpu.TilingTransform((8, swizzle // dtype.itemsize)), plgpu.SwizzleTransform(swizzle)


def _swizzle(row: Any, extents: tuple[int, ...], itemsize: int) -> Any:
    """Bytes of the widest swizzled row that divides `row` elements, and the arrays' `extents` where one does."""
    widest = np.gcd(row * itemsize, 128)
    for extent in extents:
        dividing = math.gcd(extent * itemsize, 128)
        if extent * itemsize > 128 and dividing >= 32:
            widest = np.minimum(widest, dividing)
    return widest


def _legal_extents(extents: tuple[int, int], swizzle: Any, itemsize: int) -> tuple[Any, Any]:
    """The least extents of an array that copies reach: whole tiles of 8 swizzled rows or under one, 16-byte strides.

    Within them no edge needs a mask: copies fill what lies beyond with zeros and write nothing there.
    """
    rows, columns = extents
    swizzled = swizzle // itemsize
    whole = np.where(columns <= swizzled, _round_up(columns, 16 // itemsize), _round_up(columns, swizzled))
    return rows if rows <= 8 else _round_up(rows, 8), whole


def _copied_elements(shape: tuple[int, ...], extents: tuple[Any, Any]) -> Any:
    """Elements read and written to get from one of an array and its padded twin to the other."""
    size = np.prod(shape[-2:], dtype=np.int64)
    padded = extents[0] * extents[1]
    return np.where(padded > size, size + padded, 0) * np.prod(shape[:-2], dtype=np.int64)


def _pad(x: jax.Array, extents: tuple[Any, Any]) -> jax.Array:
    rows, columns = (int(extent) for extent in extents)
    pads = [(0, 0)] * (x.ndim - 2) + [(0, rows - x.shape[-2]), (0, columns - x.shape[-1])]
    return jnp.pad(x, pads) if any(after for _, after in pads) else x


def _columns(s: Any) -> Any:
    """Columns of one warpgroup."""
    return np.where(s.split == "n", s.tile_n // COMPUTE, s.tile_n)


def _up_to(extent: int, tiles: tuple[int, ...]) -> tuple[int, ...]:
    """The tiles that `extent` fills by more than half, and the smallest in any case."""
    return tuple(tile for tile in tiles if tile == min(tiles) or tile < 2 * extent)


def _distinct(*values: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys(values))


def _is_power_of_two(value: Any) -> Any:
    return value & (value - 1) == 0


def _cdiv(a: Any, b: Any) -> Any:
    return -(-a // b)


def _round_up(a: Any, b: Any) -> Any:
    return _cdiv(a, b) * b
