"""Common search terms appear in a heading, on the page that answers them.

The site's search ranks headings above body text, so such a section is found first.
"""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from xlaserve.settings import Settings

DOCS = Path(__file__).resolve().parents[2] / "docs"

LOOKUPS = {
    "429": "errors.md",
    "503": "errors.md",
    "batch delay": "models.md",
    "bf16": "accelerators.md",
    "GPU": "accelerators.md",
    "health check": "operations.md",
    "Kubernetes": "kubernetes.md",
    "labels": "models.md",
    "logging": "operations.md",
    "OOM": "operations.md",
    "quota": "access.md",
    "rollback": "models.md",
    "timeout": "operations.md",
    "tokenizer": "generation.md",
}


def headings(page: Path) -> list[str]:
    """Return the headings of a page, without those in code."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    return re.findall(r"^#+ (.*)$", text, re.M)


@pytest.mark.parametrize(("word", "page"), sorted(LOOKUPS.items()))
def test_a_word_of_users_is_in_a_heading_of_the_page_that_answers(word: str, page: str) -> None:
    pattern = re.compile(rf"\b{re.escape(word)}s?\b", re.I)
    found = {path.name for path in DOCS.glob("*.md") if any(map(pattern.search, headings(path)))}

    assert page in found, f"a heading of {page} with '{word}', of those in {sorted(found)}"


def test_the_navigation_has_every_page_once_in_four_parts() -> None:
    site = (DOCS.parent / "tools" / "site" / "mkdocs.yml").read_text()
    _, _, navigation = site.partition("\nnav:\n")
    pages = re.findall(r"- ((?:measurements/)?[a-z0-9-]+\.md)", navigation)

    assert ["Tutorial", "Guides", "Reference", "Inside"] == re.findall(
        r"^  - (\w+):$", navigation, re.M
    )
    assert sorted(pages) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
    assert 30 >= sum("/" not in page for page in pages)


def test_every_page_of_the_tutorial_and_the_guides_begins_with_a_command() -> None:
    site = (DOCS.parent / "tools" / "site" / "mkdocs.yml").read_text()
    parts = site[site.index("  - Tutorial:") : site.index("  - Reference:")]
    pages = re.findall(r"- ([a-z0-9-]+\.md)", parts)
    code = re.compile(r"^(?:    \S|```(?:sh|python)$)", re.M)
    late = [
        page
        for page in pages
        if not code.search("\n## ".join((DOCS / page).read_text().split("\n## ")[:2]))
    ]

    assert 15 < len(pages)
    assert [] == late


def anchor(heading: str) -> str:
    """Return the anchor of a heading, as GitHub and the site make it."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", text.strip()))


def test_every_page_that_code_or_a_readme_names_is_there() -> None:
    root = DOCS.parent
    folders = ("server", "tools", "deploy", "examples", "tests/support", "tests/docs")
    files = [path for name in folders for path in (root / name).rglob("*") if path.is_file()]
    named = re.compile(r"\bdocs/([a-z0-9/-]+\.md)(?:#([a-z0-9_-]+))?")
    found = [
        (str(file.relative_to(root)), match[1], match[2])
        for file in (*files, *root.glob("*.md"))
        if file.suffix in (".py", ".md", ".toml", ".yaml", ".tpl", ".ipynb", ".html", ".txt")
        for match in named.finditer(file.read_text())
    ]
    wrong = [
        (file, page, section)
        for file, page, section in found
        if not (DOCS / page).is_file()
        or (section and section not in map(anchor, headings(DOCS / page)))
    ]

    assert 50 < len(found)
    assert [] == wrong


def test_no_page_gives_a_value_to_a_switch() -> None:
    """The command line has `--switch` and `--no-switch`; the variable takes true or false."""
    switches = {field.name for field in fields(Settings) if field.type in (bool, "bool")}
    pages = [*DOCS.rglob("*.md"), *DOCS.parent.glob("*.md")]
    wrong = [
        (page.name, flag)
        for page in pages
        for flag in re.findall(r"--([a-z-]+)=(?:true|false)\b", page.read_text())
        if flag.replace("-", "_") in switches
    ]

    assert "health_bodies" in switches
    assert [] == wrong
