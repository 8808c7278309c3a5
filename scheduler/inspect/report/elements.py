"""Builds HTML as a tree of elements and text, so that no text of a record becomes markup."""

from __future__ import annotations

from collections.abc import Iterable
from xml.etree.ElementTree import Element, tostring

from scheduler.core.safe_text import printable

Child = Element | str | None


def element(tag: str, /, *children: Child, **attributes: str | bool | None) -> Element:
    """Returns an element with these children. None is left out.

    Args:
      attributes: `class_` becomes class, and `data_x` becomes data-x. True is an attribute without a value. None and
        False are omitted.
    """
    made = Element(tag)
    for key, value in attributes.items():
        if value is not None and value is not False:
            made.set(key.rstrip("_").replace("_", "-"), "" if value is True else printable(value))
    extend(made, children)
    return made


def extend(parent: Element, children: Iterable[Child]) -> None:
    """Appends children to `parent`."""
    last = parent[-1] if len(parent) else None
    for child in children:
        if isinstance(child, Element):
            parent.append(child)
            last = child
        elif child is not None and last is None:
            parent.text = (parent.text or "") + printable(child)
        elif child is not None and last is not None:
            last.tail = (last.tail or "") + printable(child)


def written(root: Element) -> str:
    """Returns the document as UTF-8 text. Characters that cannot be encoded become escapes."""
    text = tostring(root, encoding="unicode", method="html")
    return "<!DOCTYPE html>\n" + text.encode("utf-8", "backslashreplace").decode() + "\n"


def table(caption: str | None, columns: Iterable[str], rows: Iterable[Iterable[Child]], *, numbers: int) -> Element:
    """Returns a table with its last `numbers` columns right-aligned. It scrolls horizontally if it is too wide."""
    columns = list(columns)

    def cell(name: str, place: int, child: Child) -> Element:
        figure = "figure" if place >= len(columns) - numbers else None
        return element(name, child, class_=figure, scope="col" if name == "th" else None)

    head = element("tr", *(cell("th", place, column) for place, column in enumerate(columns)))
    body = (element("tr", *(cell("td", place, child) for place, child in enumerate(row))) for row in rows)
    made = element(
        "table",
        element("caption", caption) if caption else None,
        element("thead", head),
        element("tbody", *body),
    )
    return element("div", made, class_="scrolls")
