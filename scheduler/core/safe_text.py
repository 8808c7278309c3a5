"""Text of others (stored records, exceptions, names of files) made safe where it leaves the program or is stored.

Whoever wrote a record that is imported, or a kernel that raises, chose some of the text that messages quote. Nothing of
it may move a cursor, colour a terminal, turn the direction of a line round, hide letters or begin a line of a log.
"""

from __future__ import annotations

import logging
import re
import unicodedata
import warnings

from scheduler.core.redaction import redacted

# Letters without a width that Unicode counts among letters and marks: fillers of Hangul, joiners and selectors.
_UNSEEN = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0\u180b\u180c\u180d\u180f")
_FIRST_SELECTOR, _LAST_SELECTOR = 0xE0100, 0xE01EF
# Controls, formats (bidi, zero-width), halves of surrogate pairs, and ends of lines and paragraphs.
_UNSAFE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def printable(text: str) -> str:
    """`text` for a terminal, a page or an error: without secrets, and with what acts on a terminal escaped.

    Ends of lines and tabs stay.
    """
    text = redacted(text)
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c in "\n\t" or _safe(c) else ascii(c)[1:-1] for c in text)


def one_line(text: str) -> str:
    """As `printable`, with ends of lines and tabs escaped, too: for a log, a warning or a name."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def encodable(text: str) -> str:
    """`text` as every database and file takes it: with a NUL and halves of surrogate pairs escaped."""
    return re.sub(r"[\0\ud800-\udfff]", lambda found: ascii(found[0])[1:-1], text)


def _safe(c: str) -> bool:
    if c in _UNSEEN or _FIRST_SELECTOR <= ord(c) <= _LAST_SELECTOR:
        return False
    return unicodedata.category(c) not in _UNSAFE


def warn(message: object, stacklevel: int = 2) -> None:
    """Warns, a RuntimeWarning, in safe text.

    Args:
      stacklevel: as `warnings.warn` counts from the function that calls this one.
    """
    warnings.warn(one_line(str(message)), RuntimeWarning, stacklevel=stacklevel + 1)


class _Safe(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.raw_args = record.args  # for a handler that wants values, not text
        record.msg, record.args = one_line(record.getMessage()), None
        return True


# The only logger of this program: a child of it would write text as it is.
log = logging.getLogger("scheduler")
log.addFilter(_Safe())
