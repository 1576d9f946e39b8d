"""A hook of mkdocs: links out of docs/ into the repository, which the site has not, become plain text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#]+)\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by mkdocs with each page's source.

    Raises:
        FileNotFoundError: such a link leads nowhere in the repository either.
    """
    folder = (DOCS / page.file.src_uri).parent

    def plain(link: re.Match[str]) -> str:
        text, target = link[1], link[2]
        if "://" in target:
            return link[0]
        path = (folder / target).resolve()
        if path.is_relative_to(DOCS):
            return link[0]
        if not path.exists():
            raise FileNotFoundError(f"{page.file.src_uri}: {target}")
        return text

    return _LINK.sub(plain, markdown)
