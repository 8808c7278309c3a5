"""The text and the HTML of a record, by a module that the package `scheduler` registers: it imports records itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Renderer(Protocol):
    """Formats a record: for `print` as text, and for a notebook as HTML."""

    def record_text(self, record: Any, /) -> str: ...
    def record_html(self, record: Any, /) -> str: ...


load: Callable[[], Renderer]  # imports the renderer when a record is first shown
