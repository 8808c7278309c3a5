"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
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
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as fresh:
        try:
            fresh.write(content)
            fresh.flush()
            os.fsync(fresh.fileno())
            if target.exists():
                shutil.copymode(target, fresh.name)
            else:
                os.chmod(fresh.name, 0o666 & ~_umask())
            os.replace(fresh.name, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(fresh.name)
            raise


def _umask() -> int:
    """Of this process, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
