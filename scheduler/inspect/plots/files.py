"""A figure as the text of an SVG element, or as a PNG."""

from __future__ import annotations

import hashlib
import html
import io
import re
from typing import TYPE_CHECKING

from scheduler.inspect.plots.style import DPI, FONT

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def svg(drawn: Figure) -> str:
    """`drawn` as an SVG element: the same text for the same figure, its ids unlike those of any other."""
    from matplotlib import style

    file = io.StringIO()
    with style.context(["default", FONT | {"svg.fonttype": "none", "svg.hashsalt": "tile-scheduler"}]):
        drawn.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(?<= d=")[^"]+', lambda path: re.sub(r"\d+\.\d+", _shorter, path[0]), text)
    # matplotlib's ids are digests of places to the last bit, which differ between runs: here they are counted.
    ids = {name: f"{number}" for number, name in enumerate(re.findall(r'\bid="([^"]+)"', text))}
    text = re.sub(r'(\bid="|href="#|url\(#)([^")]+)', lambda found: f"{found[1]}@{ids[found[2]]}", text)
    own = f"p{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    text = re.sub(r'(\bid="|href="#|url\(#)@', rf"\g<1>{own}-", text)
    # What the element says of all elements would hold for all of a page.
    text = text.replace("*{stroke-linejoin", f"#{own} *{{stroke-linejoin")
    label = html.escape(str(drawn.get_label()), quote=True)
    return text.replace("<svg ", f'<svg id="{own}" role="img" aria-label="{label}" ', 1).rstrip() + "\n"


def _shorter(number: re.Match[str]) -> str:
    """A hundredth of a point is less than anybody sees."""
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")


def png(drawn: Figure) -> bytes:
    """`drawn` as a PNG of 1,600 pixels' width."""
    from matplotlib import style

    file = io.BytesIO()
    with style.context(["default", FONT]):
        drawn.savefig(file, format="png", dpi=DPI, metadata={"Software": None})
    return file.getvalue()
