"""The blocks of keys that a block of queries sees, and the visible pairs within a block."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces.attention.problem import Lengths
from search_spaces.flash_attention.tpu.rows import Rows, quotient
from search_spaces.flash_attention.tpu.schedule import TpuFlashAttentionSchedule


@dataclasses.dataclass(frozen=True)
class Visibility:
    """Visibility of keys in one launch.

    Keys are counted in rows of the arrays of keys. `i` is the index of a block of rows of queries, `j` of keys.
    """

    rows: Rows
    s: TpuFlashAttentionSchedule

    @property
    def masked_everywhere(self) -> bool:
        """Whether each block must be masked, because it has keys of other heads or its end is an operand."""
        return self.rows.per_key > 1 or self.rows.p.kv_lengths

    @property
    def ragged(self) -> bool:
        """Whether the last block of keys reaches beyond the array, where values are undefined."""
        return self.rows.kv_rows % self.s.block_kv_compute != 0

    def first_query(self, i: Any) -> Any:
        return quotient(i * self.s.block_q, self.rows.per_query)

    def last_query(self, i: Any) -> Any:
        return jnp.minimum(quotient((i + 1) * self.s.block_q - 1, self.rows.per_query), self.rows.p.q_len - 1)

    def seen(self, i: Any) -> tuple[Any, Any]:
        """Returns the first row and the end of the rows of keys that any query of the block sees."""
        p, per_key = self.rows.p, self.rows.per_key
        first: Any = 0 if p.left is None else jnp.clip(self.first_query(i) - p.left, 0, p.kv_len) * per_key
        end: Any = p.kv_len if p.right is None else jnp.minimum(self.last_query(i) + p.right + 1, p.kv_len)
        return first, end * per_key

    def seen_by_all(self, i: Any) -> tuple[Any, Any]:
        """Returns the first row and the end of the rows of keys that every query of the block sees."""
        p, per_key = self.rows.p, self.rows.per_key
        first: Any = 0 if p.left is None else jnp.clip(self.last_query(i) - p.left, 0, p.kv_len) * per_key
        end: Any = p.kv_len if p.right is None else jnp.minimum(self.first_query(i) + p.right + 1, p.kv_len)
        return first, end * per_key

    def loops(self, i: Any, j: Any) -> list[tuple[Any, Any, bool]]:
        """Returns the loops over the products of block `j` of keys: first product, end, and whether they are masked.

        The bounds use only products, shifts, minima and maxima of grid indices. If a bound contains another operation
        or an operand, the compiler's cycle estimate assumes that the loop hardly runs.
        """
        p, s = self.rows.p, self.s
        size = s.block_kv_compute
        count, here = s.block_kv // size, j * (s.block_kv // size)

        def within(n: Any) -> Any:
            return jnp.clip(n - here, 0, count)

        first, end = self.seen(i)
        start, stop = within(quotient(first, size)), within(quotient(end + size - 1, size))
        if self.masked_everywhere:
            return [(start, stop, True)]
        if p.left is None and p.right is None and not self.ragged:
            whole = self.rows.kv_rows % s.block_kv == 0
            return [(0, count, False) if whole else (start, stop, False)]
        first, end = self.seen_by_all(i)
        from_all = jnp.clip(within(quotient(first + size - 1, size)), start, stop)
        to_all = jnp.clip(within(quotient(end, size)), from_all, stop)
        before = [] if p.left is None else [(start, from_all, True)]
        return [*before, (from_all, to_all, False), (to_all, stop, True)]

    def block_to_load(self, i: Any, j: Any, kv_length: Any) -> Any:
        """Returns `j`, or the nearest visible block if block `j` is not visible.

        A repeated index does not load the block again.
        """
        p, s = self.rows.p, self.s
        first, end = self.seen(i)
        if kv_length is not None:
            end = jnp.minimum(end, kv_length * self.rows.per_key)
        if p.left is None and p.right is None and kv_length is None:
            return j
        last = quotient(jnp.maximum(end - 1, 0), s.block_kv)
        return jnp.clip(j, jnp.minimum(quotient(first, s.block_kv), last), last)

    def mask(self, i: Any, c: Any, of: Lengths) -> jax.Array:
        """Returns the mask ``bool[block_kv_compute, block_q]`` of the rows of keys from `c` on.

        Bounds on keys are multiplied by `per_key`, and bounds on queries by `per_query`, to compare them with rows.
        """
        p, rows, s = self.rows.p, self.rows, self.s
        end = p.kv_len if of.kv is None else of.kv
        end = (jnp.minimum(end, p.right + 1) if p.right is not None and p.q_len == 1 else end) * rows.per_key
        key = c + lax.broadcasted_iota(jnp.int32, (s.block_kv_compute, 1), 0)
        row = i * s.block_q + lax.broadcasted_iota(jnp.int32, (1, s.block_q), 1)
        shape = (s.block_kv_compute, s.block_q)
        if rows.per_key > 1:
            query = _few(row, rows.per_query, p.q_len)
            head = _few(row - query * rows.per_query, p.group, p.kv_heads)
            # Keys beyond the end get head -1: this test runs once per key instead of once per pair.
            seen = jnp.where(key < end, key & (rows.per_key - 1), -1) == head
            if p.right is not None and p.q_len > 1:
                seen &= key < (query + p.right + 1) * rows.per_key
            if p.left is not None:
                seen &= key >= (query - p.left) * rows.per_key
            return seen
        if p.right is None or p.q_len == 1:
            seen = jnp.broadcast_to(key < end, shape)
        else:  # Keys beyond the end get a bound that no row reaches.
            beyond = jnp.iinfo(jnp.int32).max
            seen = jnp.where(key < end, (key - p.right) * rows.per_query, beyond) <= row
        if p.left is not None:
            seen &= row < (key + p.left + 1) * rows.per_query
        return seen


def _few(x: jax.Array, n: int, most: int) -> jax.Array:
    """Returns ``x // n``, if this is less than `most`."""
    if n & (n - 1) == 0:
        return x >> (n.bit_length() - 1)
    return sum(((x >= times * n).astype(jnp.int32) for times in range(1, most)), jnp.zeros_like(x))
