"""The gated matmul of XLA: one or two products by cuBLAS, and a fusion; the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from search_spaces.gated_matmul.problem import GatedMatmulProblem
from search_spaces.kernel import Library, LibraryKernel
from search_spaces.matmul import epilogue
from search_spaces.problem import Tolerance
from search_spaces.target import Target


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
