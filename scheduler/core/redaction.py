"""Removal of secrets from URLs and messages: anything not known to be harmless is omitted."""

from __future__ import annotations

import contextlib
import os
import re
import urllib.parse
from collections.abc import Iterator

HIDDEN = "***"
# A shorter secret may occur in any word, so replacing it would not make a message safe.
_SHORTEST = 4
_SCHEME = re.compile(r"\s*([a-z][a-z0-9+]*)(?=:)", re.IGNORECASE)
_DATABASE = re.compile(r"\s*(sqlite|postgres(ql)?)(\+\w*)?:", re.IGNORECASE)
# Host, port and database of a server, without credentials.
_PLACE = re.compile(r"(\[[0-9a-f:.%]+\]|[\w.-]*)(:\d{1,5})?(/[\w.+-]*)?", re.IGNORECASE | re.ASCII)
_USER = re.compile(r"[\w.+-]+", re.ASCII)
# Connection options that are shown, provided that their values look like words or paths.
_HARMLESS = frozenset(
    {"host", "port", "dbname", "sslmode", "connect_timeout", "application_name", "target_session_attrs"}
    | {"keepalives", "keepalives_idle", "keepalives_interval", "keepalives_count", "tcp_user_timeout"}
    | {"prepare_threshold"}
)
_VALUE = re.compile(r"[\w./,:+-]*", re.ASCII)
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

    The result has scheme, host, port, database, the user name if a password follows it, and a few harmless options. For
    a URL that cannot be parsed completely, it has only the scheme.
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
    user, colon, _ = credentials.partition(":")
    if at:
        place = f"{user}:{HIDDEN}@{place}" if colon and _USER.fullmatch(user) else f"{HIDDEN}@{place}"
    bare = place.rpartition("@")[2]
    file = scheme.lower().startswith("sqlite") and not at and bare.startswith("/")
    if (":" in bare or "\n" in bare) if file else _PLACE.fullmatch(bare) is None:
        return hidden if bare != "/:memory:" else text
    return f"{scheme}://{place}{asks}{_shown_query(query)}"


def redacted(text: str, url: str = "") -> str:
    """Removes from a message the secrets of `url`, which it may quote in part, and whatever looks like a secret."""
    for secret in sorted(set(_secrets_of(url)), key=len, reverse=True):
        if secret not in text:
            continue
        if len(secret) < _SHORTEST:
            return "the message may hold a password, and is left out"
        text = text.replace(secret, HIDDEN)
    text = _ANY_URL.sub(lambda found: shown_url(found[0]) if _may_hold_a_secret(found[0]) else found[0], text)
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


def _may_hold_a_secret(url: str) -> bool:
    return "@" in url or "?" in url or _DATABASE.match(url) is not None


def _shown_query(query: str) -> str:
    options = [option.partition("=") for option in query.split("&")] if query else []
    shown = [
        f"{name}={value}"
        for name, _, value in options
        if name in _HARMLESS and _VALUE.fullmatch(urllib.parse.unquote_plus(value))
    ]
    return "&".join([*shown, HIDDEN] if len(shown) < len(options) else shown)


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
