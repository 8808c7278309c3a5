"""The flash attention problem: operands, inputs, reference and tolerance, independent of the kernel."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from search_spaces.attention.problem import AttentionProblem
from search_spaces.attention.xla import attention
from search_spaces.problem import Arrays, Tolerance

# Tolerance of a log-sum-exp. Logits are float32 sums; a TF32 product of float32 operands has a relative error of 2^-11.
LSE_TOLERANCE = Tolerance(absolute=2.0**-8, relative=2.0**-12)


@dataclasses.dataclass(frozen=True)
class FlashAttentionProblem(AttentionProblem):
    """``softmax(q k^T * scale, where visible) v``; see `AttentionProblem`.

    Attributes:
      return_lse: whether the log-sum-exp, ``float32[batch, heads, q_len]``, is a second result.
    """

    return_lse: bool = False

    @classmethod
    def of(cls, q: Any, k: Any, v: Any, *lengths: Any, **fields: Any) -> FlashAttentionProblem:
        """Returns the problem of these operands, given in the order of `operands`.

        Args:
          fields: the fields that shapes do not determine. `q_lengths` and `kv_lengths` must match the arrays in
            `lengths`.

        Raises:
          TypeError: if the dtypes of q, k and v differ.
          ValueError: if the shapes do not match, or if lengths are missing, superfluous or not ``int32[batch]``.
        """
        if any(x.ndim != 4 for x in (q, k, v)):
            raise ValueError(f"q {q.shape}, k {k.shape} and v {v.shape} are not [batch, length, heads, head_dim]")
        if len({str(x.dtype) for x in (q, k, v)}) > 1:
            raise TypeError(f"q is {q.dtype}, k is {k.dtype} and v is {v.dtype}; one dtype is needed")
        (batch, q_len, heads, head_dim), (_, kv_len, kv_heads, _) = q.shape, k.shape
        if k.shape != (batch, kv_len, kv_heads, head_dim) or v.shape[:-1] != k.shape[:-1]:
            raise ValueError(f"k {k.shape} and v {v.shape} do not belong to q {q.shape}")
        if len(lengths) != int(fields.get("q_lengths", False)) + int(fields.get("kv_lengths", False)):
            raise ValueError(f"{len(lengths)} arrays of lengths, which q_lengths= and kv_lengths= must say")
        for x in lengths:
            if x.shape != (batch,) or x.dtype != jnp.int32:
                raise ValueError(f"lengths are int32[{batch}], not {x.dtype}{list(x.shape)}")
        return cls(
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

    def operands(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns q, k and v, followed by `q_lengths` and `kv_lengths` if the problem has them."""
        return *self.qkv(), *self.length_operands()

    def result(self) -> jax.ShapeDtypeStruct | tuple[jax.ShapeDtypeStruct, ...]:
        return (self.out(), self.lse()) if self.return_lse else self.out()

    def reference(self, *args: jax.Array) -> Arrays:
        out, lse = attention(self, *args)
        return (out, lse) if self.return_lse else out

    def inputs(self, seed: int) -> tuple[jax.Array, ...]:
        """Returns standard normal q, k and v, and lengths from 1 to the full length."""
        whole = dataclasses.replace(self, q_lengths=False, kv_lengths=False)
        return *super(FlashAttentionProblem, whole).inputs(seed), *self.random_lengths(seed)

    def special_inputs(self, kind: str, seed: int) -> tuple[jax.Array, ...]:
        q, k, v, *lengths = self.inputs(seed)
        return *self.special_qkv(kind, (q, k, v)), *lengths

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.heads * self.pair_share * self.visible_pairs * (self.head_dim + self.value_dim)

    def tolerance(self) -> Tolerance | tuple[Tolerance, ...]:
        """Allows for rounding of the result, and of probabilities to the result's dtype before the second product.

        The error of a probability p is up to p eps / 2. Values are standard normal, the largest about 4. The error of
        a query that sees few keys is that of its largest value; with many keys, errors average out.
        """
        eps = float(jnp.finfo(self.dtype).eps) if self.dtype != "float32" else 2.0**-10
        out = Tolerance(absolute=2 * eps, relative=eps)
        return (out, LSE_TOLERANCE) if self.return_lse else out
