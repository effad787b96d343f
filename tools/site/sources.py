"""A mkdocs hook: checks links out of docs/, and shows them as source paths."""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
_OUT = r"\[([^\]]+)\]\({ups}([^)#]+)(?:#[^)]*)?\)"
"""Pattern of a link out of docs/; `ups` is one `..` more than the depth of the page."""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the text with source paths for links; raises FileNotFoundError for a broken link."""

    def path_instead(link: re.Match[str]) -> str:
        text, path = link.groups()
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"{page.file.src_path} links to {path}, which is not there")
        shown = path.rstrip("/")
        return f"`{shown}`" if text.strip("`").rstrip("/") == shown else f"{text} (`{shown}`)"

    ups = r"\.\./" * (page.file.src_path.count("/") + 1)
    return re.sub(_OUT.format(ups=ups), path_instead, markdown)
