"""A tiled matmul in plain ``pallas_call``: the teaching kernel, run by the interpreter on a CPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from search_spaces.footprint import Footprint, Operand, Phase
from search_spaces.kernel import INDICES_OF_32_BITS, Kernel
from search_spaces.matmul import epilogue
from search_spaces.matmul.problem import MatmulProblem
from search_spaces.problem import Arrays, nbytes
from search_spaces.space import Columns, Space, cdiv
from search_spaces.target import Target, not_interpreted


@dataclasses.dataclass(frozen=True)
class InterpretSchedule:
    """Tile extents, and the axis ("m" or "n") along which consecutive tiles lie."""

    tile_m: int
    tile_n: int
    tile_k: int
    minor: str


class InterpretMatmul(Kernel[MatmulProblem, InterpretSchedule]):
    backend = "interpret"
    version = 1
    most_elements = INDICES_OF_32_BITS

    def supports(self, problem: MatmulProblem, target: Target) -> str | None:
        return not_interpreted(target)

    def space(self, problem: MatmulProblem, target: Target) -> Space[InterpretSchedule]:
        p = problem
        return Space(
            InterpretSchedule,
            choices={
                "tile_m": tile_extents(p.m),
                "tile_n": tile_extents(p.n),
                "tile_k": tile_extents(p.k),
                "minor": ("m", "n"),
            },
            rules={
                "one order is enough for a single row or column of tiles": lambda s: (
                    (s.minor == "m") | ((s.tile_m < p.m) & (s.tile_n < p.n))
                ),
                # An interpreted grid step costs about a millisecond whatever it computes.
                "at most 4096 grid steps": lambda s: (
                    cdiv(p.m, s.tile_m) * cdiv(p.n, s.tile_n) * cdiv(p.k, s.tile_k)
                    <= max(4096, _steps_of_largest_tiles(p))
                ),
            },
        )

    def footprint(self, problem: MatmulProblem, schedules: Columns, target: Target) -> Footprint:
        p, s = problem, schedules
        itemsize, out_itemsize = jnp.dtype(p.dtype).itemsize, p.whole.dtype.itemsize
        rows, columns = cdiv(p.m, s.tile_m), cdiv(p.n, s.tile_n)
        steps = cdiv(p.k, s.tile_k)
        a, b = (p.m / rows) * (p.k / steps) * itemsize, (p.k / steps) * (p.n / columns) * itemsize
        bias = p.n / columns * _itemsize(p.bias)
        residual = (p.m / rows) * (p.n / columns) * _itemsize(p.residual)
        tile = s.tile_m * s.tile_k + s.tile_k * s.tile_n
        result = s.tile_m * s.tile_n
        return Footprint(
            arithmetic=p.arithmetic,
            grid=(np.full(len(s), p.batch), rows, columns),
            step=Phase(
                loads=(Operand(bytes=a, axes=(0, 1), name="a"), Operand(bytes=b, axes=(0, 2), name="b")),
                flops=2.0 * s.tile_m * s.tile_n * s.tile_k,
            ),
            tile=Phase(
                loads=(
                    *([Operand(bytes=bias, axes=(0, 2), name="bias")] if p.bias else []),
                    *([Operand(bytes=residual, axes=(0, 1, 2), name="residual")] if p.residual else []),
                ),
                mufu_ops=result * epilogue.EXPONENTIALS[p.activation],
                bytes_written=(p.m / rows) * (p.n / columns) * out_itemsize,
            ),
            onchip_bytes=tile * itemsize
            + s.tile_n * _itemsize(p.bias)
            + result * (4 + out_itemsize + _itemsize(p.residual)),
            steps=steps,
            minor=np.where(s.minor == "m", 1, 2),
            group=np.where(s.minor == "m", rows, columns),
            axes=("batch", "m", "n"),
            # Several results are slices of one array.
            copied_bytes=2.0 * nbytes(p.whole) if p.split_sizes else 0.0,
            launches=1 + len(p.columns) if p.split_sizes else 1,
        )

    def run(
        self, problem: MatmulProblem, schedule: InterpretSchedule, target: Target, /, *args: Any, **params: Any
    ) -> Arrays:
        p, s = problem, schedule
        args = tuple(x.reshape((p.batch, -1, x.shape[-1])) for x in args)
        a_axes = (1, 0) if p.transpose_a else (0, 1)
        b_axes = (1, 0) if p.transpose_b else (0, 1)
        rows, columns, steps = cdiv(p.m, s.tile_m), cdiv(p.n, s.tile_n), cdiv(p.k, s.tile_k)
        precision = p.lax_precision

        def body(*refs: Any) -> None:
            *operand_refs, out_ref, acc_ref = refs
            a_ref, b_ref, *added_refs = p.named(operand_refs)
            step = pl.program_id(3)

            @pl.when(step == 0)
            def _() -> None:
                acc_ref[...] = jnp.zeros_like(acc_ref)

            # Elements beyond the edge of k are undefined, not zero, and 0 * NaN is NaN: mask both operands.
            left = p.k - step * s.tile_k
            a_tile = masked(a_ref[...], axis=a_axes[1], extent=left)
            b_tile = masked(b_ref[...], axis=b_axes[0], extent=left)
            acc_ref[...] += lax.dot_general(
                a_tile,
                b_tile,
                (((a_axes[1],), (b_axes[0],)), ((), ())),
                precision=precision,
                preferred_element_type=p.acc_dtype,
            )

            @pl.when(step == steps - 1)
            def _() -> None:
                bias, residual = (None if ref is None else ref[...] for ref in added_refs)
                value = epilogue.apply(acc_ref[...], bias=bias, activation=p.activation, residual=residual)
                out_ref[...] = value.astype(out_ref.dtype)

        def tile(shape: tuple[int, int], axes: tuple[int, int], index: Any) -> pl.BlockSpec:
            def index_map(batch: Any, first: Any, second: Any, step: Any) -> tuple[Any, Any, Any]:
                row, column = (first, second) if s.minor == "n" else (second, first)
                block = index(row, column, step)
                return batch, block[axes[0]], block[axes[1]]

            return pl.BlockSpec((None, shape[axes[0]], shape[axes[1]]), index_map)

        result_tile = tile((s.tile_m, s.tile_n), (0, 1), lambda row, column, step: (row, column))
        outer, inner = (rows, columns) if s.minor == "n" else (columns, rows)
        c = pl.pallas_call(
            body,
            grid=(p.batch, outer, inner, steps),
            in_specs=[
                tile((s.tile_m, s.tile_k), a_axes, lambda row, column, step: (row, step)),
                tile((s.tile_k, s.tile_n), b_axes, lambda row, column, step: (step, column)),
                *([tile((1, s.tile_n), (0, 1), lambda row, column, step: (0, column))] if p.bias else []),
                *([result_tile] if p.residual else []),
            ],
            out_specs=result_tile,
            out_shape=jax.ShapeDtypeStruct((p.batch, p.m, p.n), p.whole.dtype),
            scratch_shapes=[pl.MemorySpace.ANY((s.tile_m, s.tile_n), p.acc_dtype)],
            interpret=True,
        )(*args)
        return p.cut(c.reshape(p.whole.shape))


def _itemsize(dtype: str) -> int:
    """Returns the bytes of an element, or 0 if there is no such operand."""
    return jnp.dtype(dtype).itemsize if dtype else 0


def tile_extents(extent: int) -> tuple[int, ...]:
    """Returns the powers of two from 16 to 512 up to the extent, and the extent itself if it is below 512."""
    return tuple(sorted({min(extent, tile) for tile in (16, 32, 64, 128, 256, 512)}))


def _steps_of_largest_tiles(p: MatmulProblem) -> int:
    return int(np.prod([cdiv(extent, tile_extents(extent)[-1]) for extent in (p.m, p.n, p.k)]))


def masked(tile: jax.Array, axis: int, extent: Any) -> jax.Array:
    """Zeros the elements of `tile` from index `extent` on along `axis`."""
    return jnp.where(lax.broadcasted_iota(jnp.int32, tile.shape, axis) < extent, tile, jnp.zeros_like(tile))
