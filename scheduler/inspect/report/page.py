"""Writes the whole report: one HTML file that needs no network and runs only its own script."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from xml.etree.ElementTree import Element

from scheduler.core.records import Key, Trial
from scheduler.inspect.report.article import article, overview
from scheduler.inspect.report.content import Pictures, RecordDetails, element, written

_HERE = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Origin:
    """The sources of a report.

    Attributes:
      stores: The stores that were read.
      versions: Versions of this package and of the packages used for the explanations, by name.
      date: UTC, ISO 8601.
      left_out: Sentences on stored data that is not in the report.
    """

    stores: Sequence[str]
    versions: Mapping[str, str]
    date: str
    left_out: Sequence[str] = ()


def page(
    records: Sequence[RecordDetails],
    cut: Iterable[tuple[str, Key, Sequence[Trial]]],
    origin: Origin,
    pictures: Pictures,
) -> str:
    """Returns the report as HTML text.

    Args:
      records: Records in display order.
      cut: Store, key and trials of each unfinished search.
    """
    named = list(zip(_idents(records), records, strict=True))
    style, script = ((_HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    title = f"Tile schedules: {len(records)} record{'' if len(records) == 1 else 's'}"
    body = element(
        "body",
        element("header", element("h1", title), *_said_of(origin)),
        element(
            "main",
            overview(named, cut, pictures),
            *(
                article(ident, details, found, pictures.missing)
                for (ident, details), found in zip(named, pictures.of_record, strict=True)
            ),
        ),
        element("script", script),
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_policy(style, script)),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", style),
    )
    return written(element("html", head, body, lang="en"))


def _policy(style: str, script: str) -> str:
    """Returns a content security policy that blocks loading and any script but ours, whatever a record contains."""

    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    return f"default-src 'none'; script-src {digest(script)}; style-src {digest(style)}; img-src data: blob:"


def _said_of(origin: Origin) -> list[Element]:
    versions = ", ".join(f"{name} {version}" for name, version in origin.versions.items())
    read = f"Read from {' and '.join(origin.stores)} on {origin.date[:10]} by {versions}."
    return [element("p", line, class_="faint") for line in (read, *(f"{left}." for left in origin.left_out))]


def _idents(records: Iterable[RecordDetails]) -> list[str]:
    """Returns an HTML id for each record, stable across reports of one cache."""
    taken: dict[str, int] = {}
    names = []
    for details in records:
        key = details.record.key
        text = f"{key.operation} {details.problem_text} {key.hardware.partition(' (')[0]}"
        name = "r-" + re.sub(r"[^a-z0-9_.]+", "-", text.lower()).strip("-")
        taken[name] = taken.get(name, 0) + 1
        names.append(name if taken[name] == 1 else f"{name}-{taken[name]}")
    return names
