"""Command line: runs the given rows in the given size and prints their figures."""

import argparse
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from acceptance.children import KINDS as CHILDREN
from acceptance.everything import NAMES
from acceptance.figures import Outcome
from acceptance.rows import ENVIRONMENTS, ROWS, Row, Size

_SAID = ("seconds", "programs", "first", "processes", "results")
"""Options that are passed on to rows."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Check rows; return 1 if a figure misses its criterion."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("environment", choices=ENVIRONMENTS)
    parser.add_argument("--rows", default="", help="ids, with commas between them; else all of it")
    parser.add_argument("--short", action="store_true", help="a size that takes some seconds")
    parser.add_argument("--long", action="store_true", help="a size that takes hours")
    parser.add_argument("--seconds", type=float, default=0, help="length of M2 and M4")
    parser.add_argument(
        "--without",
        default="",
        metavar="KINDS",
        help=f"kinds of clients that M4 leaves out, with commas: {', '.join(NAMES)}",
    )
    parser.add_argument(
        "--kinds", default="", help=f"the only children of D9, with commas: {', '.join(CHILDREN)}"
    )
    parser.add_argument("--programs", type=int, default=0, help="number of those of R1 and R2")
    parser.add_argument("--first", type=int, default=0, help="seed of the first of them")
    parser.add_argument("--processes", type=int, default=0, help="else as many as processors")
    parser.add_argument(
        "--results", type=Path, help="folder of their results, to go on where a run stopped"
    )
    parser.add_argument("--folder", type=Path, help="keep what the servers write here")
    given = parser.parse_args(arguments)
    size = Size.SHORT if given.short else Size.LONG if given.long else Size.WHOLE
    wanted = set(filter(None, given.rows.split(",")))
    rows = [row for row in ROWS if row.environment == given.environment and row.check]
    unknown = wanted - {row.id for row in rows}
    if unknown:
        parser.error(f"{given.environment} has no row {', '.join(sorted(unknown))}")
    without = tuple(filter(None, given.without.split(",")))
    if strangers := set(without) - set(NAMES):
        parser.error(f"there is no kind of client {', '.join(sorted(strangers))}")
    chosen = [row for row in rows if not wanted or row.id in wanted]
    kinds = tuple(filter(None, given.kinds.split(",")))
    if strangers := set(kinds) - set(CHILDREN):
        parser.error(f"there is no kind of child {', '.join(sorted(strangers))}")
    said = {"without": without, "kinds": kinds}
    said |= {name: getattr(given, name) for name in _SAID}
    outcomes = [_checked(row, size, said, given.folder) for row in chosen]
    failing = [row.id for row, outcome in zip(chosen, outcomes, strict=True) if not outcome.holds]
    print(f"{len(chosen)} rows, below their criterion: {', '.join(failing) or 'none'}", flush=True)
    return int(bool(failing))


def _checked(row: Row, size: Size, said: Mapping[str, Any], kept: Path | None) -> Outcome:
    print(f"{row.id} {row.what}", flush=True)
    began = time.monotonic()
    if kept is not None:
        folder = kept / row.id
        folder.mkdir(parents=True)
        outcome = row.run(folder, size, **said)
    else:
        with tempfile.TemporaryDirectory(prefix="acceptance-") as scratch:
            outcome = row.run(Path(scratch), size, **said)
    _print(outcome.figures)
    print(f"   {row.id} took {time.monotonic() - began:.0f} s", flush=True)
    return outcome


def _print(figures: Iterable[object]) -> None:
    for figure in figures:
        print(f"   {figure}", flush=True)
