"""Reading of files within limits, and atomic writing."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import shutil
import stat
import threading
import zlib
from pathlib import Path
from typing import BinaryIO

from scheduler.core.interrupts import WAKE_S

# Larger than any job, plan, sweep or export: 100,000 records take 170 MB.
MOST_BYTES = 256 * 2**20
# Timeout for a pipe without data; the program at the other end may compute for a while.
LONGEST_WAIT_S = 60.0
_PIECE_BYTES = 2**20


def read_text(path: str | os.PathLike[str]) -> str:
    """Returns the content of a file as UTF-8 text; limits are those of `read_bytes`.

    Raises:
      OSError, UnicodeDecodeError: it cannot be read, or is not UTF-8 text.
    """
    return read_bytes(path).decode("utf-8")


def read_bytes(
    path: str | os.PathLike[str], most: int = MOST_BYTES, *, longest_wait_s: float = LONGEST_WAIT_S
) -> bytes:
    """Returns the content of a file, a pipe or a device, up to its end.

    Args:
      most: maximum number of bytes.
      longest_wait_s: maximum time without data from a pipe, in seconds.

    Raises:
      OSError: it cannot be read, is a directory, has more than `most` bytes, or timed out.
    """
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        found = os.fstat(file)
        if stat.S_ISREG(found.st_mode) and found.st_size > most:
            raise _too_large(most)
        read = bytearray()
        while piece := _piece(file, min(_PIECE_BYTES, most + 1 - len(read)), longest_wait_s):
            read += piece
            if len(read) > most:
                raise _too_large(most)
        return bytes(read)
    finally:
        os.close(file)


def read_stream(stream: BinaryIO, most: int = MOST_BYTES) -> bytes:
    """Returns the content of a stream up to its end; raises as `read_bytes` does, but has no timeout."""
    read = stream.read(most + 1)
    if len(read) > most:
        raise _too_large(most)
    return read


def unzipped(raw: bytes, most: int = MOST_BYTES) -> bytes:
    """Decompresses gzipped bytes, as far as possible if the end is missing.

    Raises:
      OSError: the result has more than `most` bytes.
      zlib.error: the bytes are not gzipped.
    """
    out = bytearray()
    while raw:
        stream = zlib.decompressobj(wbits=31)  # a gzip header and trailer
        out += stream.decompress(raw, most + 1 - len(out))
        if len(out) > most:
            raise _too_large(most)
        raw = stream.unused_data
    return bytes(out)


def _piece(file: int, most: int, longest_wait_s: float) -> bytes:
    """Returns the next bytes, or none at the end; waits for a pipe."""
    ready = select.poll()
    ready.register(file, select.POLLIN)
    waited_s = 0.0
    while not ready.poll(WAKE_S * 1000):
        waited_s += WAKE_S
        if waited_s >= longest_wait_s:
            raise OSError(errno.ETIMEDOUT, f"no data arrived for {longest_wait_s:g} s")
    return os.read(file, most)


def _too_large(most: int) -> OSError:
    size = f"{most / 2**20:g} MiB" if most >= 2**20 else f"{most} bytes"
    return OSError(errno.EFBIG, f"it is larger than {size}, the maximum that is read")


def replace_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes text as `replace_bytes` does, in UTF-8 and without newline conversion."""
    replace_bytes(path, text.encode())


def replace_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Replaces a file atomically: the old content stays until the new content is completely on disk.

    Symbolic links are kept. Anything but a regular file (a terminal, a pipe) and files in a directory without write
    permission are overwritten in place.

    Raises:
      OSError: it cannot be written; the error names this file, and says if its directory is missing.
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
    except BaseException as error:
        with contextlib.suppress(OSError):
            fresh.unlink()
        if not isinstance(error, OSError):
            raise
        there = target.parent.exists()
        why = error.strerror if there else f"the directory {target.parent} does not exist: create it"
        raise type(error)(error.errno, why, os.fspath(path)) from None
