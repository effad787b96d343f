"""Write the tables of docs/metrics.md from the code, or prove them fresh.

python tools/metrics_page.py [--check]
"""

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector

from xlaserve.http.metrics.generation_families import OF_GENERATORS
from xlaserve.http.metrics.metric_families import OF_MODELS, OF_VERSIONS
from xlaserve.http.metrics.metric_family import Family
from xlaserve.http.metrics.metric_folds import OF_WORKERS
from xlaserve.http.metrics.observing_families import OF_FETCHING, OF_OBSERVING
from xlaserve.http.metrics.program_families import OF_PROGRAMS
from xlaserve.http.metrics.server_families import OF_SERVER, OF_SHARED

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
_HEAD = "| metric | type | labels | meaning |\n|---|---|---|---|\n"
_TABLE = re.compile(re.escape(_HEAD) + r"(?:\|[^\n]*\n)*")


def families() -> list[list[Family[Any]]]:
    """Return the families of each table of the page, in page order."""
    return [
        [*OF_VERSIONS],
        [
            *OF_MODELS,
            *OF_SERVER,
            *OF_GENERATORS,
            *OF_SHARED,
            *OF_OBSERVING,
            *OF_FETCHING,
            *OF_PROGRAMS,
            *OF_WORKERS,
        ],
    ]


def names() -> set[str]:
    """Return the names of all metrics, including those of the process."""
    named = {family.name for table in families() for family in table}
    return named | {row[0] for row in _of_process()}


def histograms() -> set[str]:
    """Return the names of histograms."""
    return {family.name for table in families() for family in table if family.kind == "histogram"}


def page(text: str) -> str:
    """Return the page with regenerated tables and its prose unchanged."""
    tables = [*(map(_row, table) for table in families()), _process_rows()]
    parts = _TABLE.split(text)
    if len(parts) != len(tables) + 1:
        raise SystemExit(f"docs/metrics.md has {len(parts) - 1} tables, expected {len(tables)}")
    fresh = [parts[0]]
    for table, part in zip(tables, parts[1:], strict=True):
        fresh += [_HEAD, *table, part]
    return "".join(fresh)


def _row(family: Family[Any]) -> str:
    return f"| `{family.name}` | {family.kind} | {', '.join(family.labels)} | {family.help} |\n"


def _of_process() -> Sequence[tuple[str, str, str]]:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    found = []
    for family in registry.collect():
        suffix = "_total" if family.type == "counter" else ""
        found.append((family.name + suffix, family.type, family.documentation.rstrip(".")))
    return found


def _process_rows() -> Iterable[str]:
    return [f"| `{name}` | {kind} |  | {text} |\n" for name, kind, text in _of_process()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if not fresh")
    before = PAGE.read_text()
    fresh = page(before)
    if not parser.parse_args().check:
        PAGE.write_text(fresh)
        return 0
    print(
        f"docs/metrics.md is {'fresh' if before == fresh else 'stale: run tools/metrics_page.py'}"
    )
    return int(before != fresh)


if __name__ == "__main__":
    sys.exit(main())
