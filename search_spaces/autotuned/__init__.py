"""Operations of plain functions: what `scheduler.autotune` makes of one."""

from __future__ import annotations

from search_spaces.autotuned.operation import operation_of

__all__ = ["operation_of"]
