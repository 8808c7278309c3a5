"""The Mosaic TPU kernel: multiplies a block of queries with blocks of keys, with an online softmax.

Logits are ``[keys, queries]``, with one query per lane. Maxima and sums over keys therefore combine registers, and
statistics scale logits and results without a broadcast along lanes. The result is accumulated as
``[columns, queries]`` and transposed once, at the end.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from search_spaces.attention.problem import Lengths
from search_spaces.flash_attention.problem import FlashAttentionProblem
from search_spaces.flash_attention.tpu.visibility import Visibility

# The value of a masked logit. It is finite, because the difference of two must not be NaN. A row that sees no key keeps
# it as its maximum. At the first visible logit of a row, the rescaling factor is 0 and discards the sum of masked ones.
UNSEEN = -0.7 * float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class Softmax:
    """Scaling of products to logits: ``factor * x``; x is the product, or ``tanh(inner * product)`` if capped."""

    factor: float
    inner: float | None = None

    @classmethod
    def of(cls, scale: float, softcap: float | None) -> Softmax:
        """Returns the scaling for a non-negative `scale`; maxima are taken before scaling."""
        return cls(scale) if softcap is None else cls(abs(softcap), scale / abs(softcap))

    def capped(self, products: jax.Array) -> jax.Array:
        return products if self.inner is None else jnp.tanh(products * self.inner)

    def exponential(self, difference: jax.Array) -> jax.Array:
        """Returns ``exp(factor * difference)``, for the difference of two x."""
        return jnp.exp2(difference * (self.factor * math.log2(math.e)))


def body(p: FlashAttentionProblem, v: Visibility, softmax: Softmax) -> Callable[..., None]:
    """Returns the kernel body.

    Its grid is (sequences, heads, blocks of queries, blocks of keys). Its references are lengths, operands, results and
    scratch, in this order.
    """
    rows, s = v.rows, v.s
    precision = lax.Precision.HIGHEST if p.dtype == "float32" else None

    def dot(a: jax.Array, b: jax.Array, contracted: tuple[int, int]) -> jax.Array:
        numbers = (((contracted[0],), (contracted[1],)), ((), ()))
        return lax.dot_general(a, b, numbers, precision=precision, preferred_element_type=jnp.float32)

    def kernel(*refs: Any) -> None:
        counts, refs = refs[: p.q_lengths + p.kv_lengths], refs[p.q_lengths + p.kv_lengths :]
        q_ref, k_ref, v_ref, out_ref, *lse_ref, most_ref, total_ref, sum_ref = refs
        b, i, j = (pl.program_id(axis) for axis in (0, 2, 3))
        of = p.counted(p.lengths([ref[b] for ref in counts]) if counts else Lengths())

        @pl.when(j == 0)
        def _() -> None:
            most_ref[...] = jnp.full_like(most_ref, UNSEEN)
            total_ref[...] = jnp.zeros_like(total_ref)
            sum_ref[...] = jnp.zeros_like(sum_ref)

        def step(n: Any, masked: bool, ends: bool) -> None:
            some = pl.ds(pl.multiple_of(n * s.block_kv_compute, s.block_kv_compute), s.block_kv_compute)
            first = j * s.block_kv + n * s.block_kv_compute
            x = softmax.capped(dot(k_ref[0, 0, some, :], q_ref[0, 0], (1, 1)))
            values = v_ref[0, 0, some, :]
            if masked:
                x = jnp.where(v.mask(i, first, of), x, UNSEEN)
                if ends:  # Values beyond the array or a length may be NaN, and 0 * NaN is NaN.
                    there = first + lax.broadcasted_iota(jnp.int32, values.shape, 0) < of.kv * rows.per_key
                    values = jnp.where(there, values.astype(jnp.float32), 0.0).astype(values.dtype)
            before = most_ref[...]
            most = jnp.maximum(before, x.max(axis=0, keepdims=True))
            e, rescale = softmax.exponential(x - most), softmax.exponential(before - most)
            most_ref[...] = most
            total_ref[...] = total_ref[...] * rescale + e.sum(axis=0, keepdims=True)
            sum_ref[...] = sum_ref[...] * rescale + dot(values, e.astype(values.dtype), (0, 0))

        def loop(first: Any, end: Any, masked: bool) -> None:
            def guarded(n: Any, _: None) -> None:
                if not p.kv_lengths:
                    step(n, masked, v.ragged or p.pads_keys)
                    return
                end, here = of.kv * rows.per_key, j * s.block_kv + n * s.block_kv_compute
                whole = here + s.block_kv_compute <= end
                pl.when(whole)(lambda: step(n, masked, False))
                # Only the body for a sequence's last block masks values.
                pl.when((here < end) & jnp.logical_not(whole))(lambda: step(n, masked, True))

            if isinstance(end, int) and end == 1:
                guarded(0, None)
            else:
                lax.fori_loop(first, end, guarded, None)

        def loops() -> None:
            for first, end, masked in v.loops(i, j):
                loop(first, end, masked)

        if not p.q_lengths:
            loops()
        else:
            pl.when(v.first_query(i) < of.q)(loops)

        @pl.when(j == pl.num_programs(3) - 1)
        def _() -> None:
            most, total = most_ref[...], total_ref[...]
            # NaN logits must give NaN results, even if the maximum ignores NaN.
            nothing = (most == UNSEEN) & jnp.logical_not(jnp.isnan(total))
            if not p.every_query_sees:
                row = i * s.block_q + lax.broadcasted_iota(jnp.int32, most.shape, 1)
                nothing |= row >= of.q * rows.per_query
            total = jnp.where(nothing, 1.0, total)
            out = jnp.where(nothing, 0.0, sum_ref[...] / total)
            out_ref[0, 0] = out.T.astype(out_ref.dtype)
            for ref in lse_ref:
                ref[0, 0] = jnp.where(nothing, -jnp.inf, most * softmax.factor + jnp.log(total))

    return kernel
