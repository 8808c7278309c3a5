"""Files that are read within limits, and written whole or not at all."""

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

# No job, plan, sweep or export comes near it: 100,000 records take 170 MB.
MOST_BYTES = 256 * 2**20
# A pipe that gives nothing for so long is given up; a program at its other end may have much to do.
LONGEST_WAIT_S = 60.0
_PIECE_BYTES = 2**20


def read_text(path: str | os.PathLike[str]) -> str:
    """As `read_bytes`, the text in UTF-8.

    Raises:
      OSError, UnicodeDecodeError: it cannot be read, or is no text.
    """
    return read_bytes(path).decode("utf-8")


def read_bytes(
    path: str | os.PathLike[str], most: int = MOST_BYTES, *, longest_wait_s: float = LONGEST_WAIT_S
) -> bytes:
    """What a file, a pipe or a device holds, up to its end.

    Args:
      most: bytes that are read at most.
      longest_wait_s: seconds that a pipe may give nothing.

    Raises:
      OSError: it cannot be read, is a directory, holds more than `most` bytes, or gave nothing for so long.
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
    """What a stream gives up to its end; raises as `read_bytes`, but waits as long as it takes."""
    read = stream.read(most + 1)
    if len(read) > most:
        raise _too_large(most)
    return read


def unzipped(raw: bytes, most: int = MOST_BYTES) -> bytes:
    """All that can be had of gzipped bytes, whose end may be missing.

    Raises:
      OSError: it is more than `most` bytes.
      zlib.error: they are not gzipped.
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
    """The next bytes, none at the end; a pipe is waited for."""
    ready = select.poll()
    ready.register(file, select.POLLIN)
    waited_s = 0.0
    while not ready.poll(WAKE_S * 1000):
        waited_s += WAKE_S
        if waited_s >= longest_wait_s:
            raise OSError(errno.ETIMEDOUT, f"nothing came of it for {longest_wait_s:g} s")
    return os.read(file, most)


def _too_large(most: int) -> OSError:
    size = f"{most / 2**20:g} MiB" if most >= 2**20 else f"{most} bytes"
    return OSError(errno.EFBIG, f"it holds more than {size}, which is the most that is read")


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
