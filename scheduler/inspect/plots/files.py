"""Converts a figure to SVG text, or to a PNG."""

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
    """Returns `drawn` as an SVG element. The text is reproducible, and its ids are unique among figures."""
    from matplotlib import style

    file = io.StringIO()
    with style.context(["default", FONT | {"svg.fonttype": "none", "svg.hashsalt": "tile-scheduler"}]):
        drawn.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(?<= d=")[^"]+', lambda path: re.sub(r"\d+\.\d+", _shorter, path[0]), text)
    # matplotlib derives ids from floating-point coordinates, which differ between runs in the last bit. They are
    # replaced by numbers.
    ids = {name: f"{number}" for number, name in enumerate(re.findall(r'\bid="([^"]+)"', text))}
    text = re.sub(r'(\bid="|href="#|url\(#)([^")]+)', lambda found: f"{found[1]}@{ids[found[2]]}", text)
    own = f"p{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    text = re.sub(r'(\bid="|href="#|url\(#)@', rf"\g<1>{own}-", text)
    # A global CSS selector would apply to the whole page, so it is restricted to this element.
    text = text.replace("*{stroke-linejoin", f"#{own} *{{stroke-linejoin")
    label = html.escape(str(drawn.get_label()), quote=True)
    return text.replace("<svg ", f'<svg id="{own}" role="img" aria-label="{label}" ', 1).rstrip() + "\n"


def _shorter(number: re.Match[str]) -> str:
    """Rounds a coordinate to a hundredth of a point, which is not visible."""
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")


def png(drawn: Figure) -> bytes:
    """Returns `drawn` as a PNG, 1,600 pixels wide."""
    from matplotlib import style

    file = io.BytesIO()
    with style.context(["default", FONT]):
        drawn.savefig(file, format="png", dpi=DPI, metadata={"Software": None})
    return file.getvalue()
