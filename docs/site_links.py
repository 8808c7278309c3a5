"""A hook of MkDocs: pages link to files of the repository, which the site does not have.

Such a link leads to the repository that pyproject.toml names; without a repository its text stays. A picture outside of
docs/ is added to the site.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#:\s]+)(#[^)]*)?\)")
PICTURES = "pictures/"


def on_config(config: Any) -> Any:
    config.repo_url = config.repo_url or _repository()
    return config


def on_files(files: Any, config: Any) -> Any:
    for picture in (ROOT / "benchmarks" / "results").glob("*.svg"):
        files.append(File.generated(config, PICTURES + picture.name, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    folder = posixpath.dirname(page.file.src_uri)

    def replaced(link: re.Match[str]) -> str:
        picture, text, path, anchor = link[1], link[2], link[3], link[4] or ""
        target = posixpath.normpath(posixpath.join("docs", folder, path))
        inside = posixpath.relpath(target, "docs")
        if not inside.startswith("..") and files.get_file_from_path(inside) is not None:
            return link[0]
        if not (ROOT / target).exists():
            return link[0]  # the strict build names it
        if picture:
            return f"![{text}]({posixpath.relpath(PICTURES + posixpath.basename(target), folder or '.')})"
        return f"[{text}]({config.repo_url}/blob/main/{target}{anchor})" if config.repo_url else text

    return LINK.sub(replaced, markdown)


def _repository() -> str | None:
    """Returns the address of the repository that the package names."""
    urls = {name.lower(): url for name, url in PROJECT.get("urls", {}).items()}
    found = next((urls[name] for name in ("repository", "source", "source code") if name in urls), None)
    return found and found.removesuffix(".git").rstrip("/")
