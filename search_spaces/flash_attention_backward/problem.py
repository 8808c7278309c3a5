"""The flash attention backward problem: operands, inputs, reference and tolerance, independent of the kernel."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from search_spaces import checking
from search_spaces.attention import problem
from search_spaces.attention.problem import AttentionProblem
from search_spaces.attention.xla import attention
from search_spaces.front_end import in_front
from search_spaces.problem import Arrays, Problem, Tolerance
from search_spaces.sharding import Sharding


@dataclasses.dataclass(frozen=True)
class FlashAttentionBackwardProblem(AttentionProblem):
    """The gradients of ``softmax(q k^T * scale, where visible) v`` in q, k and v; see `AttentionProblem`.

    Operands are q, k, v, the result and the log-sum-exp of the forward pass, the cotangent of the result, the cotangent
    of the log-sum-exp if `lse_cotangent` is set, and the lengths. The log-sum-exp is the natural logarithm of scaled
    logits, and -inf for queries that see no key.

    Attributes:
      lse_cotangent: whether the log-sum-exp has a cotangent.
      deterministic: whether every run must return the same bits.
    """

    lse_cotangent: bool = False
    deterministic: bool = False

    @classmethod
    def of(
        cls, q: Any, k: Any, v: Any, out: Any, lse: Any, d_out: Any, *rest: Any, **fields: Any
    ) -> FlashAttentionBackwardProblem:
        """Returns the problem of these operands, given in the order of `operands`.

        Args:
          fields: the fields that shapes do not determine.

        Raises:
          ValueError: if the shape or dtype of an operand does not match.
        """
        (batch, q_len, heads, head_dim), (_, kv_len, kv_heads, _) = q.shape, k.shape
        p = cls(
            batch=batch,
            q_len=q_len,
            kv_len=kv_len,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            head_dim_v=v.shape[-1],
            dtype=str(q.dtype),
            **fields,
        )
        for name, wanted, x in zip(p.names, p.operands(), (q, k, v, out, lse, d_out, *rest), strict=True):
            if x.shape != wanted.shape or x.dtype != wanted.dtype:
                raise ValueError(f"{name} is {x.dtype}{list(x.shape)}, not {wanted.dtype}{list(wanted.shape)}")
        return p

    @classmethod
    def of_forward(cls, p: AttentionProblem, **fields: Any) -> FlashAttentionBackwardProblem:
        """Returns the problem of the gradients of a forward pass.

        Args:
          fields: the fields that the forward pass does not have.
        """
        shared = {field.name: getattr(p, field.name) for field in dataclasses.fields(AttentionProblem)}
        return cls(**shared, **fields)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the operands, in the order of `operands`."""
        rest = {name: getattr(self, name) for name in ("lse_cotangent", "q_lengths", "kv_lengths")}
        return "q", "k", "v", "out", "lse", "d_out", *(name for name, given in rest.items() if given)

    def operands(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        cotangents = (self.out(), *((self.lse(),) if self.lse_cotangent else ()))
        return *self.qkv(), self.out(), self.lse(), *cotangents, *self.length_operands()

    def result(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns the structs of dq, dk and dv, which are those of q, k and v."""
        return self.qkv()

    def reference(self, *args: jax.Array) -> Arrays:
        q, k, v, _, _, d_out, *rest = args
        lengths = rest[self.lse_cotangent :]
        (_, lse), vjp = jax.vjp(
            lambda *qkv: attention(self, *qkv, *lengths), *(x.astype(jnp.float32) for x in (q, k, v))
        )
        d_lse = rest[0] if self.lse_cotangent else jnp.zeros_like(lse)
        gradients: tuple[jax.Array, ...] = vjp((d_out.astype(jnp.float32), d_lse))
        return gradients

    def inputs(self, seed: int) -> tuple[jax.Array, ...]:
        """Returns standard normal operands, lengths from 1 to the full length, and their forward results."""
        plain = dataclasses.replace(self, q_lengths=False, kv_lengths=False)
        q, k, v, _, _, *cotangents = Problem.inputs(plain, seed)
        return self._after_forward((q, k, v), cotangents, self.random_lengths(seed))

    def special_inputs(self, kind: str, seed: int) -> tuple[jax.Array, ...]:
        """Returns inputs for `kind`; for "large", only the common part of the logits is large.

        With large values, gradients would be differences of rounding errors.
        """
        q, k, v, _, _, *rest = self.inputs(seed)
        cotangents, lengths = rest[: 1 + self.lse_cotangent], rest[1 + self.lse_cotangent :]
        if kind == "large":
            return self._after_forward((*self.with_common_logit(q, k), v), cotangents, lengths)
        qkv = self.special_qkv(kind, (q, k, v))
        return self._after_forward(qkv, checking.with_special_values(cotangents, kind), lengths)

    def special_tolerance(self, kind: str) -> tuple[Tolerance, ...]:
        """Scales `tolerance` by the size of the terms of a gradient for "large" and "halves", as terms may cancel.

        A gradient is a sum of terms p (dp - delta) times keys or queries; dp and delta are products of values and
        cotangents. For "halves", multiples of 1/2 have a standard deviation of 2.5. For "large", keys contain the
        common part of the logits.
        """
        of_terms = {"large": 2.0**self.common_power, "halves": 2.5**2}
        if kind not in of_terms:
            return super().special_tolerance(kind)
        return tuple(dataclasses.replace(one, scale=(of_terms[kind], math.inf)) for one in self.tolerance())

    def _after_forward(
        self, qkv: Sequence[jax.Array], cotangents: Sequence[jax.Array], lengths: Sequence[jax.Array]
    ) -> tuple[jax.Array, ...]:
        """Returns all operands, with the forward results of `qkv`."""
        out, lse = checking.run_program(_forward, *qkv, *lengths, problem=self)
        return *qkv, out, lse, *cotangents, *lengths

    @property
    def flops(self) -> float:
        """FLOPs of five products, as in FlashAttention; recomputation is not counted."""
        pairs = self.batch * self.heads * self.pair_share * self.visible_pairs
        return 2.0 * pairs * (3 * self.head_dim + 2 * self.value_dim)

    @property
    def library_bytes_moved(self) -> float:
        """Bytes moved by the forward pass, plus the same traffic for the gradients of logits."""
        return 2.0 * super().library_bytes_moved - self.bytes_moved

    def tolerance(self) -> tuple[Tolerance, ...]:
        """Allows for rounding of the results, and of probabilities and their cotangents before they are multiplied.

        A gradient of keys or values is a sum of terms p d_out and ds q over queries and the heads of a group. Each term
        has a relative error of eps. A term is up to about 4 x 4 if p is close to 1, as in the first rows of a causal
        mask.
        """
        eps = float(jnp.finfo(self.dtype).eps) if self.dtype != "float32" else 2.0**-10
        return (Tolerance(absolute=4 * eps, relative=2 * eps),) * 3


@functools.partial(jax.jit, static_argnames="problem")
def _forward(*args: jax.Array, problem: FlashAttentionBackwardProblem) -> tuple[jax.Array, jax.Array]:
    out, lse = attention(problem, *args)
    return out.astype(problem.dtype), lse


# ------------------------------------------------------------------------------
# Batching and sharding rules of the attention gradients: batched over sequences, sharded over sequences and heads.


def batch(call: Callable[..., Any], p: FlashAttentionBackwardProblem, args: Any, dims: Any) -> tuple[Any, int]:
    """Batches a call by adding sequences; operands without a batch axis are repeated, as gradients are per element."""
    size = next(x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None)
    many = dataclasses.replace(p, batch=size * p.batch)
    return call(many, *(in_front(x, dim, size) for x, dim in zip(args, dims, strict=True))), 0


def shard(p: FlashAttentionBackwardProblem) -> Sharding[FlashAttentionBackwardProblem]:
    """Returns the sharding rule.

    If the heads of a group are sharded, gradients of keys and values are summed over devices in their own dtype.
    """
    cotangents = ["out", *["lse"] * p.lse_cotangent, *["lengths"] * len(p.length_operands())]
    return problem.sharding_by_heads(p, ["q", "k", "v", "out", "lse", *cotangents], ["q", "k", "v"])
