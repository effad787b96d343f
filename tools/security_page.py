"""Write the tables of docs/security.md from `offline/confined.py`, or prove them fresh."""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from xlaserve.offline import confined
from xlaserve.offline.confined import Confined

PAGE = Path(__file__).resolve().parent.parent / "docs" / "security.md"
_BEGIN = "<!-- tools/security_page.py writes what follows -->\n"
_END = "<!-- until here -->\n"
_HEAD = """
{text}

| work | input | runs in | memory | seconds | files | limits set in |
|---|---|---|---|---|---|---|
"""
_TABLES: Sequence[tuple[str, Sequence[Confined]]] = (
    ("Processes that the server or the system kills at a limit:", confined.PROCESSES),
    ("Texts and files whose size is checked before a library parses them:", confined.TEXTS),
    ("Other work that executes models, but not in a separate process:", confined.EXECUTIONS),
)


def tables() -> str:
    """Return all tables, as they appear between the two markers."""
    return "".join(_HEAD.format(text=text) + "".join(map(_row, rows)) for text, rows in _TABLES)


def page(before: str) -> str:
    """Return the page with regenerated tables; raises ValueError if the markers are missing."""
    pattern = re.compile(f"{re.escape(_BEGIN)}.*{re.escape(_END)}", re.DOTALL)
    if not pattern.search(before):
        raise ValueError(f"{PAGE}: the marks of the tables are missing")
    return pattern.sub(lambda _: f"{_BEGIN}{tables()}\n{_END}", before)


def _row(one: Confined) -> str:
    cells = one.name, one.data, one.where, one.memory, one.seconds, one.files, f"`{one.defined}`"
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if not fresh")
    before = PAGE.read_text()
    if not parser.parse_args().check:
        PAGE.write_text(page(before))
        return 0
    if before == page(before):
        print("docs/security.md is fresh")
        return 0
    print("docs/security.md is stale: run tools/security_page.py")
    return 1


if __name__ == "__main__":
    sys.exit(main())
