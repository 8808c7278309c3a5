"""Tables and paragraphs of a page in Markdown."""

from __future__ import annotations

import re
import statistics
import textwrap
from collections.abc import Iterable, Sequence


def text(words: str) -> list[str]:
    """A paragraph."""
    return [*textwrap.wrap(words, 118, break_long_words=False, break_on_hyphens=False), ""]


def in_place(document: str, program: str, lines: Sequence[str]) -> str:
    """The document with these lines between the comments that name the program of benchmarks/."""
    place = re.compile(rf"(?<=<!-- by benchmarks/{re.escape(program)} -->\n).*?(?=<!-- end -->)", re.DOTALL)
    return place.sub(lambda _: "".join(f"{each}\n" for each in lines), document, count=1)


def spread(shares: Iterable[float]) -> tuple[str, str]:
    found = list(shares)
    return f"{statistics.median(found):.3f}", f"{min(found):.3f}"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def table(*titles: str, left: int) -> list[str]:
    """The head of a table whose first so many columns are words."""
    rule = "|".join(["---"] * left + ["---:"] * (len(titles) - left))
    return [line(*titles), f"|{rule}|"]


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
