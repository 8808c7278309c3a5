"""Old spellings that stores and recordings still hold: read here, never written.

Those of schedules and backends are the search spaces' own.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

STAGES: Mapping[str, str] = MappingProxyType({"suspect": "implausible"})
