"""Sharding of attention: by sequences and by heads; key heads stay with the query heads that use them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from search_spaces.attention.problem import AttentionProblem
from search_spaces.sharding import Sharding

P = TypeVar("P", bound=AttentionProblem)


def sharding(p: P, operands: Sequence[str], results: Sequence[str]) -> Sharding[Any]:
    """Returns the sharding for arrays by name: "q", "k", "v", "out", "lse", or "lengths", in order.

    Key head n belongs to the query heads from ``n group`` on. With more devices than key heads, each device has a part
    of a group, and the gradients of its keys are summed over these devices.
    """
    heads = "(kv_heads group)" if p.group > 1 and p.kv_heads > 1 else "group" if p.group > 1 else "kv_heads"
    letters = {
        "q": f"batch q_len {heads} head_dim",
        "k": "batch kv_len kv_heads head_dim",
        "v": "batch kv_len kv_heads value_dim",
        "out": f"batch q_len {heads} value_dim",
        "lse": f"batch {heads} q_len",
        "lengths": "batch",
    }
    arrays = (", ".join(letters[name] for name in names) for names in (operands, results))
    return Sharding(
        rule=" -> ".join(arrays),
        divided=("batch", "kv_heads"),
        summed=("group",) if p.group > 1 else (),
        local=_local,
    )


def _local(p: P, extents: Mapping[str, int]) -> P:
    kv_heads = extents["kv_heads"]
    return dataclasses.replace(p, batch=extents["batch"], kv_heads=kv_heads, heads=kv_heads * extents.get("group", 1))
