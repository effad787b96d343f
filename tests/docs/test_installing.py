"""Until a release is on an index, every page installs from the checkout."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FROM_AN_INDEX = re.compile(r"\bpip install\b[^&|;]*(?<![\w./-])xlaserve\b")


def blocks(path: Path) -> list[str]:
    """Return the code lines of a page."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    return [line for line in text.splitlines() if line.startswith("    ")]


def test_no_page_installs_what_is_on_no_index() -> None:
    pages = [
        ROOT / "README.md",
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("examples/**/*.md"),
        *ROOT.glob("examples/notebooks/*.ipynb"),
    ]
    found = [
        f"{page.relative_to(ROOT)}: {line.strip()}"
        for page in pages
        for line in blocks(page)
        if FROM_AN_INDEX.search(line)
    ]

    assert not found
    assert FROM_AN_INDEX.search("    pip install 'xlaserve[onnx]' flax")
    assert not FROM_AN_INDEX.search("    pip install '.[onnx]' && xlaserve serve")
