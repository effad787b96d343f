"""A hook of mkdocs: links that lead out of docs/ are checked, and shown as paths of the source."""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
_OUT = r"\[([^\]]+)\]\({ups}([^)#]+)(?:#[^)]*)?\)"
"""Pattern of a link out of docs/, from a page at a given depth: one `..` more than its depth."""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the text with the paths of files in place of links; raises for a file that is not."""

    def path_instead(link: re.Match[str]) -> str:
        text, path = link.groups()
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"{page.file.src_path} links to {path}, which is not there")
        shown = path.rstrip("/")
        return f"`{shown}`" if text.strip("`").rstrip("/") == shown else f"{text} (`{shown}`)"

    ups = r"\.\./" * (page.file.src_path.count("/") + 1)
    return re.sub(_OUT.format(ups=ups), path_instead, markdown)
