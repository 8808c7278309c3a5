"""Sanitizing of untrusted text (stored records, exceptions, file names) before it is printed, logged or stored.

The author of an imported record or of a failing kernel controls some of the text that messages quote. That text must
not move a cursor, colour a terminal, reverse the direction of a line, hide letters or forge a line of a log.
"""

from __future__ import annotations

import logging
import re
import unicodedata
import warnings

from scheduler.core.redaction import redacted

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


def warn(message: object, stacklevel: int = 2) -> None:
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
