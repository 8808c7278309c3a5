"""Decode: few queries on many keys, which split_kv divides over CTAs. To be written."""

from __future__ import annotations

from typing import Any


def run(*args: Any, **params: Any) -> Any:
    raise NotImplementedError("flash attention with pack_gqa or split_kv > 1 is not there yet")
