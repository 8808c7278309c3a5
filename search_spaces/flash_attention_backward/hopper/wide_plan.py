"""Extents of the backward pass of wide heads, in which two consumers share the columns of dk and dv."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from search_spaces.flash_attention_backward.hopper.plan import CONSUMERS, Plan
from search_spaces.flash_attention_backward.problem import FlashAttentionBackwardProblem
from search_spaces.hopper.limits import ACCUMULATOR_BYTES, BARRIER_BYTES, SMEM_ALIGNMENT, WGMMA_ROWS
from search_spaces.space import round_up

# Maximum columns for which 64 rows of dk and dv fit into the registers of one consumer.
MOST_NARROW = 128
HEAD_DIMS = (64, 128, 192, 256)
BLOCK_KV = WGMMA_ROWS
BLOCK_Q = WGMMA_ROWS  # The rows of dq are the rows of wgmma.
# Maximum columns of dq per product of a consumer. More would leave too few registers for the concurrent products.
MOST_DQ_COLUMNS = 96


def is_wide(p: FlashAttentionBackwardProblem) -> bool:
    return max(p.head_dim, p.value_dim) > MOST_NARROW


def refusal(p: FlashAttentionBackwardProblem) -> str | None:
    """Returns why a problem of wide heads is not supported, or None."""
    if p.deterministic:
        return "adds dq of wide heads up in the order of arrival, which differs from run to run"
    for name, columns in (("head_dim", p.head_dim), ("head_dim_v", p.value_dim)):
        if columns not in HEAD_DIMS:
            return f"halves whole tiles of columns: {name}={columns} is not one of {', '.join(map(str, HEAD_DIMS))}"
    return None


def plan_of(p: FlashAttentionBackwardProblem, schedule: Any) -> Plan:
    return WidePlan(p, schedule) if is_wide(p) else Plan(p, schedule)


@dataclasses.dataclass(frozen=True)
class WidePlan(Plan):
    """Extents for wide heads: a CTA owns 64 rows of k and v.

    A consumer computes S and dP for half of the queries, and half of the columns of the gradients. dq is staged in SMEM
    a few columns at a time.
    """

    @property
    def block_kv(self) -> int:
        return BLOCK_KV

    @property
    def own_queries(self) -> int:
        """Queries per step whose S and dP a consumer computes."""
        return BLOCK_Q // CONSUMERS

    @property
    def own_columns(self) -> tuple[int, int]:
        """Columns of dk and dq, and of dv, that a consumer computes."""
        return self.problem.head_dim // CONSUMERS, self.problem.value_dim // CONSUMERS

    @property
    def dq_columns(self) -> int:
        """Columns of dq per product of a consumer."""
        own, _ = self.own_columns
        return own if own <= MOST_DQ_COLUMNS else own // 2

    @property
    def by_rows(self) -> Any:
        return False

    @property
    def transposed(self) -> Any:
        return False

    @property
    def dq_shape(self) -> tuple[int, int]:
        return BLOCK_Q, self.dq_columns

    @property
    def k_swizzle(self) -> int:
        return int(np.gcd(self.dq_columns * self.itemsize, 128))

    @property
    def v_swizzle(self) -> int:
        return int(np.gcd(self.own_columns[1] * self.itemsize, 128))

    @property
    def ds_swizzle(self) -> int:
        """Bytes of a swizzled row of P^T and dS^T; a consumer writes whole rows."""
        return int(np.gcd(self.own_queries * self.itemsize, 128))

    @property
    def onchip_bytes(self) -> Any:
        p, s, b = self.problem, self.schedule, self.itemsize
        arrays = (
            BLOCK_KV * p.head_dim * b,
            BLOCK_KV * p.value_dim * b,
            s.q_stages * s.block_q * p.head_dim * b,
            s.do_stages * s.block_q * p.value_dim * b,
            s.q_stages * self.statistics_width * ACCUMULATOR_BYTES,
            s.do_stages * self.statistics_width * ACCUMULATOR_BYTES,
            s.ds_stages * BLOCK_KV * s.block_q * b,  # P^T
            s.ds_stages * BLOCK_KV * s.block_q * b,  # dS^T
            CONSUMERS * BLOCK_Q * self.dq_columns * ACCUMULATOR_BYTES,
        )
        barriers = 1 + 2 * s.q_stages + 2 * s.do_stages
        return sum(round_up(size, SMEM_ALIGNMENT) for size in arrays) + barriers * BARRIER_BYTES
