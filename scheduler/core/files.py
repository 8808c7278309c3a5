"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from pathlib import Path


def replace_text(path: str | os.PathLike[str], text: str) -> None:
    """As `replace_bytes`, in UTF-8 with lines as they are."""
    replace_bytes(path, text.encode())


def replace_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes a file in place of what is there, which stays as it was unless all of the new one is on the disk.

    A link stays one. What is no regular file (a terminal, a pipe), and a file in a directory that may not be written,
    are written in place.

    Raises:
      OSError: it cannot be written.
    """
    target = Path(os.path.realpath(path))
    if os.path.exists(path) and not (target.is_file() and os.access(target.parent, os.W_OK)):
        Path(path).write_bytes(content)
        return
    fresh = target.with_name(f".{target.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        with fresh.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, fresh)
        fresh.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise
