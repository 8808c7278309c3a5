"""Makes text safe to print and to store, removes secrets from it, formats quantities, and logs messages once."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import threading
import unicodedata
import urllib.parse
import warnings
from collections.abc import Iterator, Mapping

# ------------------------------------------------------------------------------
# Removal of secrets from URLs and messages: anything not known to be harmless is omitted.

HIDDEN = "***"
# A shorter secret may occur in any word, so replacing it would not make a message safe.
_SHORTEST = 4
_SCHEME = re.compile(r"\s*([a-z][a-z0-9+]*)(?=:)", re.IGNORECASE)
_DATABASE = re.compile(r"\s*(sqlite|postgres(ql)?)(\+\w*)?:", re.IGNORECASE)
# Host, port and database of a server, without credentials.
_PLACE = re.compile(r"(\[[0-9a-f:.%]+\]|[\w.-]*)(:\d{1,5})?(/[\w.+-]*)?", re.IGNORECASE | re.ASCII)
_MAY_HOLD_A_SECRET = re.compile(rf"[@?]|^{_DATABASE.pattern}", re.IGNORECASE)
_ANY_URL = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s'\"<>()]+", re.IGNORECASE)
_ASSIGNED = re.compile(
    r"(\b(?:ssl|pg|db)?_?(?:password|passwd|passphrase|passfile|pwd|secret|api_?key|access_?token|auth_?token)\b['\"]?)"
    r"(\s*[=:]\s*)('[^']*'?|\"[^\"]*\"?|[^\s&;,)]+)",
    re.IGNORECASE,
)
_CREDENTIALS = re.compile(r"[^/\s]*:[^\s]*@")


def is_url(text: str) -> bool:
    """Whether a location is a URL, possibly misspelt, and not a path."""
    return "://" in text or _DATABASE.match(text) is not None


def shown_url(url: str | os.PathLike[str]) -> str:
    """Returns a database's URL, or the path of its file, for messages.

    The result has scheme, host, port, database, and the user name if a password follows it. For a URL that cannot be
    parsed completely, it has only the scheme.
    """
    text = os.fspath(url)
    if not is_url(text):
        return _ASSIGNED.sub(rf"\1\2{HIDDEN}", _CREDENTIALS.sub(f"{HIDDEN}@", text))
    scheme = (_SCHEME.match(text) or [HIDDEN, HIDDEN])[1]
    hidden = f"{scheme}://{HIDDEN}"
    head, slashes, rest = text.partition("://")
    if not slashes or head != scheme:
        return hidden
    rest, asks, query = rest.partition("?")
    credentials, at, place = rest.rpartition("@")
    if "@" in credentials + query or re.search(r"[\s/#\[\]]", credentials):
        return hidden
    file = scheme.lower().startswith("sqlite") and not at and place.startswith("/")
    if (":" in place or "\n" in place) if file else _PLACE.fullmatch(place) is None:
        return hidden if place != "/:memory:" else text
    user, colon, _ = credentials.partition(":")
    named = f"{user}:" if colon and re.fullmatch(r"[\w.+-]+", user, re.ASCII) else ""
    return f"{scheme}://{named + HIDDEN + at if at else ''}{place}{asks}{HIDDEN if query else ''}"


def redacted(text: str, url: str = "") -> str:
    """Removes from a message the secrets of `url`, which it may quote in part, and whatever looks like a secret."""
    for secret in sorted(set(_secrets_of(url)), key=len, reverse=True):
        if secret not in text:
            continue
        if len(secret) < _SHORTEST:
            return "the message may hold a password, and is left out"
        text = text.replace(secret, HIDDEN)
    text = _ANY_URL.sub(lambda found: shown_url(found[0]) if _MAY_HOLD_A_SECRET.search(found[0]) else found[0], text)
    return _ASSIGNED.sub(rf"\1\2{HIDDEN}", text)


def tells(error: BaseException | None, url: str) -> bool:
    """Whether the message of an exception, or of one in its chain, contains a secret."""
    seen: list[BaseException] = []
    while error is not None and not any(error is other for other in seen):
        if redacted(text := str(error), url) != text:
            return True
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False


def _secrets_of(url: str) -> Iterator[str]:
    """Yields the secrets of a URL: whole, in parts, and percent-decoded."""
    shown = shown_url(url)
    if shown == url:
        return
    for part in _parts(url):
        for spelling in (part, urllib.parse.unquote(part), urllib.parse.unquote_plus(part)):
            if spelling and spelling not in shown:
                yield spelling


def _parts(url: str) -> Iterator[str]:
    yield url
    yield url.strip()
    _, _, rest = url.partition(":")
    rest = rest.lstrip("/")
    yield rest
    credentials = rest.rpartition("@")[0]
    yield from (credentials, credentials.partition(":")[2], *credentials.split(":"), *credentials.split("@"))
    # A password may contain characters that end it for a URL parser: split at the first "@" and other delimiters.
    yield from re.split(r"[@:/?#\s]+", credentials)
    for option in re.split(r"[?&;]", rest)[1:]:
        yield option.partition("=")[2]
    with contextlib.suppress(ValueError):  # an invalid port
        yield urllib.parse.urlsplit(url).password or ""


# ------------------------------------------------------------------------------
# Formatting of quantities for people: three significant digits and a unit.


def seconds_text(seconds: float) -> str:
    """Formats seconds with three digits and a unit: "1.20 ms"."""
    if not seconds:
        return "0 s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.9995 * scale:
            return f"{_padded(seconds / scale)} {unit}"
    return f"{_padded(seconds / 1e-9)} ns"


def digits(value: float) -> str:
    """Formats a number with three digits, without trailing zeros."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def ratio_text(ratio: float) -> str:
    """Formats a ratio with three digits, at most two of them decimals: "0.98x", "1.05x", "24.9x"."""
    return f"{ratio:.2f}x" if ratio < 9.995 else f"{_padded(ratio)}x" if ratio < 99_999 else f"{ratio:.2g}x"


def share_text(share: float) -> str:
    """Formats a fraction as a percentage with three digits, at most two of them decimals: "12.3%", "0.07%"."""
    return f"{digits(round(100 * share, 2))}%"


def faster_text(excess: float) -> str:
    """Formats a speedup from the other's excess time as a fraction: "12.3% faster", from 1 on "3.05 times as fast"."""
    return f"{share_text(excess)} faster" if excess < 1 else f"{digits(1 + excess)} times as fast"


def mesh_text(extents: Mapping[str, int]) -> str:
    """Formats the axes of a mesh: ``data=2, model=4``."""
    return ", ".join(f"{name}={extent}" for name, extent in extents.items())


def _padded(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:#.3g}"


# ------------------------------------------------------------------------------
# Sanitizing of untrusted text (stored records, exceptions, file names) before it is printed, logged or stored.
#
# The author of an imported record or of a failing kernel controls some of the text that messages quote. That text must
# not move a cursor, colour a terminal, reverse the direction of a line, hide letters or forge a line of a log.

# Invisible characters that Unicode classifies as letters or marks: Hangul fillers, joiners and selectors.
_UNSEEN = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0\u180b\u180c\u180d\u180f")
_FIRST_SELECTOR, _LAST_SELECTOR = 0xE0100, 0xE01EF
# Controls, formats (bidi, zero-width), surrogates, and line and paragraph separators.
_UNSAFE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def printable(text: str) -> str:
    """Returns `text` for a terminal, a page or an error, without secrets and with control characters escaped.

    Newlines and tabs are kept.
    """
    text = redacted(text)
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c in "\n\t" or _safe(c) else ascii(c)[1:-1] for c in text)


def error_text(error: BaseException) -> str:
    """Returns the type of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def one_line(text: str) -> str:
    """Returns `printable` text with newlines and tabs escaped, too: for a log, a warning or a name."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def encodable(text: str) -> str:
    """Returns `text` in a form that every database and file accepts, with NUL and surrogates escaped."""
    return re.sub(r"[\0\ud800-\udfff]", lambda found: ascii(found[0])[1:-1], text)


def _safe(c: str) -> bool:
    if c in _UNSEEN or _FIRST_SELECTOR <= ord(c) <= _LAST_SELECTOR:
        return False
    return unicodedata.category(c) not in _UNSAFE


def warn_safely(message: object, stacklevel: int = 2) -> None:
    """Issues a RuntimeWarning with sanitized text.

    Args:
      stacklevel: as in `warnings.warn`, counted from the caller of this function.
    """
    warnings.warn(one_line(str(message)), RuntimeWarning, stacklevel=stacklevel + 1)


class _Safe(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.raw_args = record.args  # for handlers that need values instead of text
        record.msg, record.args = one_line(record.getMessage()), None
        return True


# The only logger of this program: a child logger would bypass the filter.
log = logging.getLogger("scheduler")
log.addFilter(_Safe())


@functools.cache
def log_once(message: str, level: int = logging.WARNING) -> None:
    """Logs a message once per process, because calls and readers of a store repeat it."""
    log.log(level, "%s", message)


@functools.cache
def warn_once(message: str) -> None:
    """Issues a RuntimeWarning once per process and message."""
    warn_safely(message)


# ------------------------------------------------------------------------------
# Suppression of Optuna's log messages about this program's studies, but not about the user's own studies.

_thread = threading.local()


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Drops messages of Optuna's storages from this thread. The user's verbosity setting is unchanged."""
    _thread.quiet = True
    try:
        yield
    finally:
        _thread.quiet = False


def _wanted(record: logging.LogRecord) -> bool:
    return not getattr(_thread, "quiet", False)


for _name in ("optuna.storages._in_memory", "optuna.storages._rdb.storage"):
    logging.getLogger(_name).addFilter(_wanted)
