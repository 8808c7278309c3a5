"""Reads exported records from files and URLs, with digests, and writes the index of a directory for static hosting."""

from __future__ import annotations

import dataclasses
import hashlib
import http.client
import json
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from scheduler.core import codec
from scheduler.core.errors import StoreError
from scheduler.core.files import MOST_BYTES, read_bytes, replace_text
from scheduler.core.records import Imported, Key, Record
from scheduler.store.text_files import import_text, read_records
from tile_scheduler import __version__

INDEX = "index.json"
# Timeouts of a download in seconds: of one response of the server, and of a whole file.
RESPONSE_S, DOWNLOAD_S = 30.0, 600.0
_PIECE_BYTES = 2**20


@dataclasses.dataclass(frozen=True)
class Source:
    """The content of one file of records.

    Attributes:
      name: its path, or its URL without query and fragment.
      content: its bytes.
    """

    name: str
    content: bytes

    @property
    def file(self) -> str:
        """The last part of the name."""
        return self.name.rpartition("/")[2]

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    def require_digest(self, sha256: str) -> None:
        """Raises a StoreError if the content has another SHA-256 digest."""
        if self.sha256 != sha256:
            raise StoreError(
                f"{self.name} has the SHA-256 digest {self.sha256}, and {sha256} is expected: the file was changed or "
                "is incomplete; read it again, or get the digest from its publisher (nothing was imported)"
            )

    def text(self) -> str:
        try:
            return self.content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise StoreError(f"{self.name} is not UTF-8 text: {error}") from error

    def records(self) -> list[Record]:
        """Returns the records of the file, each with the mark of an import.

        Raises:
          StoreError: the file is invalid.
        """
        mark = Imported(self.name, self.sha256)
        return [dataclasses.replace(record, imported=mark) for record in import_text(self.text(), source=self.name)]


def parsed_digest(text: str) -> str:
    """Returns a SHA-256 digest in lower case; the prefix ``sha256:`` is accepted.

    Raises:
      ValueError: the text is not 64 hexadecimal digits.
    """
    digest = text.strip().lower().removeprefix("sha256:")
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise ValueError(f"a SHA-256 digest has 64 hexadecimal digits, found {text!r}")
    return digest


# ------------------------------------------------------------------------------
# Reading of a file or a URL.


def read(place: str, most: int = MOST_BYTES) -> Source:
    """Returns the content of a file or of an ``https://``, ``http://`` or ``file://`` URL.

    Args:
      place: the path or the URL.
      most: maximum number of bytes.

    Raises:
      StoreError: it cannot be read, is larger, or is incomplete; the message has the reason.
    """
    try:
        url = urllib.parse.urlsplit(place)
    except ValueError as error:
        raise StoreError(f"{place} is not a URL: {error}") from error
    if url.scheme in ("http", "https"):
        return Source(_without_query(place), _downloaded(place, most))
    if "://" in place and url.scheme != "file":
        raise StoreError(f"{place}: records are read from a file, https://, http:// or file://, not {url.scheme}://")
    if url.scheme == "file" and url.netloc not in ("", "localhost"):
        raise StoreError(f"{place}: a file:// URL must not name a host, found {url.netloc!r}: write file:///path")
    path = urllib.request.url2pathname(url.path) if url.scheme == "file" else place
    try:
        return Source(place, read_bytes(path, most))
    except OSError as error:
        raise StoreError(f"{place}: {error.strerror or error}") from error


def _without_query(url: str) -> str:
    """Returns a URL without user, query and fragment, which may contain secrets such as signatures."""
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but not from https to http."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        allowed = ("https",) if req.type == "https" else ("http", "https")
        if urllib.parse.urlsplit(newurl).scheme not in allowed:
            reason = f"it redirects to {_without_query(newurl)}, which is not {' or '.join(allowed)}"
            raise urllib.error.URLError(reason)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _downloaded(url: str, most: int) -> bytes:
    shown, started_s = _without_query(url), time.monotonic()
    if "@" in urllib.parse.urlsplit(url).netloc:
        raise StoreError(f"{shown}: the URL must not contain a user or a password; download the file, and import that")
    request = urllib.request.Request(url, headers={"User-Agent": f"tile-scheduler/{__version__}"})
    try:
        with urllib.request.build_opener(_SafeRedirects).open(request, timeout=RESPONSE_S) as response:
            content = bytearray()
            while piece := response.read1(min(_PIECE_BYTES, most + 1 - len(content))):
                content += piece
                if len(content) > most:
                    raise StoreError(f"{shown} is larger than {most} bytes, the maximum that is read")
                if time.monotonic() - started_s > DOWNLOAD_S:
                    raise StoreError(f"{shown}: the download did not end within {DOWNLOAD_S:g} s")
            length = response.headers.get("Content-Length")
    except urllib.error.HTTPError as error:
        error.close()
        raise StoreError(f"{shown}: the server answered HTTP {error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        raise StoreError(f"{shown} cannot be read: {error.reason}") from error
    except (http.client.HTTPException, OSError, ValueError) as error:
        raise StoreError(f"{shown} cannot be read: {error or type(error).__name__}") from error
    if length is not None and length != str(len(content)):
        raise StoreError(f"{shown} is incomplete: {len(content)} of {length} bytes arrived; read it again")
    return bytes(content)


# ------------------------------------------------------------------------------
# The index of a directory: what each file contains, and its digest.


@dataclasses.dataclass(frozen=True)
class IndexedFile:
    """A file of records in an index.

    Attributes:
      name: its path relative to the index, with "/".
      hardware: `Hardware.id` of its only chip.
      operations: the names of its operations, sorted.
      records: their number.
      sha256: its SHA-256 digest in hexadecimal.
      date: the date of the newest measurement in UTC, as in `Environment.date`.
      jax: the versions of JAX of the measurements, sorted.
    """

    name: str
    hardware: str
    operations: tuple[str, ...]
    records: int
    sha256: str
    date: str
    jax: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Index:
    """The files of a directory of records.

    Attributes:
      package: the version of tile-scheduler that wrote the index.
      files: its files, sorted by name.
    """

    package: str
    files: tuple[IndexedFile, ...]


_INDEX = codec.maker(Index, {})
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")


def write_index(directory: Path) -> Path:
    """Writes ``index.json`` for all records under `directory`.

    Raises:
      StoreError: as in `index_text`; or the index cannot be written.
    """
    path, text = directory / INDEX, index_text(directory)
    try:
        replace_text(path, text)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error}") from error
    return path


def index_text(directory: Path) -> str:
    """Returns the index of all records under `directory`, equal for the same files.

    Raises:
      StoreError: the files are invalid, or one has several chips.
    """
    read_records(directory)  # no key occurs twice
    files = [_indexed(path, directory) for path in sorted(directory.glob("*/*.jsonl"))]
    index = Index(__version__, tuple(sorted(files, key=lambda file: file.name)))
    return f"{json.dumps({'format': codec.FORMAT, **dataclasses.asdict(index)}, indent=1)}\n"


def _indexed(path: Path, directory: Path) -> IndexedFile:
    source = read(str(path))
    records = source.records()
    chips = sorted({record.key.hardware for record in records})
    if len(chips) != 1:
        raise StoreError(f"{path} must have records of one chip, found {', '.join(chips) or 'none'}")
    return IndexedFile(
        path.relative_to(directory).as_posix(),
        chips[0],
        tuple(sorted({record.key.operation for record in records})),
        len(records),
        source.sha256,
        max(record.environment.date for record in records),
        tuple(sorted({record.environment.jax for record in records})),
    )


def index_of(source: Source) -> Index | None:
    """Returns the index that a source contains, or None if it is not an index.

    Raises:
      StoreError: the index is invalid, or a name leads out of its directory.
    """
    if source.file != INDEX:
        return None
    try:
        index = _INDEX(codec.formatted(codec.parsed(source.text())))
        for file in index.files:
            parsed_digest(file.sha256)
            if not _NAME.fullmatch(file.name):
                raise ValueError(f"the name of a file must be a path below the index, found {file.name!r}")
    except ValueError as error:
        raise StoreError(f"{source.name} is not an index of records: {error}") from error
    return index


def read_indexed(place: str, files: Iterable[IndexedFile], progress: Callable[[str], None]) -> list[Source]:
    """Returns the content of files of the index at `place`, checked by their digests.

    Args:
      place: the path or the URL of the index.
      files: the files to read.
      progress: receives a line for each file.

    Raises:
      StoreError: as in `read`; or a digest differs.
    """
    found: list[Source] = []
    for file in files:
        left = MOST_BYTES - sum(len(source.content) for source in found)
        url = "://" in place
        source = read(urllib.parse.urljoin(place, file.name) if url else str(Path(place).parent / file.name), left)
        source.require_digest(parsed_digest(file.sha256))
        progress(f"read {source.name}: {file.records} records, SHA-256 as in the index")
        found.append(source)
    return found


def gathered(sources: Sequence[Source], indexed: Collection[IndexedFile] | None = None) -> list[Record]:
    """Returns the records of several files.

    Args:
      sources: the files.
      indexed: their entries in an index, or None without an index.

    Raises:
      StoreError: a file is invalid, has records of another chip than its index says, or two have the same key.
    """
    chips = None if indexed is None else {file.hardware for file in indexed}
    records: dict[Key, Record] = {}
    for source in sources:
        some = source.records()
        found = {record.key.hardware for record in some}
        if chips is not None and not found <= chips:
            raise StoreError(f"{source.name} has records of {', '.join(sorted(found - chips))}, unlike its index says")
        for record in some:
            if (first := records.setdefault(record.key, record)) is not record:
                assert first.imported is not None
                raise StoreError(f"{first.imported.source} and {source.name} both have {record.key}; keep one")
    return list(records.values())
