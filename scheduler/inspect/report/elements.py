"""HTML as a tree: what is put into it is text or an element, so no text of a record becomes markup."""

from __future__ import annotations

from collections.abc import Iterable
from xml.etree.ElementTree import Element, tostring

from scheduler.core.safe_text import printable

Child = Element | str | None


def element(tag: str, /, *children: Child, **attributes: str | bool | None) -> Element:
    """An element with these children, None left out.

    Args:
      attributes: `class_` is class, and `data_x` data-x; True is an attribute without a value, None and False are none.
    """
    made = Element(tag)
    for key, value in attributes.items():
        if value is not None and value is not False:
            made.set(key.rstrip("_").replace("_", "-"), "" if value is True else printable(value))
    extend(made, children)
    return made


def extend(parent: Element, children: Iterable[Child]) -> None:
    """Appends to what `parent` holds."""
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
    """The document, whose encoding is UTF-8; characters that it has none for are written as escapes."""
    text = tostring(root, encoding="unicode", method="html")
    return "<!DOCTYPE html>\n" + text.encode("utf-8", "backslashreplace").decode() + "\n"


def table(caption: str | None, columns: Iterable[str], rows: Iterable[Iterable[Child]], *, numbers: int) -> Element:
    """A table whose last `numbers` columns are set flush right, and which scrolls by itself where it is too wide."""
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
