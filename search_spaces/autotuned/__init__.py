"""Operations made of plain functions by `scheduler.autotune`."""

from __future__ import annotations

from search_spaces.autotuned.operation import operation_of

__all__ = ["operation_of"]
