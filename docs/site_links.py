"""A hook of MkDocs: the README is the home page, and links to files that the site does not have lead to the repository.

As long as pyproject.toml names no public address of the repository, such a link is its text. A picture outside of docs/
is added to the site.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#:\s]+)(#[^)]*)?\)")
HOME, PICTURES = "README.md", "docs/pictures/"


def on_config(config: Any) -> Any:
    config.repo_url = config.repo_url or _repository()
    return config


def on_files(files: Any, config: Any) -> Any:
    for picture in (ROOT / "benchmarks" / "results").glob("*.svg"):
        files.append(File.generated(config, f"pictures/{picture.name}", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))
    if page.file.src_uri == HOME:
        # Here pages are found from the root of the repository; of docs/ the site has all.
        folder, markdown = "", (ROOT / HOME).read_text().replace('"docs/', '"')

    def replaced(link: re.Match[str]) -> str:
        picture, text, path, anchor = link[1], link[2], link[3], link[4] or ""
        target = posixpath.normpath(posixpath.join(folder, path))
        if not (ROOT / target).exists():
            return link[0]  # the strict build names it
        inside = posixpath.relpath(PICTURES + posixpath.basename(target) if picture else target, "docs")
        file = files.get_file_from_path(inside)
        if file is not None and not file.inclusion.is_excluded():
            return (
                f"{picture}[{text}]({posixpath.relpath(inside, posixpath.dirname(page.file.src_uri) or '.')}{anchor})"
            )
        return f"[{text}]({config.repo_url}/blob/main/{target}{anchor})" if config.repo_url else text

    return LINK.sub(replaced, markdown)


def _repository() -> str | None:
    """Returns the public address of the repository, or None if it has none yet."""
    settings = PROJECT["tool"]["hatch"].get("metadata", {}).get("hooks", {}).get("custom", {})
    return settings.get("repository", "").rstrip("/") or None
