"""The gated matmul by XLA, and by Pallas's interpreter on a CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from search_spaces.footprint import Footprint, Operand, Phase
from search_spaces.gated_matmul.problem import GatedMatmulProblem
from search_spaces.kernel import INDICES_OF_32_BITS, Kernel, Library, LibraryKernel
from search_spaces.matmul import epilogue
from search_spaces.matmul.epilogue import EXPONENTIALS
from search_spaces.matmul.interpret import masked, tile_extents
from search_spaces.problem import Tolerance
from search_spaces.space import Columns, Space, cdiv
from search_spaces.target import Target, not_interpreted


class XlaGatedMatmul(LibraryKernel[GatedMatmulProblem]):
    """A gated matmul in float32, or as users write it, rounded at each step."""

    version = 1

    def programs(self, problem: GatedMatmulProblem) -> tuple[str, ...]:
        return (Library.program, "plain")

    def tolerance(self, problem: GatedMatmulProblem, schedule: Library) -> Tolerance:
        """Widens the tolerance for the program that users write, which rounds at each step: it is their alternative.

        Both factors are rounded several times, and so is an activation's argument, which may reach 6 standard
        deviations.
        """
        exact = problem.tolerance()
        if schedule.program != "plain":
            return exact
        return Tolerance(absolute=exact.absolute + 36 * exact.relative, relative=8 * exact.relative)

    def run(
        self, problem: GatedMatmulProblem, schedule: Library, target: Target, /, *args: Any, **params: Any
    ) -> jax.Array:
        p, (x, weights, biases) = problem, problem.named(args)
        plain = schedule.program == "plain"
        products = [p.product(x, w) for w in weights]
        if plain:
            products = [acc.astype(p.dtype) for acc in products]
        if not p.pair:  # One product, of both halves.
            (both,), biases = products, p.apart(args).biases
            products = [both[:, : p.n], both[:, p.n :]]
        return (_plain(p, products, biases) if plain else p.gated(products, biases)).astype(p.result().dtype)


def _plain(p: GatedMatmulProblem, products: Sequence[jax.Array], biases: Sequence[jax.Array]) -> jax.Array:
    gate, up = (acc if b is None else acc + b for acc, b in zip(products, biases or (None, None), strict=True))
    result: jax.Array = getattr(jax.nn, p.activation)(gate) * up
    return result


def formula(x: Any, weights: Sequence[Any], biases: Sequence[Any], *, transpose_w: bool, activation: str) -> jax.Array:
    """Computes the gated matmul for operands that no problem describes; a pair is not joined.

    Accumulators are in float32 or wider; the result, rounded once, has the dtype of `jnp.matmul`.

    Raises:
      TypeError, ValueError: as `jnp.matmul`; also for an unknown activation, integer, 8-bit or complex operands, or a
        complex bias.
    """
    if activation not in epilogue.ACTIVATIONS:
        raise ValueError(f"activation={activation!r} is not one of {', '.join(epilogue.ACTIVATIONS)}")
    pair = len(weights) == 2
    out = jnp.result_type(x, *weights)
    if not jnp.issubdtype(out, jnp.floating) or out.itemsize == 1:
        raise TypeError(
            f"products of {out} take no activation: give x and w as real numbers of 16 bits or more (.astype), or take "
            "tuned_matmul, and scale its result first"
        )
    for bias in biases:
        if jnp.issubdtype(dtype := jnp.result_type(bias), jnp.complexfloating):
            raise TypeError(f"a bias is {dtype}, which a result of {out} cannot hold")
    wide = jnp.promote_types(out, jnp.float32)
    turned = [jnp.swapaxes(w, -1, -2) if transpose_w else w for w in weights]
    products = [jnp.matmul(x, w, preferred_element_type=wide) for w in turned]
    added = [acc if b is None else acc + b for acc, b in zip(products, biases or [None] * len(products), strict=True)]
    if not pair:
        added = jnp.split(added[0], 2, axis=-1)
    gate, up = added
    result: jax.Array = (epilogue.apply(gate, activation=activation) * up).astype(out)
    return result


# ------------------------------------------------------------------------------
# A tiled gated matmul in plain ``pallas_call``: the teaching kernel, run by the interpreter on a CPU.


@dataclasses.dataclass(frozen=True)
class InterpretGatedSchedule:
    """Tile extents of the result and of k. Consecutive tiles lie along n."""

    tile_m: int
    tile_n: int
    tile_k: int


class InterpretGatedMatmul(Kernel[GatedMatmulProblem, InterpretGatedSchedule]):
    backend = "interpret"
    version = 1
    most_elements = INDICES_OF_32_BITS

    def supports(self, problem: GatedMatmulProblem, target: Target) -> str | None:
        return not_interpreted(target)

    def space(self, problem: GatedMatmulProblem, target: Target) -> Space[InterpretGatedSchedule]:
        p = problem
        largest = cdiv(p.m, 512) * cdiv(p.n, 512) * cdiv(p.k, 512)
        return Space(
            InterpretGatedSchedule,
            choices={"tile_m": tile_extents(p.m), "tile_n": tile_extents(p.n), "tile_k": tile_extents(p.k)},
            rules={
                # An interpreted grid step costs about a millisecond whatever it computes.
                "at most 4096 grid steps": lambda s: (
                    cdiv(p.m, s.tile_m) * cdiv(p.n, s.tile_n) * cdiv(p.k, s.tile_k) <= max(4096, largest)
                ),
            },
        )

    def footprint(self, problem: GatedMatmulProblem, schedules: Columns, target: Target) -> Footprint:
        p, s = problem, schedules
        itemsize, bias_itemsize = jnp.dtype(p.dtype).itemsize, jnp.dtype(p.bias).itemsize if p.bias else 0
        rows, columns, steps = cdiv(p.m, s.tile_m), cdiv(p.n, s.tile_n), cdiv(p.k, s.tile_k)
        weights = (p.k / steps) * (p.n / columns) * itemsize
        result = s.tile_m * s.tile_n
        return Footprint(
            arithmetic=p.arithmetic,
            grid=(rows, columns),
            step=Phase(
                loads=(
                    Operand(bytes=(p.m / rows) * (p.k / steps) * itemsize, axes=(0,), name="x"),
                    Operand(bytes=weights, axes=(1,), name="gate"),
                    Operand(bytes=weights, axes=(1,), name="up"),
                ),
                flops=4.0 * result * s.tile_k,
            ),
            tile=Phase(
                loads=(Operand(bytes=2 * p.n / columns * bias_itemsize, axes=(1,), name="bias"),) if p.bias else (),
                mufu_ops=result * EXPONENTIALS[p.activation],
                bytes_written=(p.m / rows) * (p.n / columns) * itemsize,
            ),
            onchip_bytes=(s.tile_m + 2 * s.tile_n) * s.tile_k * itemsize
            + 2 * s.tile_n * bias_itemsize
            + result * (8 + itemsize),
            steps=steps,
            minor=1,
            group=columns,
            axes=("m", "n"),
        )

    def run(
        self,
        problem: GatedMatmulProblem,
        schedule: InterpretGatedSchedule,
        target: Target,
        /,
        *args: Any,
        **params: Any,
    ) -> jax.Array:
        p, s = problem, schedule
        x, weights, biases = p.apart(args)
        grid = cdiv(p.m, s.tile_m), cdiv(p.n, s.tile_n), cdiv(p.k, s.tile_k)
        w_axis = 1 if p.transpose_w else 0  # axis of k

        def body(x_ref: Any, *refs: Any) -> None:
            weight_refs, bias_refs, (out_ref, *acc_refs) = refs[:2], refs[2:-3], refs[-3:]
            step = pl.program_id(2)
            # Elements beyond the edge of k are undefined, not zero, and 0 * NaN is NaN: mask both operands.
            left = p.k - step * s.tile_k
            x_tile = masked(x_ref[...], axis=1, extent=left)
            for w_ref, acc_ref in zip(weight_refs, acc_refs, strict=True):

                @pl.when(step == 0)
                def _(acc_ref: Any = acc_ref) -> None:
                    acc_ref[...] = jnp.zeros_like(acc_ref)

                acc_ref[...] += p.product(x_tile, masked(w_ref[...], axis=w_axis, extent=left))

            @pl.when(step == grid[2] - 1)
            def _() -> None:
                value = p.gated([acc[...] for acc in acc_refs], [bias[...] for bias in bias_refs])
                out_ref[...] = value.astype(out_ref.dtype)

        if p.transpose_w:
            weight = pl.BlockSpec((s.tile_n, s.tile_k), lambda row, column, step: (column, step))
        else:
            weight = pl.BlockSpec((s.tile_k, s.tile_n), lambda row, column, step: (step, column))
        bias = pl.BlockSpec((1, s.tile_n), lambda row, column, step: (0, column))
        out: jax.Array = pl.pallas_call(
            body,
            grid=grid,
            in_specs=[
                pl.BlockSpec((s.tile_m, s.tile_k), lambda row, column, step: (row, step)),
                weight,
                weight,
                *[bias] * len(biases),
            ],
            out_specs=pl.BlockSpec((s.tile_m, s.tile_n), lambda row, column, step: (row, column)),
            out_shape=p.result(),
            scratch_shapes=[pl.MemorySpace.ANY((s.tile_m, s.tile_n), jnp.float32)] * 2,
            interpret=True,
        )(x, *weights, *(b[None] for b in biases))
        return out
