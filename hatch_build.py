"""Metadata of the wheel that depends on the address of the repository: project URLs, and the links of the description.

An index shows README.md away from its repository, where a relative link leads nowhere. The links become absolute; as
long as `repository` in pyproject.toml is empty, the description has their text alone, and no pictures.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Metadata(MetadataHookInterface):
    """Sets `readme` and `urls` in the form that GitHub serves files, at the tag of the version."""

    def update(self, metadata: dict[str, Any]) -> None:
        repository, tag = self.config["repository"].rstrip("/"), f"v{metadata['version']}"
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": description(text, repository, tag)}
        pages = {"Repository": "", "Issues": "/issues", "Changelog": f"/blob/{tag}/CHANGELOG.md"}
        metadata["urls"] = {name: repository + path for name, path in pages.items()} if repository else {}


def description(text: str, repository: str, tag: str) -> str:
    """Returns a document without relative links: they are absolute, or text if `repository` is empty."""
    relative = r"(?!https?:|#)"
    if not repository:
        text = re.sub(r"<picture>.*?</picture>\n*", "", text, flags=re.DOTALL)
        text = re.sub(r"!\[[^\]]*\]\([^)]*\)\n*", "", text)
        return re.sub(rf"\[([^\]]*)\]\({relative}[^)]+\)", r"\1", text)
    text = re.sub(rf'((?:src|srcset)=")({relative}[^"]+")', rf"\1{repository}/raw/{tag}/\2", text)
    text = re.sub(rf"(!\[[^\]]*\]\()({relative}[^)]+\))", rf"\1{repository}/raw/{tag}/\2", text)
    return re.sub(rf"((?<!!)\[[^\]]*\]\()({relative}[^)]+\))", rf"\1{repository}/blob/{tag}/\2", text)
