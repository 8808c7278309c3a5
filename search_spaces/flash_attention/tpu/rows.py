"""Layout of queries and keys in the arrays of a launch: rows of one head, of a group of heads, or of all heads."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from search_spaces.flash_attention.problem import FlashAttentionProblem
from search_spaces.tpu.vmem import SUBLANES


@dataclasses.dataclass(frozen=True)
class Rows:
    """Arrays ``[batch, heads, rows, columns]``, for one schedule or for columns of schedules.

    Row r of queries is query ``r // per_query`` of one of `per_query` heads. Row c of keys is key ``c // per_key``.
    Attributes are integers, or arrays with one integer per schedule.
    """

    p: FlashAttentionProblem
    heads: Any
    per_query: Any
    per_key: Any

    @classmethod
    def of(cls, p: FlashAttentionProblem, heads: Any) -> Rows:
        """Returns the layout for the field `heads` of a schedule, or for a column of it."""

        def by_heads(one: int, group: int, every: int) -> Any:
            return np.where(np.equal(heads, "one"), one, np.where(np.equal(heads, "group"), group, every))

        return cls(p, by_heads(p.heads, p.kv_heads, 1), by_heads(1, p.group, p.heads), by_heads(1, 1, p.kv_heads))

    def one(self) -> Rows:
        """Returns the layout of one schedule with Python integers."""
        return Rows(self.p, int(self.heads), int(self.per_query), int(self.per_key))

    @property
    def kv_heads(self) -> Any:
        """Number of heads in the arrays of keys and values."""
        return np.minimum(self.heads, self.p.kv_heads)

    @property
    def q_rows(self) -> Any:
        return self.p.q_len * self.per_query

    @property
    def kv_rows(self) -> Any:
        return self.p.kv_len * self.per_key

    def kv_head(self, head: Any) -> Any:
        """Returns the head in the array of keys for `head` in the array of queries."""
        return quotient(head, self.heads // int(self.kv_heads))

    def queries(self, q: jax.Array) -> jax.Array:
        """Converts ``[batch, q_len, heads, head_dim]`` to rows, without a copy if all heads are packed."""
        p = self.p
        apart = q.reshape(p.batch, p.q_len, self.heads, self.per_query, p.head_dim)
        return _at_least_one_tile(apart.transpose(0, 2, 1, 3, 4).reshape(p.batch, self.heads, self.q_rows, p.head_dim))

    def keys(self, x: jax.Array) -> jax.Array:
        """Converts ``[batch, kv_len, kv_heads, columns]`` to rows."""
        p = self.p
        apart = x.reshape(p.batch, p.kv_len, int(self.kv_heads), self.per_key, x.shape[-1])
        there = apart.transpose(0, 2, 1, 3, 4).reshape(p.batch, int(self.kv_heads), self.kv_rows, x.shape[-1])
        return _at_least_one_tile(there)

    def results(self, out: jax.Array) -> jax.Array:
        """Converts rows of the result to ``[batch, q_len, heads, value_dim]``."""
        p = self.p
        there = out[:, :, : self.q_rows]
        apart = there.reshape(p.batch, self.heads, p.q_len, self.per_query, p.value_dim)
        return apart.transpose(0, 2, 1, 3, 4).reshape(p.batch, p.q_len, p.heads, p.value_dim)

    def statistics(self, lse: jax.Array) -> jax.Array:
        """Converts ``[batch, heads, 1, rows]`` to ``[batch, all heads, q_len]``."""
        p = self.p
        apart = lse[..., : self.q_rows].reshape(p.batch, self.heads, p.q_len, self.per_query)
        return apart.transpose(0, 1, 3, 2).reshape(p.batch, p.heads, p.q_len)


def _at_least_one_tile(x: jax.Array) -> jax.Array:
    """Pads to at least eight rows with zeros; the compiler shuffles smaller blocks through additional VMEM."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, max(0, SUBLANES - x.shape[2])), (0, 0)))


def quotient(x: Any, n: int) -> Any:
    """Returns ``x // n`` for non-negative x.

    Pallas lowers floor division with the sign function, and that lowering queries the chip's name. Division by a power
    of two is a shift, because the compiler's cycle estimate evaluates shifts but not divisions.
    """
    return x >> (n.bit_length() - 1) if n & (n - 1) == 0 else lax.div(x, n)
