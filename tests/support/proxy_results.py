"""Test results recorded in docs/measurements/proxies.md, which the tests must reproduce."""

from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "measurements" / "proxies.md"


def results(proxy: str, checks: Iterable[str]) -> dict[str, str]:
    """Return the recorded result of each check for a proxy: "yes" or the reason for a failure."""
    rows = [
        [cell.strip() for cell in line.strip("|\n ").split("|")]
        for line in (PAGE.read_text() if PAGE.exists() else "").splitlines()
        if line.startswith("| ")
    ]
    found = {}
    for check in checks:
        (row,) = [row for row in rows if row[0] == check] or [[]]
        heads = [row for row in rows if row[0] == "check" and proxy in row]
        found[check] = row[heads[0].index(proxy)] if row and heads else "not in the page"
    return found
