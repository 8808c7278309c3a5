"""A teaching kernel of flash attention in plain ``pallas_call``, run by the Pallas interpreter on a CPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from search_spaces.attention import interpret, left_out
from search_spaces.attention.interpret import InterpretedAttention, logits, one_head, padded, seen
from search_spaces.attention.problem import SOFTCAP
from search_spaces.flash_attention.problem import FlashAttentionProblem
from search_spaces.footprint import Footprint
from search_spaces.kernel import INDICES_OF_32_BITS, Kernel
from search_spaces.space import Columns, Space
from search_spaces.target import Target


class InterpretedFlashAttention(Kernel[FlashAttentionProblem, InterpretedAttention]):
    """Computes a block of queries of one head per grid step, over all keys, with a running maximum and sum."""

    backend = "interpret"
    version = 1
    most_elements = INDICES_OF_32_BITS

    def supports(self, problem: FlashAttentionProblem, target: Target) -> str | None:
        return interpret.refusal(target)

    def space(self, problem: FlashAttentionProblem, target: Target) -> Space[InterpretedAttention]:
        return interpret.space(problem)

    def footprint(self, problem: FlashAttentionProblem, schedules: Columns, target: Target) -> Footprint:
        return interpret.footprint(problem, schedules, products=2)

    def run(
        self,
        problem: FlashAttentionProblem,
        schedule: InterpretedAttention,
        target: Target,
        /,
        *args: Any,
        **params: Any,
    ) -> Any:
        p, s = problem, schedule
        scale, softcap = _params(p, **params)
        q, k, v, *lengths = args
        (v,) = left_out.keys(p, p.lengths(args), v)
        q, k, v = padded(q, 1, s.block_q), padded(k, 1, s.block_kv), padded(v, 1, s.block_kv)
        steps = k.shape[1] // s.block_kv

        def body(q_ref: Any, k_ref: Any, v_ref: Any, *refs: Any) -> None:
            *length_refs, out_ref, lse_ref = refs
            of, q, i = interpret.lengths(p, length_refs), q_ref[0, :, 0], pl.program_id(2)

            def step(j: Any, carry: Any) -> Any:
                most, total, out = carry
                columns = pl.ds(j * s.block_kv, s.block_kv)
                k, v = k_ref[0, columns, 0], v_ref[0, columns, 0]
                x = jnp.where(seen(p, s, i, j, of), logits(p, q, k, scale, softcap), -jnp.inf)
                new = jnp.maximum(most, x.max(axis=1))
                # The maximum is -inf until a key is seen, and -inf - -inf would be NaN.
                least = jnp.where(jnp.isfinite(new), new, 0.0)
                e, rescale = jnp.exp(x - least[:, None]), jnp.exp(most - least)
                product = interpret.dot(e.astype(v.dtype), v, (1, 0))
                return new, total * rescale + e.sum(axis=1), out * rescale[:, None] + product

            start = (
                jnp.full(s.block_q, -jnp.inf),
                jnp.zeros(s.block_q),
                jnp.zeros((s.block_q, p.value_dim)),
            )
            most, total, out = lax.fori_loop(0, steps, step, jax.tree.map(jnp.float32, start))
            sees = total != 0  # true for NaN, so that NaN logits give NaN results
            total = jnp.where(sees, total, 1.0)
            out_ref[0, :, 0] = jnp.where(sees[:, None], out / total[:, None], 0.0).astype(out_ref.dtype)
            lse_ref[0, 0] = jnp.where(sees, most + jnp.log(total), -jnp.inf)

        out = jax.ShapeDtypeStruct((p.batch, q.shape[1], p.heads, p.value_dim), q.dtype)
        lse = jax.ShapeDtypeStruct((p.batch, p.heads, q.shape[1]), jnp.float32)
        results = pl.pallas_call(
            body,
            grid=(p.batch, p.heads, q.shape[1] // s.block_q),
            in_specs=[
                one_head(q, s.block_q, lambda n: n),
                *(one_head(x, None, lambda n: n // p.group) for x in (k, v)),
                *(pl.BlockSpec((1,), lambda b, n, i: (b,)) for _ in lengths),
            ],
            out_specs=(
                one_head(out, s.block_q, lambda n: n),
                pl.BlockSpec((1, 1, s.block_q), lambda b, n, i: (b, n, i)),
            ),
            out_shape=(out, lse),
            interpret=True,
        )(q, k, v, *lengths)
        whole = results[0][:, : p.q_len], results[1][..., : p.q_len]
        return whole if p.return_lse else whole[0]


def _params(p: FlashAttentionProblem, scale: float | None = None, softcap: float = SOFTCAP) -> tuple[float, float]:
    return p.default_scale() if scale is None else scale, softcap
